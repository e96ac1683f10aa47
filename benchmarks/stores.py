"""How fast the stores move bytes, beside what the machine can do and beside vLLM's own file tier.

One process, one thread a side. Host copies go through the transfer that an engine on CPU uses, out of and into KV
memory larger than any cache; memcpy copies the same pages between the same memories. Files are ucmcache's records,
with their checksums, beside the plain system calls that move as many bytes, and beside vLLM's `batch_store_block` and
`batch_load_block`, which check nothing. Every repetition measures all sides in turn, and a ratio is the median of the
repetitions' own.
"""

import argparse
import hashlib
import os
import shutil
import statistics
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import Neighbours, above, console, median_ratio, options, print_goals, table, write_report
from vllm.v1.kv_offload.tiering.fs.io import batch_load_block, batch_store_block

from ucmcache.connector.layout import Storages, unit_map
from ucmcache.connector.messages import UnitCopy
from ucmcache.connector.transfer import HostTransfer
from ucmcache.demo.report import Goal
from ucmcache.keys import group_tag
from ucmcache.store import record
from ucmcache.store.arena import ArenaPlan
from ucmcache.store.backends.file import FileBackend
from ucmcache.store.block import BlockStore
from ucmcache.store.memory import SlotMemory, take_memory
from ucmcache.store.pipeline import Call, Pipeline

KIB, MIB = 1 << 10, 1 << 20
PAGES = [32 * KIB, 64 * KIB, 256 * KIB, MIB, 8 * MIB]
OBJECTS = [32 * KIB, 256 * KIB, MIB, 4 * MIB, 8 * MIB]
NAMESPACE, SEED = b"benchmark".ljust(16), b"group".ljust(16)


def main() -> None:
    arguments = parse()
    neighbours = Neighbours()
    rows = [*host_copies(arguments), *files(arguments), *indexes(arguments), *collecting(arguments)]
    for row in rows:
        row["neighbour_cpus"] = round(neighbours.cpus(), 2)
    goals = list(judge(rows))
    print_goals(goals)
    write_report(arguments.json_file, rows, goals)


def parse() -> argparse.Namespace:
    parser = options("Speed of the stores beside memcpy, plain file calls and vLLM's file tier.")
    parser.add_argument("--folder", type=Path, help="where the files are written (default: a temporary folder)")
    return parser.parse_args()


# -- host memory -------------------------------------------------------------------------------------------------------


