"""How fast the stores move bytes, beside what the machine can do and beside vLLM's own file tier.

One process. Host copies are made by one thread on each side; ucmcache's go through the transfer that an engine on CPU
uses, out of and into KV memory larger than any cache, and memcpy copies the same pages between the same memories. Files
are ucmcache's records, with their checksums, moved by the pipeline that an engine's go through, beside the plain system
calls that move as many bytes, and beside vLLM's `batch_store_block` and `batch_load_block`, which check nothing; each
on as many threads as the pipeline has. Every repetition measures all sides in turn, and a ratio is the median of the
repetitions' own.

A write ends where its call ends. Those with O_DIRECT, ucmcache's large ones among them, are on the disk then; those
into the page cache are not, so they are measured twice: as they are, and with the fdatasync that makes them equal.
No file is removed before the end: for some minutes, ext4 looks at each removed file before it makes a new one.
"""

import argparse
import hashlib
import os
import queue
import shutil
import statistics
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from _common import Neighbours, above, below, console, median_ratio, ms, options, print_goals, table, write_report
from vllm.v1.kv_offload.tiering.fs.io import batch_load_block, batch_store_block, probe_o_direct

from ucmcache.connector.layout import Storages, unit_map
from ucmcache.connector.messages import UnitCopy
from ucmcache.connector.transfer import HostTransfer
from ucmcache.demo.report import Goal
from ucmcache.errors import BackendError
from ucmcache.store import pipeline, record
from ucmcache.store.arena import ArenaPlan, Presence
from ucmcache.store.backend import Bucket
from ucmcache.store.backends.file import FileBackend
from ucmcache.store.block import BlockStore
from ucmcache.store.memory import SlotMemory, take_memory
from ucmcache.store.pipeline import Call, Pipeline

KIB, MIB = 1 << 10, 1 << 20
SIZES = [32 * KIB, 64 * KIB, 256 * KIB, MIB, 8 * MIB]
LAYERS = 4
NAMESPACE, GROUP_SEED = b"benchmark".ljust(16), b"group".ljust(16)
READERS, WRITERS = pipeline.THREADS, max(1, pipeline.THREADS - 1)
_SHARDS = 256
_PROMPT_BLOCKS = 8192
_LISTED_AT_ONCE = 4096
_SLOW_NEW_FILE_S = 100e-6

Row = dict[str, Any]
_crew = ThreadPoolExecutor(READERS)


# -- host memory -------------------------------------------------------------------------------------------------------


def host_copies(folder: Path, quick: bool) -> list[Row]:
    """Saves and loads of units of several layers' pages, beside memcpy of each of these pages."""
    return [row for page in SIZES for row in _copies_of(page, (128 if quick else 512) * MIB, 3 if quick else 9)]


def _copies_of(page: int, total: int, times: int) -> list[Row]:
    blocks, unit = total // page // LAYERS, page * LAYERS
    layers = {f"layer{i}": torch.empty(blocks, page, dtype=torch.uint8).random_(0, 256) for i in range(LAYERS)}
    storages, plan = Storages(), ArenaPlan(unit, blocks, (0,))
    units = {0: unit_map(layers, list(layers), blocks, storages)}
    memory = take_memory(blocks * unit)
    transfer = HostTransfer(storages, units, {0: SlotMemory(plan, memory)})
    order = np.random.default_rng(1).permutation(blocks)
    copies = [UnitCopy(0, slot, int(block)) for slot, block in enumerate(order)]
    slots = np.frombuffer(memory, dtype=np.uint8)[: blocks * unit].reshape(blocks, LAYERS, page)
    pages = [layer.numpy() for layer in layers.values()]
    pairs = [(slots[slot, i], pages[i][block]) for _, slot, block in copies for i in range(LAYERS)]

    def memcpy_out() -> None:
        for slot, block in pairs:
            np.copyto(slot, block)

    def memcpy_in() -> None:
        for slot, block in pairs:
            np.copyto(block, slot)

    sides = [lambda: transfer.save(copies), memcpy_out, lambda: transfer.load(copies), memcpy_in]
    save, out, load, into = in_turn(sides, times)
    return [
        speed_row("host save", page, total, save, "memcpy", out),
        speed_row("host load", page, total, load, "memcpy", into),
    ]


