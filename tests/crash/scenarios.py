"""What the children of the zygote do to a root until they are killed; every step is reported when it is done."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.crash.records import KIB, NAMESPACE, key_of, outcome, put
from tests.crash.zygote import Points, say
from ucmcache.errors import BackendError
from ucmcache.store.backend import Bucket
from ucmcache.store.backends.file import FileBackend

SIZES = (3000, 70_001, 300 * KIB)  # below and above where writes go around the page cache
SMALL_BYTES = 3000  # of payload
RECORD_BYTES = 8192  # that such a record takes, in whole pages
CAPACITY_BYTES = 100 * RECORD_BYTES
ENDLESS_CAPACITY_BYTES = 4096 * KIB


def size_of(number: int) -> int:
    """Payload bytes of record `number`, but for the scenarios of a full root."""
    return SIZES[number % len(SIZES)]


def store(bucket: Bucket, number: int, nbytes: int) -> None:
    """Put and report it; "putting" allows the record to be there, "put" demands it."""
    say(f"putting {number}")
    put(bucket, number, nbytes)
    say(f"put {number}")


def remove(bucket: Bucket, number: int) -> None:
    """Delete and report it."""
    say(f"removing {number}")
    bucket.delete(key_of(number).id)
    say(f"removed {number}")


def save(root: Path, points: Points) -> None:
    """Write, overwrite, remove and describe; the first write makes every folder."""
    _save(FileBackend(root))


def save_fsync(root: Path, points: Points) -> None:
    """The same, each on the disk itself when it is reported."""
    _save(FileBackend(root, fsync=True))


def _save(backend: FileBackend) -> None:
    bucket = backend.bucket(NAMESPACE, 0)
    for number in (0, 1, 2):
        store(bucket, number, size_of(number))
    backend.describe(NAMESPACE, {"model": "tiny"})
    store(bucket, 1, size_of(1))
    remove(bucket, 0)
    store(bucket, 3, size_of(3))
    store(bucket, 0, size_of(0))


def scan(root: Path, points: Points) -> None:
    """List and read all; what is damaged is quarantined, and one more is written, which sweeps."""
    backend = FileBackend(root)
    bucket = backend.bucket(NAMESPACE, 0)
    found = set(bucket.scan())
    for number in range(8):
        if key_of(number).id in found:
            outcome(bucket, number, size_of(number))
    bucket.touch(list(found))
    backend.namespaces()
    backend.used_bytes()
    store(bucket, 8, size_of(8))
    for number in (4, 5):
        remove(bucket, number)


def collect(root: Path, points: Points) -> None:
    """Write more than the root may hold; the collector's thread is killed as well as the writer's."""
    backend = FileBackend(root, CAPACITY_BYTES)
    bucket = backend.bucket(NAMESPACE, 0)
    for number in range(1000, 1018):
        store(bucket, number, SMALL_BYTES)
        points.uncounted(True)
        used_bytes = backend.used_bytes()
        deadline_s = time.monotonic() + 10
        while used_bytes > CAPACITY_BYTES * 95 // 100 and time.monotonic() < deadline_s:
            time.sleep(0.001)
            used_bytes = backend.used_bytes()
        points.uncounted(False)
    say(f"kept {used_bytes}")


def endless(root: Path, points: Points) -> None:
    """Two threads write, read and remove with the root at its capacity, until somebody else ends it."""
    backend = FileBackend(root, ENDLESS_CAPACITY_BYTES)

    def work(first: int) -> None:
        bucket = backend.bucket(NAMESPACE, 0)
        chance = random.Random(first)
        for number in itertools.count(first, 2):
            store(bucket, number, size_of(number))
            outcome(bucket, number, size_of(number))
            if chance.random() < 0.2:
                remove(bucket, number)

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def one(root: Path, points: Points) -> None:
    """One write; what becomes of it is reported."""
    bucket = FileBackend(root).bucket(NAMESPACE, 0)
    say("putting 1")
    try:
        put(bucket, 1, size_of(1))
        say("put 1")
    except BackendError:
        say("failed 1")


SCENARIOS: dict[str, Callable[[Path, Points], None]] = {
    scenario.__name__: scenario for scenario in (save, save_fsync, scan, collect, endless, one)
}