def host_copies(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Saves and loads of pages through HostTransfer, beside memcpy of the same pages."""
    total = (64 if arguments.quick else 512) * MIB
    rows = []
    for page in PAGES:
        blocks = total // page
        pool = torch.zeros(blocks + 1, page, dtype=torch.uint8)
        pool.random_(0, 256)
        storages = Storages()
        units = {0: unit_map({"layer": pool}, ["layer"], blocks + 1, storages)}
        plan = ArenaPlan(page, blocks, (0,))
        memory = take_memory(plan.rows * page)
        transfer = HostTransfer(storages, units, {0: SlotMemory(plan, memory)})
        order = np.random.default_rng(1).permutation(blocks)
        copies = [UnitCopy(0, int(slot), int(block) + 1) for slot, block in enumerate(order)]
        kv, slots = pool.numpy(), np.frombuffer(memory, dtype=np.uint8)[: blocks * page].reshape(blocks, page)

        def memcpy_out(copies: Sequence[UnitCopy] = copies, kv: Any = kv, slots: Any = slots) -> None:
            for _, slot, block in copies:
                np.copyto(slots[slot], kv[block])

        def memcpy_in(copies: Sequence[UnitCopy] = copies, kv: Any = kv, slots: Any = slots) -> None:
            for _, slot, block in copies:
                np.copyto(kv[block], slots[slot])

        for what, ours, theirs in (
            ("save", lambda t=transfer, c=copies: t.save(c), memcpy_out),
            ("load", lambda t=transfer, c=copies: t.load(c), memcpy_in),
        ):
            one, other = in_turn([ours, theirs], 3 if arguments.quick else 7)
            rows.append(
                {
                    "what": f"host {what}",
                    "bytes": page,
                    "gib_per_s": total / statistics.median(one) / (1 << 30),
                    "reference": "memcpy",
                    "ratio": median_ratio(other, one),
                }
            )
    show("host memory", rows)
    return rows


# -- files -------------------------------------------------------------------------------------------------------------


def files(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Writes and verified reads of records, beside plain calls and vLLM's file tier."""
    rows = []
    for size in OBJECTS:
        count = max(2, (32 if arguments.quick else 128) * MIB // size)
        with folder_of(arguments) as folder:
            rows += of_one_size(folder, size, count, 3 if arguments.quick else 7)
    show("files", rows)
    return rows


def of_one_size(folder: Path, size: int, count: int, times: int) -> list[dict[str, Any]]:
    source = memoryview(take_memory(count * size))
    np.frombuffer(source, dtype=np.uint8)[:] = np.random.default_rng(2).integers(0, 256, count * size, dtype=np.uint8)
    target = memoryview(take_memory(count * size))
    parts = [source[at : at + size] for at in range(0, count * size, size)]
    outs = [target[at : at + size] for at in range(0, count * size, size)]
    rounds = iter(range(10_000))
    # A root in use has all its folders.
    written = {"ours": folder / "ours"}
    shards = [written["ours"] / f"ns-{NAMESPACE.hex()}" / "r0" / f"{shard:02x}" for shard in range(256)]
    for shard in shards:
        shard.mkdir(parents=True)
    bucket = FileBackend(written["ours"]).bucket(NAMESPACE, 0)
    keys: list[record.RecordKey] = []

    def new_keys() -> None:
        old, number = list(keys), next(rounds)
        keys[:] = [
            record.RecordKey(NAMESPACE, SEED, "block", hashlib.sha256(b"%d/%d" % (number, i)).digest(), b"", i + 1, 0)
            for i in range(count)
        ]
        for key in old:
            bucket.delete(key.id)

    def write_ours() -> None:
        for key, part in zip(keys, parts, strict=True):
            record.write(bucket, key, part)

    def write_plain(direct: bool) -> Callable[[], None]:
        name = f"plain {'direct' if direct else 'cached'}"

        def write() -> None:
            written[name] = folder / f"plain{next(rounds)}"
            written[name].mkdir()
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0)
            for i, part in enumerate(parts):
                fd = os.open(written[name] / str(i), flags, 0o600)
                if os.pwrite(fd, part, 0) != size:
                    raise OSError("a short write")
                os.close(fd)

        return write

    def write_vllm() -> None:
        written["vllm"] = folder / f"vllm{next(rounds)}"
        batch_store_block([str(written["vllm"] / str(i)) for i in range(count)], source, offsets, size)

    def read_ours() -> None:
        for key, out in zip(keys, outs, strict=True):
            if not record.read_into(bucket, key, out):
                raise OSError("a record is gone")

    def read_plain() -> None:
        for i, out in enumerate(outs):
            fd = os.open(written["plain cached"] / str(i), os.O_RDONLY)
            if os.preadv(fd, [out], 0) != size:
                raise OSError("a short read")
            os.close(fd)

    def read_vllm() -> None:
        paths = [str(written["vllm"] / str(i)) for i in range(count)]
        batch_load_block(paths, target, offsets, size, use_o_direct=False)

    offsets = list(range(0, count * size, size))

    def tidy() -> None:
        for old in folder.iterdir():
            if old not in written.values():
                shutil.rmtree(old)
        os.sync()  # what was written before is not paid for by the next

    writes = in_turn([write_ours, write_plain(True), write_plain(False), write_vllm], times, tidy, new_keys)
    direct, cached = (median_ratio(other, writes[0]) for other in writes[1:3])
    cold = in_turn([read_ours, read_plain], times, lambda: forget(written["ours"], written["plain cached"]))
    for name in list(written):
        warm(written[name])
    reads = in_turn([read_ours, read_plain, read_vllm], times)

    def row(what: str, times_s: Sequence[float], reference: str, ratio: float) -> dict[str, Any]:
        speed = count * size / statistics.median(times_s) / (1 << 30)
        return {"what": what, "bytes": size, "gib_per_s": speed, "reference": reference, "ratio": ratio}

    return [
        row("file write", writes[0], "pwrite, O_DIRECT", direct),
        row("file write", writes[0], "pwrite, page cache", cached),
        row("file write", writes[0], "vLLM fs tier", median_ratio(writes[3], writes[0])),
        row("file read", cold[0], "preadv, from the disk", median_ratio(cold[1], cold[0])),
        row("file read", reads[0], "preadv, from the page cache", median_ratio(reads[1], reads[0])),
        row("file read", reads[0], "vLLM fs tier", median_ratio(reads[2], reads[0])),
    ]


def forget(*folders: Path) -> None:
    """Have no file of the folders in the page cache."""
    os.sync()
    for path in (path for folder in folders for path in folder.rglob("*") if path.is_file()):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def warm(folder: Path) -> None:
    """Have all files of a folder in the page cache: all sides read from there."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.read_bytes()


# -- indexes -----------------------------------------------------------------------------------------------------------


def indexes(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Taking in a listing of a million ids, and what lookups take meanwhile and while writes are queued."""
    entries = 100_000 if arguments.quick else 1_000_000
    tag = group_tag(NAMESPACE, SEED)
    raw = np.random.default_rng(3).bytes(10 * entries)
    heads = [raw[i : i + 10] for i in range(0, len(raw), 10)]
    prompt = [head + bytes(22) for head in heads[:8192]]
    before = current_bytes()
    store = BlockStore([ArenaPlan(16, 16, (0,))], {0: SEED}, NAMESPACE)
    lookups: list[float] = []
    began_s = time.perf_counter()
    for start in range(0, entries, 4096):
        store.add_stored(head + tag for head in heads[start : start + 4096])
        if start % (16 * 4096) == 0:
            lookups.append(timed(lambda: store.presences([0], prompt)))
    open_s = time.perf_counter() - began_s - sum(lookups)
    taken = current_bytes() - before
    chunk_s = open_s / (entries / 4096)
    tracemalloc.start()
    small = BlockStore([ArenaPlan(16, 16, (0,))], {0: SEED}, NAMESPACE)
    base = tracemalloc.get_traced_memory()[0]
    small.add_stored(head + tag for head in heads[:100_000])
    entry_bytes = (tracemalloc.get_traced_memory()[0] - base) / 100_000
    tracemalloc.stop()
    idle = statistics.median(timed(lambda: store.presences([0], prompt)) for _ in range(20))
    with folder_of(arguments) as folder:
        busy = under_writes(folder, lambda: store.presences([0], prompt))
    with folder_of(arguments) as folder:
        scan_s, scanned = listing(folder, 20_000 if arguments.quick else 100_000)
    rows = [
        {"what": "index entry", "bytes": entries, "value": entry_bytes, "unit": "bytes", "resident": taken / entries},
        {"what": "index open", "bytes": entries, "value": open_s, "unit": "s"},
        {"what": "index part of 4,096", "bytes": entries, "value": chunk_s * 1e3, "unit": "ms"},
        {"what": "lookup of 8,192 blocks while opening", "bytes": entries, "value": max(lookups) * 1e3, "unit": "ms"},
        {"what": "lookup of 8,192 blocks, idle", "bytes": entries, "value": idle * 1e3, "unit": "ms"},
        {"what": "lookup of 8,192 blocks under writes", "bytes": entries, "value": busy * 1e3, "unit": "ms"},
        {"what": "listing of files", "bytes": scanned, "value": scanned / scan_s, "unit": "files/s"},
    ]
    show_values("index", rows)
    return rows


def under_writes(folder: Path, lookup: Callable[[], object]) -> float:
    """Median of lookups while all storage threads write without end."""
    bucket = FileBackend(folder).bucket(NAMESPACE, 0)
    payload = bytes(MIB)
    pipeline = Pipeline(60.0)
    stop = threading.Event()

    def write(number: int) -> Call:
        def run() -> str:
            key = record.RecordKey(NAMESPACE, SEED, "block", b"%d" % (number % 64), b"", 1, 0)
            record.write(bucket, key, payload)
            return ""

        def done(cause: str, error: Exception | None) -> None:
            if not stop.is_set():
                pipeline.submit([write(number + 8)])

        return Call(run, done)

    pipeline.submit([write(number) for number in range(8)])
    times = []
    for _ in range(50):
        times.append(timed(lookup))
        time.sleep(0.01)
    stop.set()
    pipeline.close(10.0)
    return statistics.median(times)


def listing(folder: Path, count: int) -> tuple[float, int]:
    """Seconds to list so many objects, which are hard links to one file of each shard."""
    backend = FileBackend(folder)
    bucket = backend.bucket(NAMESPACE, 0)
    ids = [hashlib.md5(b"%d" % i, usedforsecurity=False).digest() for i in range(count)]
    first: dict[str, Path] = {}
    for id in ids:
        shard = folder / f"ns-{NAMESPACE.hex()}" / "r0" / id.hex()[:2]
        if shard.name not in first:
            bucket.put(id, [b"x"])
            first[shard.name] = shard / f"{id.hex()}.kv"
        else:
            os.link(first[shard.name], shard / f"{id.hex()}.kv")
    began_s = time.perf_counter()
    found = sum(1 for _ in bucket.scan())
    if found != count:
        raise RuntimeError(f"{found} of {count} objects were listed")
    return time.perf_counter() - began_s, count


# -- making room -------------------------------------------------------------------------------------------------------


def collecting(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Objects that the collector removes in a second, with the listing that it takes."""
    count = 2_000 if arguments.quick else 20_000
    with folder_of(arguments) as folder:
        unlimited = FileBackend(folder)
        bucket = unlimited.bucket(NAMESPACE, 0)
        for i in range(count):
            bucket.put(hashlib.md5(b"%d" % i, usedforsecurity=False).digest(), [b"x"])
        backend = FileBackend(folder, count * 4 * KIB // 2)
        began_s = time.perf_counter()
        with suppress(Exception):  # the first put may not wait for so much
            backend.bucket(NAMESPACE, 0).put(bytes(16), [b"x"])
        while unlimited.used_bytes() > count * 4 * KIB // 2:
            time.sleep(0.01)
        took_s = time.perf_counter() - began_s
        removed = count - unlimited.used_bytes() // (4 * KIB)
        backend.close()
    rows = [{"what": "collector", "bytes": count, "value": removed / took_s, "unit": "objects/s"}]
    show_values("making room", rows)
    return rows


# -- shared ------------------------------------------------------------------------------------------------------------


class folder_of:  # noqa: N801
    """A folder for one measurement, removed afterwards."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._folder = tempfile.mkdtemp(dir=arguments.folder)

    def __enter__(self) -> Path:
        return Path(self._folder)

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder)


def timed(body: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    began_s = time.perf_counter()
    body()
    return time.perf_counter() - began_s


def in_turn(
    bodies: Sequence[Callable[[], object]],
    times: int,
    between: Callable[[], None] = lambda: None,
    before_round: Callable[[], None] = lambda: None,
) -> list[list[float]]:
    """Seconds of each body, one after the other, `times` times after a first round that does not count."""
    results: list[list[float]] = [[] for _ in bodies]
    for number in range(times + 1):
        before_round()
        for body, result in zip(bodies, results, strict=True):
            between()
            seconds = timed(body)
            if number:
                result.append(seconds)
    return results


def current_bytes() -> int:
    """Memory that this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def show(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    lines = [
        [row["what"], f"{row['bytes'] // KIB:,}", f"{row['gib_per_s']:.2f}", row["reference"], f"{row['ratio']:.2f}"]
        for row in rows
    ]
    console().print(table(title, ["", "KiB", "GiB/s", "of", "ratio"], lines))


def show_values(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    lines = [[row["what"], f"{row['bytes']:,}", f"{row['value']:,.1f}", row["unit"]] for row in rows]
    console().print(table(title, ["", "entries", "value", "unit"], lines))


def judge(rows: Sequence[Mapping[str, Any]]) -> Iterator[Goal]:
    """The issue's figures."""

    def worst(what: str, references: Sequence[str], from_bytes: int) -> float:
        # Of several references the faster one counts, which is the one with the lower ratio.
        return min(
            float(row["ratio"])
            for row in rows
            if row["what"] == what and row["bytes"] >= from_bytes and row["reference"] in references
        )

    def value(what: str) -> float:
        return next(float(row["value"]) for row in rows if row["what"] == what)

    yield above("host_save_of_memcpy", worst("host save", ["memcpy"], 64 * KIB), 0.85)
    yield above("host_load_of_memcpy", worst("host load", ["memcpy"], 64 * KIB), 0.85)
    yield above("file_read_of_preadv_from_disk", worst("file read", ["preadv, from the disk"], MIB), 0.9)
    yield above("file_read_of_preadv_from_page_cache", worst("file read", ["preadv, from the page cache"], MIB), 0.9)
    plain = ["pwrite, O_DIRECT", "pwrite, page cache"]
    yield above("file_write_of_pwrite", worst("file write", plain, MIB), 0.85)
    yield above("file_write_of_vllm_fs_tier", worst("file write", ["vLLM fs tier"], 0), 1.0)
    yield above("file_read_of_vllm_fs_tier", worst("file read", ["vLLM fs tier"], 0), 1.0)
    entry = value("index entry")
    yield Goal("index_bytes_per_entry", round(entry, 1), "<= 250", "bytes", entry <= 250)
    opened = value("index open")
    yield Goal("index_open_s", round(opened, 2), "<= 10", "s", opened <= 10)
    part = value("index part of 4,096")
    yield Goal("index_longest_wait_ms", round(part, 2), "<= 20", "ms", part <= 20)


if __name__ == "__main__":
    main()