# -- files -------------------------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """Objects of one size: the bytes that are written, and where they are read to."""

    size: int
    source: memoryview
    target: memoryview

    @property
    def offsets(self) -> range:
        """Where each object begins, in both."""
        return range(0, len(self.source), self.size)


class Side(Protocol):
    """One way to write a batch into new files, and to read it back."""

    def begin(self, number: int) -> None:
        """What comes is round `number`: other files than before."""

    def write(self) -> None:
        """Write the batch."""

    def read(self) -> None:
        """Read the batch that was written last."""

    def files(self) -> Iterable[Path]:
        """The files of this round."""


class Ours:
    """Records in a bucket whose folders are all there, as in any that is in use."""

    def __init__(self, folder: Path, batch: Batch) -> None:
        self._batch = batch
        self._folder = folder / "ours"
        self._bucket = bucket_in_use(self._folder)
        self._keys: list[record.RecordKey] = []
        self._pipeline = Pipeline(60.0)
        self._failed: list[object] = []

    def begin(self, number: int) -> None:
        prefixes = (hashlib.sha256(b"%d/%d" % (number, at)).digest() for at in self._batch.offsets)
        self._keys = [record.RecordKey(NAMESPACE, GROUP_SEED, "block", one, b"", 16, 0) for one in prefixes]

    def write(self) -> None:
        self._all(self._write_one, is_read=False)

    def read(self) -> None:
        self._all(self._read_one, is_read=True)

    def _all(self, one: Callable[[record.RecordKey, memoryview], str], is_read: bool) -> None:
        size, bytes_of = self._batch.size, self._batch.target if is_read else self._batch.source
        calls = [
            Call(partial(one, key, bytes_of[at : at + size]), self._done, is_read)
            for key, at in zip(self._keys, self._batch.offsets, strict=True)
        ]
        self._pipeline.submit(calls)
        if not self._pipeline.wait_idle(60.0) or self._failed:
            raise OSError(f"not every record was moved: {self._failed}")

    def _write_one(self, key: record.RecordKey, payload: memoryview) -> str:
        record.write(self._bucket, key, payload)
        return ""

    def _read_one(self, key: record.RecordKey, payload: memoryview) -> str:
        return "" if record.read_into(self._bucket, key, payload) else "gone"

    def _done(self, cause: str, error: Exception | None) -> None:
        if cause:
            self._failed.append(error or cause)

    def files(self) -> Iterable[Path]:
        return [path_of(self._folder, key.id) for key in self._keys]


class Plain:
    """Nothing but the system calls, in one folder."""

    def __init__(self, folder: Path, batch: Batch, name: str, *, direct: bool = False, flush: bool = False) -> None:
        self._batch = batch
        self._folder = folder / name
        self._folder.mkdir()
        self._flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0)
        self._flush = flush
        self._paths: list[str] = []

    def begin(self, number: int) -> None:
        self._paths = [str(self._folder / f"{number}-{at}") for at in self._batch.offsets]

    def write(self) -> None:
        in_shares(WRITERS, self._write, self._paths, self._batch.offsets)

    def read(self) -> None:
        in_shares(READERS, self._read, self._paths, self._batch.offsets)

    def _write(self, paths: Sequence[str], offsets: Sequence[int]) -> None:
        size, opened = self._batch.size, []
        for path, at in zip(paths, offsets, strict=True):
            fd = os.open(path, self._flags, 0o600)
            if os.pwrite(fd, self._batch.source[at : at + size], 0) != size:
                raise OSError(f"a short write to {path}")
            if self._flush:
                opened.append(fd)
            else:
                os.close(fd)
        for fd in opened:  # all at once, so that the disk is kept busy
            os.fdatasync(fd)
            os.close(fd)

    def _read(self, paths: Sequence[str], offsets: Sequence[int]) -> None:
        size = self._batch.size
        for path, at in zip(paths, offsets, strict=True):
            fd = os.open(path, os.O_RDONLY)
            if os.preadv(fd, [self._batch.target[at : at + size]], 0) != size:
                raise OSError(f"a short read of {path}")
            os.close(fd)

    def files(self) -> Iterable[Path]:
        return map(Path, self._paths)


