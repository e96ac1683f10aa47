"""Threads that put, get and delete the records of one bucket in a random mix, and note whatever must not be."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Self

from tests.crash.records import KIB, key_of, outcome, put
from ucmcache.errors import BackendError, BackendFullError
from ucmcache.store.backends.file import FileBackend
from ucmcache.store.record import GONE

LOAD_S = float(os.environ.get("UCMCACHE_LOAD_S", "4"))  # how long tests keep a load up; 60 for a thorough run
SIZES = (3000, 60 * KIB, 70_001, 300 * KIB)  # below and above where writes go around the page cache


def size_of(number: int) -> int:
    """Payload bytes of record `number`."""
    return SIZES[number % len(SIZES)]


class Load:
    """`threads` of mixed calls to the bucket (`records.NAMESPACE`, `rank`) between entering and leaving.

    `counts`: calls by what they came to; "failed" and "full" are BackendErrors. `wrong`: every other exception, wrong
    bytes and damaged objects among them.
    """

    def __init__(self, backend: FileBackend, numbers: range, threads: int, rank: int = 0, seed: int = 0) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[BaseException | str] = []
        self._backend = backend
        self._numbers = numbers
        self._rank = rank
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._work, args=(seed * 100 + index,)) for index in range(threads)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def wait_for(self, result: str, more: int, within_s: float = 30.0) -> None:
        """Return when calls came to `result` so many more times."""
        wanted, deadline_s = self.counts[result] + more, time.monotonic() + within_s
        while self.counts[result] < wanted:
            assert time.monotonic() < deadline_s, (
                f"no {more} more calls came to {result!r}: {self.counts}, {self.wrong}"
            )
            time.sleep(0.005)

    def _work(self, seed: int) -> None:
        chance = random.Random(seed)
        bucket = self._backend.bucket(key_of(0).namespace, self._rank)

        def get(number: int) -> str:
            cause = outcome(bucket, number, size_of(number), self._rank)
            if cause not in ("", GONE):
                self.wrong.append(f"record {number} is damaged: {cause}")
            return cause or "got"

        def write(number: int) -> str:
            put(bucket, number, size_of(number), self._rank)
            return "put"

        operations: dict[Callable[[int], str], int] = {
            write: 45,
            get: 40,
            lambda number: "deleted" if bucket.delete(key_of(number).id) else "not deleted": 10,
            lambda number: f"contains {bucket.contains(key_of(number).id)}": 2,
            lambda number: "touched" if bucket.touch([key_of(number).id]) is None else "": 1,  # type: ignore[func-returns-value]
            lambda number: "listed" if len(list(bucket.scan())) < 1 << 20 else "": 1,
            lambda number: "measured" if self._backend.used_bytes() >= 0 else "": 1,
        }
        while not self._stop.is_set():
            [operation] = chance.choices(list(operations), list(operations.values()))
            try:
                result = operation(chance.choice(self._numbers))
            except BackendError as error:
                result = "full" if isinstance(error, BackendFullError) else "failed"
            except BaseException as error:
                self.wrong.append(error)
                return
            with self._lock:
                self.counts[result] += 1
