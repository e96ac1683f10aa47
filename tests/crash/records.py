"""Records whose only right payload anybody can say, and ways to look at a root from outside the backend."""

from __future__ import annotations

import functools
import hashlib
import os
import random
import stat
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ucmcache.errors import RecordError
from ucmcache.store import record
from ucmcache.store.backend import Bucket
from ucmcache.store.backends.file import FileBackend

NAMESPACE = b"k" * 16
KIB, MIB = 1 << 10, 1 << 20


def key_of(number: int, rank: int = 0, namespace: bytes = NAMESPACE, group_seed: bytes = b"g" * 16) -> record.RecordKey:
    """Key of the record `number`: the first of a chain of its own."""
    digest = hashlib.blake2b(number.to_bytes(8, "big"), digest_size=32).digest()
    prefix = bytes([digest[0] % 8]) + digest[1:]  # few folders: removing them is what takes a test's time
    return record.RecordKey(namespace, group_seed, "block", prefix, b"", 16, rank)


@functools.lru_cache(maxsize=256)
def payload_of(number: int, nbytes: int) -> bytes:
    """The only right payload of record `number`."""
    tile = random.Random(number).randbytes(4096)
    return (tile * -(-nbytes // len(tile)))[:nbytes]


def put(bucket: Bucket, number: int, nbytes: int, rank: int = 0) -> int:
    """Write record `number`; the bytes it takes."""
    return record.write(bucket, key_of(number, rank), payload_of(number, nbytes))


def outcome(bucket: Bucket, number: int, nbytes: int, rank: int = 0) -> str:
    """What reading record `number` comes to, counted as an engine's worker does: "", "gone" or a RecordError's cause.

    A payload that verifies and is not the right one fails the test: that is the one thing that must never be.
    """
    payload = bytearray(b"\xa5" * nbytes)
    try:
        if not record.read_into(bucket, key_of(number, rank), memoryview(payload)):
            return record.GONE
    except RecordError as error:
        return error.cause
    assert payload == payload_of(number, nbytes), f"record {number} was read with wrong bytes"
    return ""


def verified(bucket: Bucket, numbers: Iterable[int], nbytes: int, rank: int = 0, may_go: bool = False) -> set[int]:
    """The records of `bucket` that are visible, each read and right, and all of them among `numbers`.

    With `may_go` somebody may be removing some meanwhile: those are left out.
    """
    number_of = {key_of(number, rank).id: number for number in numbers}
    found = {number_of[id]: outcome(bucket, number_of[id], nbytes, rank) for id in bucket.scan()}
    bad = {number: cause for number, cause in found.items() if cause and not (may_go and cause == record.GONE)}
    assert not bad, f"records that are visible and cannot be read: {bad}"
    return {number for number, cause in found.items() if not cause}


def object_path(root: Path, key: record.RecordKey) -> Path:
    """Where the file backend has the object of `key`."""
    text = key.id.hex()
    return root / f"ns-{key.namespace.hex()}" / f"r{key.rank}" / text[:2] / f"{text}.kv"


def regular_files(root: Path) -> list[Path]:
    """Every file below `root`, but for the few that are no objects: what backends agree by, and descriptions."""
    others = {"usage", "collector", "namespace.json"}
    found = [Path(folder, name) for folder, _, names in os.walk(root) for name in names if name not in others]
    regular = []
    for path in found:
        with suppress(FileNotFoundError):  # somebody may be removing some
            if stat.S_ISREG(path.lstat().st_mode):
                regular.append(path)
    return regular


def du_bytes(root: Path) -> int:
    """What `du` says the files below `root` take, each by itself: folders are not counted, nor what goes meanwhile."""
    files = b"".join(os.fsencode(path) + b"\0" for path in regular_files(root))
    if not files:
        return 0
    told = subprocess.run(["du", "-B1", "--files0-from=-"], input=files, capture_output=True, env={"LC_ALL": "C"})
    assert all(line.endswith(b"No such file or directory") for line in told.stderr.splitlines()), told.stderr
    return sum(int(line.split(b"\t")[0]) for line in told.stdout.splitlines())


def temporaries(root: Path) -> list[Path]:
    """Files that are being written, or were when their writer died."""
    return sorted(path for folder in root.rglob("tmp") for path in folder.iterdir())


def backend_after(root: Path, after_s: float, capacity_bytes: int | None = None) -> FileBackend:
    """The backend as it would be opened `after_s` from now."""
    return FileBackend(root, capacity_bytes, clock_ns=lambda: time.time_ns() + int(after_s * 1e9))


def close(backend: FileBackend) -> None:
    """Close and wait for the collector, which may still be at work on the root for a moment."""
    backend.close()
    collector = backend._space._thread
    if collector is not None:
        collector.join(30)
        assert not collector.is_alive()