class FsTier:
    """vLLM's file tier, in one folder; `direct` is whether it goes around the page cache, as it does where it can."""

    def __init__(self, folder: Path, batch: Batch, direct: bool) -> None:
        self._batch = batch
        self._direct = direct
        self._folder = folder / "tier"
        self._folder.mkdir(exist_ok=True)
        self._offsets = list(batch.offsets)
        self._paths: list[str] = []

    def begin(self, number: int) -> None:
        self._paths = [str(self._folder / f"{number}-{at}.bin") for at in self._offsets]

    def write(self) -> None:
        in_shares(WRITERS, self._write, self._paths, self._offsets)

    def read(self) -> None:
        in_shares(READERS, self._read, self._paths, self._offsets)

    def _write(self, paths: list[str], offsets: list[int]) -> None:
        batch_store_block(paths, self._batch.source, offsets, self._batch.size, self._direct)

    def _read(self, paths: list[str], offsets: list[int]) -> None:
        batch_load_block(paths, self._batch.target, offsets, self._batch.size, self._direct)

    def files(self) -> Iterable[Path]:
        return map(Path, self._paths)


def in_shares(threads: int, body: Callable[[Any, Any], None], paths: Sequence[str], offsets: Sequence[int]) -> None:
    """Call `body` on so many threads, each with its share of the objects, taken in turn."""
    calls = [
        _crew.submit(body, paths[first::threads], offsets[first::threads]) for first in range(min(threads, len(paths)))
    ]
    for call in calls:
        call.result()


def files(folder: Path, quick: bool) -> list[Row]:
    """Writes and verified reads of records, beside plain calls and vLLM's file tier."""
    total, times = (32 if quick else 64) * MIB, 3 if quick else 9
    source = memoryview(take_memory(total))
    np.frombuffer(source, dtype=np.uint8)[:] = np.random.default_rng(2).integers(0, 256, total, dtype=np.uint8)
    target = memoryview(take_memory(total))
    rows = []
    for size in SIZES:
        below_folder = folder / str(size)
        below_folder.mkdir()
        rows += _files_of(below_folder, Batch(size, source, target), times)
    return rows


def _files_of(folder: Path, batch: Batch, times: int) -> list[Row]:
    tier = FsTier(folder, batch, direct=bool(probe_o_direct(str(folder))))
    ours, cached = Ours(folder, batch), Plain(folder, batch, "cached")
    writers: list[Side] = [
        ours,
        Plain(folder, batch, "direct", direct=True),
        Plain(folder, batch, "flushed", flush=True),
        cached,
        tier,
    ]

    def next_round(number: int) -> None:
        for side in writers:
            if number:  # room on the disk, while the files stay
                for path in side.files():
                    os.truncate(path, 0)
            side.begin(number)

    total = len(batch.source)
    # What was written before is not paid for by the next.
    writes = in_turn([side.write for side in writers], times, os.sync, next_round)
    names = ["pwrite, O_DIRECT", "pwrite + fdatasync", "pwrite, page cache", "vLLM fs tier"]
    rows = [
        speed_row("file write", batch.size, total, writes[0], name, other)
        for name, other in zip(names, writes[1:], strict=True)
    ]
    tier_cached = FsTier(folder, batch, direct=False)
    tier_cached.begin(times)
    readers: list[Side] = [ours, cached, tier, tier_cached]

    def forget() -> None:
        for path in (path for side in readers for path in side.files()):
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    os.sync()
    names = ["preadv", "vLLM fs tier", "vLLM fs tier, page cache"]
    for what, before in (("file read, disk", forget), ("file read, page cache", lambda: None)):
        if before is not forget:
            for side in readers:
                list(map(Path.read_bytes, side.files()))
        reads = in_turn([side.read for side in readers], times, before)
        rows += [
            speed_row(what, batch.size, total, reads[0], name, other)
            for name, other in zip(names, reads[1:], strict=True)
        ]
    if bytes(batch.target) != bytes(batch.source):
        raise RuntimeError(f"objects of {batch.size} bytes were not read as they were written")
    return rows


# -- the index ---------------------------------------------------------------------------------------------------------


def index(folder: Path, quick: bool) -> list[Row]:
    """Opening a root of many objects as an engine does, and what lookups take meanwhile."""
    entries = 100_000 if quick else 1_000_000
    ids = _linked(folder, entries)
    bucket = FileBackend(folder).bucket(NAMESPACE, 0)
    prompt = [id[:10] + bytes(22) for id in ids[:_PROMPT_BLOCKS]]
    store = new_store()
    idle = [timed(lambda: store.presences([0], prompt)) for _ in range(50)]
    parts: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
    lister = threading.Thread(target=_list, args=(bucket, parts))
    began_s = time.perf_counter()
    lister.start()
    lookups, waits = [], []
    while part := parts.get():
        waits.append(timed(partial(store.add_stored, part)))
        lookups.append(timed(lambda: store.presences([0], prompt)))
    open_s = time.perf_counter() - began_s
    lister.join()
    if not (store.presences([0], prompt) == Presence.STORED).all():
        raise RuntimeError("not every object that is in the root was found")
    full = [timed(lambda: store.presences([0], prompt)) for _ in range(50)]
    return [
        {"what": "index entry", "entries": entries, "value": _entry_bytes(ids), "unit": "bytes"},
        {"what": "opening, with lookups", "entries": entries, "value": open_s, "unit": "s"},
        {"what": "longest part of it", "entries": entries, "value": max(waits) * 1e3, "unit": "ms"},
        *_lookup_rows("empty", idle),
        *_lookup_rows("while opening", lookups),
        *_lookup_rows("opened", full),
    ]


def _linked(folder: Path, count: int) -> list[bytes]:
    """Ids of so many objects below `folder`; those of a shard are names of one file, to be made in reasonable time."""
    bucket_in_use(folder)
    random = np.random.default_rng(3).bytes(10 * count)
    tag = record.RecordKey(NAMESPACE, GROUP_SEED, "block", b"any", b"", 0, 0).id[10:]
    ids = [random[at : at + 10] + tag for at in range(0, len(random), 10)]
    first = [path_of(folder, shard_id(shard)) for shard in range(_SHARDS)]
    for id in ids:
        os.link(first[id[0]], path_of(folder, id))
    return ids


def _list(bucket: Bucket, parts: "queue.SimpleQueue[list[bytes]]") -> None:
    part = []
    for id in bucket.scan():
        part.append(id)
        if len(part) == _LISTED_AT_ONCE:
            parts.put(part)
            part = []
    if part:
        parts.put(part)
    parts.put([])


def _entry_bytes(ids: Sequence[bytes]) -> float:
    ids = ids[:100_000]  # as the index knows no more of the rest, and tracing is slow
    tracemalloc.start()
    store = new_store()
    before = tracemalloc.get_traced_memory()[0]
    store.add_stored(bytes(bytearray(id)) for id in ids)
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return taken / len(ids)


def saturated(folder: Path, quick: bool) -> list[Row]:
    """What lookups take while the threads that write always have something to write."""
    bucket, payload = bucket_in_use(folder), memoryview(take_memory(MIB))
    calls, stopped = Pipeline(60.0), threading.Event()
    store = new_store()
    prompt = [hashlib.sha256(b"%d" % i).digest() for i in range(_PROMPT_BLOCKS)]
    store.add_stored(prefix[:10] + bytes(6) for prefix in prompt)
    written = []

    def call(number: int) -> Call:
        key = record.RecordKey(NAMESPACE, GROUP_SEED, "block", b"%d" % (number % 512), b"", 16, 0)

        def run() -> str:
            written.append(record.write(bucket, key, payload))
            return ""

        def done(cause: str, error: Exception | None) -> None:
            if not stopped.is_set():
                calls.submit([call(number + 8)])

        return Call(run, done)

    idle = [timed(lambda: store.presences([0], prompt)) for _ in range(50)]
    calls.submit([call(number) for number in range(8)])
    busy, began_s = [], time.perf_counter()
    while time.perf_counter() - began_s < (2 if quick else 10):
        busy.append(timed(lambda: store.presences([0], prompt)))
        time.sleep(0.005)
    speed = sum(written) / (time.perf_counter() - began_s) / (1 << 30)
    stopped.set()
    calls.close(10.0)
    return [
        *_lookup_rows("no writes", idle),
        *_lookup_rows("writer saturated", busy),
        {"what": "written meanwhile", "entries": len(written), "value": speed, "unit": "GiB/s"},
    ]


def _lookup_rows(when: str, times_s: Sequence[float]) -> list[Row]:
    return [
        {"what": f"lookup, {when}: {which}", "entries": _PROMPT_BLOCKS, "value": value * 1e3, "unit": "ms"}
        for which, value in (("median", statistics.median(times_s)), ("longest", max(times_s)))
    ]


# -- making room -------------------------------------------------------------------------------------------------------


def collecting(folder: Path, quick: bool) -> list[Row]:
    """Objects that the collector removes in a second from a root that is full, with the listing that it takes."""
    count = 5_000 if quick else 30_000
    bucket = bucket_in_use(folder)
    ids = [hashlib.sha256(b"%d" % i).digest()[:16] for i in range(count)]
    for id in ids:
        bucket.put(id, [b"x"])
    capacity_bytes = FileBackend(folder).used_bytes() // 2
    backend = FileBackend(folder, capacity_bytes)
    began_s = time.perf_counter()
    with suppress(BackendError):  # the first put may not wait for so much
        backend.bucket(NAMESPACE, 0).put(bytes(16), [b"x"])
    before, left = 0, _objects(folder)
    while left > count // 2 or left != before:  # until it has begun, and ended
        time.sleep(0.02)
        before, left = left, _objects(folder)
    speed = (count - left) / (time.perf_counter() - began_s)
    backend.close()
    return [{"what": "collector", "entries": count, "value": speed, "unit": "objects/s"}]


def _objects(folder: Path) -> int:
    return sum(len(os.listdir(path_of(folder, shard_id(shard)).parent)) for shard in range(_SHARDS))


# -- shared ------------------------------------------------------------------------------------------------------------


def path_of(root: Path, id: bytes) -> Path:
    """The file of an object of the benchmark's bucket."""
    return root / f"ns-{NAMESPACE.hex()}" / "r0" / id.hex()[:2] / f"{id.hex()}.kv"


def bucket_in_use(root: Path) -> Bucket:
    """A bucket that has an object in every folder it can have."""
    bucket = FileBackend(root).bucket(NAMESPACE, 0)
    for shard in range(_SHARDS):
        bucket.put(shard_id(shard), [b"x"])
    return bucket


def shard_id(shard: int) -> bytes:
    """An id of a shard, which no prefix of the benchmark has."""
    return bytes([shard]) + bytes(15)


def new_store() -> BlockStore:
    """An index of one group, with hardly any slots."""
    return BlockStore([ArenaPlan(16, 16, (0,))], {0: GROUP_SEED}, NAMESPACE)


def timed(body: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    began_s = time.perf_counter()
    body()
    return time.perf_counter() - began_s


def in_turn(
    bodies: Sequence[Callable[[], object]],
    times: int,
    before_each: Callable[[], None] = lambda: None,
    before_round: Callable[[int], None] = lambda number: None,
) -> list[list[float]]:
    """Seconds of each body, one after the other, `times` times after a first round that does not count."""
    results: list[list[float]] = [[] for _ in bodies]
    for number in range(times + 1):
        before_round(number)
        for body, result in zip(bodies, results, strict=True):
            before_each()
            seconds = timed(body)
            if number:
                result.append(seconds)
    return results


def speed_row(what: str, size: int, total: int, ours: Sequence[float], reference: str, theirs: Sequence[float]) -> Row:
    """A row that compares the times of `total` bytes in pieces of `size`; a ratio above 1 is faster than they."""
    row = {"what": what, "bytes": size, "reference": reference, "ratio": median_ratio(theirs, ours)}
    for name, times_s in (("ours_gib_per_s", ours), ("reference_gib_per_s", theirs)):
        row[name] = total / statistics.median(times_s) / (1 << 30)
    return row


def show(title: str, rows: Sequence[Row]) -> None:
    """The rows of one section."""
    heads: list[str]
    if "ratio" in rows[0]:
        heads = ["", "KiB", "GiB/s", "beside", "GiB/s", "ratio"]
        lines = [
            [
                row["what"],
                f"{row['bytes'] // KIB:,}",
                f"{row['ours_gib_per_s']:.2f}",
                row["reference"],
                f"{row['reference_gib_per_s']:.2f}",
                f"{row['ratio']:.2f}",
            ]
            for row in rows
        ]
    else:
        heads = ["", "entries", "value", "unit"]
        lines = [[row["what"], f"{row['entries']:,}", f"{row['value']:,.2f}", row["unit"]] for row in rows]
    console().print(table(title, heads, lines))


def goals_of(rows: Sequence[Mapping[str, Any]]) -> list[Goal]:
    """The figures of the design, for the worst size and, of several references, the faster one."""

    def worst(what: str, references: Iterable[str], from_bytes: int = 0) -> float:
        wanted = {(what, reference) for reference in references}
        return min(
            float(row["ratio"])
            for row in rows
            if (row["what"], row.get("reference")) in wanted and row["bytes"] >= from_bytes
        )

    def value(what: str) -> float:
        return float(next(row["value"] for row in rows if row["what"] == what))

    on_disk = ("pwrite, O_DIRECT", "pwrite + fdatasync")
    return [
        above("host_save_of_memcpy", worst("host save", ["memcpy"], 64 * KIB), 0.85),
        above("host_load_of_memcpy", worst("host load", ["memcpy"], 64 * KIB), 0.85),
        above("file_write_of_pwrite", worst("file write", on_disk, MIB), 0.85),
        above("file_read_of_preadv_from_disk", worst("file read, disk", ["preadv"], MIB), 0.9),
        above("file_read_of_preadv_from_page_cache", worst("file read, page cache", ["preadv"], MIB), 0.9),
        above("file_write_of_vllm_fs_tier", worst("file write", ["vLLM fs tier"]), 1.0),
        above("file_read_of_vllm_fs_tier_from_disk", worst("file read, disk", ["vLLM fs tier"]), 1.0),
        above("file_read_of_vllm_fs_tier_from_page_cache", worst("file read, page cache", ["vLLM fs tier"]), 1.0),
        below("index_bytes_per_entry", value("index entry"), 250, "bytes"),
        below("index_open_s", value("opening, with lookups"), 10, "s"),
        below("index_longest_wait_ms", value("longest part of it"), 30, "ms"),
    ]


@contextmanager
def folder_below(parent: Path | None) -> Iterator[Path]:
    """A folder that is removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="ucmcache-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def new_file_s(folder: Path) -> float:
    """Median of the seconds that an empty file takes; the names stay."""

    def make(number: int) -> None:
        os.close(os.open(folder / f"empty{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL))

    return statistics.median(timed(partial(make, number)) for number in range(200))


def main() -> int:
    """Measure, show, and write the report; 0 if all goals are met."""
    parser = options("Speed of the stores beside memcpy, plain file calls and vLLM's file tier.")
    parser.add_argument("--folder", type=Path, help="where files are written (default: where temporary ones are)")
    arguments: argparse.Namespace = parser.parse_args()
    quick = arguments.quick
    sections: list[tuple[str, Callable[[Path, bool], list[Row]]]] = [
        (f"Host memory, units of {LAYERS} pages", host_copies),
        ("Files", files),
        ("Index, lookups of 8,192 blocks", index),
        ("Lookups of 8,192 blocks beside writes of 1 MiB", saturated),
        ("Making room", collecting),
    ]
    rows: list[Row] = []
    with folder_below(arguments.folder) as root:
        file_s = new_file_s(root)
        if file_s > _SLOW_NEW_FILE_S:
            print(
                f"WARNING: an empty file takes {ms(file_s)} ms, probably since many files were removed near it in the "
                "last minutes: times of small files mean little. Wait, or choose another --folder."
            )
        for number, (title, section) in enumerate(sections):
            neighbours, folder = Neighbours(), root / str(number)
            folder.mkdir()
            found = section(folder, quick)
            cpus = round(neighbours.cpus(), 2)
            show(f"{title} (neighbours kept {cpus} CPUs busy)", found)
            rows += [{**row, "neighbour_cpus": cpus} for row in found]
        goals = goals_of(rows)
        print_goals(goals)
        write_report(arguments.json_file, rows, goals, new_file_s=file_s)
    return 0 if all(goal.met for goal in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
