"""Capacity of a file backend's root: who may write, and a collector that makes room beside them."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from ucmcache.errors import BackendError, BackendFullError
from ucmcache.store.backends import check_capacity, check_fits
from ucmcache.store.backends.file_io import FILE_MODE, failing_as, make_folders, unlink_if_there
from ucmcache.store.backends.file_layout import FileKind, StoredFile, Temporaries, walk_root
from ucmcache.store.backends.file_order import Listed, eviction_order
from ucmcache.store.backends.file_usage import Usage

logger = logging.getLogger(__name__)

# The collector begins when so little is left, and ends when so much is free: one listing serves many writes.
_BEGIN_PARTS = 20
_FREE_PARTS = 10
_WAIT_S = 2.0  # that a writer waits for room before it fails
_BATCH_FILES = 64  # removed before other threads get a turn
_LEASE_RETRY_S = 0.02
_CLOSE_S = 1.0


class Space:
    """Keeps the files below one root within `capacity_bytes` of real disk space; None is no limit.

    Thread- and process-safe: bytes are taken from a count that all writers share before they are written, so the root
    never holds more. One process at a time collects, by a lease that ends with it. Raises ConfigError for a capacity
    that is not positive.
    """

    def __init__(self, root: str, capacity_bytes: int | None, temporaries: Temporaries) -> None:
        check_capacity(capacity_bytes)
        self._root = root
        self._capacity_bytes = capacity_bytes
        self._temporaries = temporaries
        self._usage = Usage(root)
        self._changed = threading.Condition()
        self._wanted = 0  # collections asked for
        self._done = 0  # collections made
        self._needed_bytes = 0  # by the largest file that waits for room
        self._disk_is_full = False  # since the last collection
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def take(self, nbytes: int, begin: Callable[[], None]) -> None:
        """Room for a file of `nbytes`, which `begin` makes; waits a moment for the collector.

        Raises what `begin` raises, BackendError for a file that even an empty root could not hold, BackendFullError if
        there is no room now.
        """
        check_fits(nbytes, self._capacity_bytes)
        limit = self._capacity_bytes
        with failing_as(f"making room in {self._root}"):
            total = self._usage.take(nbytes, limit, begin)
            if limit is None:
                return
            if total is None:
                total = self._take_after_collecting(nbytes, limit, begin)
        if total is None:
            why = (
                f" and cannot be emptied: {self._failure}"
                if self._failure
                else ", and no more could be given up in time"
            )
            raise BackendFullError(f"{self._root} holds all of its {limit} bytes{why}")
        if total > limit - limit // _BEGIN_PARTS:
            self._ask()

    def correct(self, taken_bytes: int, stored_bytes: int) -> None:
        """A file for which room was taken turned out to be of another size. Raises BackendError."""
        with failing_as(f"counting what {self._root} holds"):
            if stored_bytes > taken_bytes:
                self._usage.take(stored_bytes - taken_bytes, None)
            elif stored_bytes < taken_bytes:
                self._usage.give_back(taken_bytes - stored_bytes, lambda: True)

    def remove(self, path: str, nbytes: int) -> bool:
        """Remove a file that takes `nbytes`; False if it was gone. Raises OSError."""
        return self._usage.give_back(nbytes, lambda: unlink_if_there(path))

    def disk_is_full(self) -> None:
        """The disk took no more, though the capacity would: with a capacity, give some of it up."""
        if self._capacity_bytes is not None:
            self._disk_is_full = True
            self._ask()

    def close(self) -> None:
        """End the collector, after the file that it is removing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)  # whoever removes the root next shall not meet it

    # -- the collector --------------------------------------------------------------------------------------------

    def _ask(self, needed_bytes: int = 0) -> int:
        """Have a collection made; its number."""
        with self._changed:
            self._needed_bytes = max(self._needed_bytes, needed_bytes)
            # One that is under way may have listed already what is too much now.
            self._wanted = max(self._wanted, self._done + 1)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="ucmcache-collector", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return self._wanted

    def _take_after_collecting(self, nbytes: int, limit: int, begin: Callable[[], None]) -> int | None:
        """The total after room was made for `nbytes` too; None if there was none in time."""
        deadline_s = time.monotonic() + _WAIT_S
        total = None
        while total is None:
            number = self._ask(nbytes)
            with self._changed:
                left_s = max(0.0, deadline_s - time.monotonic())
                if not self._changed.wait_for(lambda n=number: self._done >= n or self._closed, left_s):  # type: ignore[misc]
                    break
            total = self._usage.take(nbytes, limit, begin)
            if self._closed or self._failure is not None:
                break
        return total

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted > self._done or self._closed)
                if self._closed:
                    return
                number = self._wanted
            failure: Exception | None = None
            try:
                failure = self._collect()
            except Exception as error:
                failure = error
            if failure is not None and self._failure is None and not self._closed:
                logger.warning("ucmcache: %s cannot be kept within its capacity: %s", self._root, failure)
            with self._changed:
                self._failure = failure
                self._done = number
                self._changed.notify_all()

    def _collect(self) -> Exception | None:
        """List the root and remove what goes first, until enough is free; the last failure to, if it mattered."""
        if self._capacity_bytes is None:
            return None
        with self._lease():
            with self._changed:
                free_bytes = max(self._capacity_bytes // _FREE_PARTS, self._needed_bytes)
                disk_is_full, self._needed_bytes, self._disk_is_full = self._disk_is_full, 0, False
            total = self._usage.total_bytes()
            if total is not None and total <= self._capacity_bytes - free_bytes and not disk_is_full:
                return None  # another process has just done it
            self._usage.begin_listing()
            objects, leftovers, listed_bytes = self._list()
            total = self._usage.end_listing(listed_bytes)
            target = self._capacity_bytes - free_bytes
            if disk_is_full:
                target = min(target, total - total // _FREE_PARTS)
            return self._remove([*leftovers, *((one.path, one.stored_bytes) for one in objects)], total, target)

    def _list(self) -> tuple[list[Listed], list[tuple[str, int]], int]:
        """Objects in the order in which they should go, what dead writers and damaged objects left, and all bytes."""
        listed_bytes = 0
        objects: list[Listed] = []
        leftovers: list[tuple[str, int]] = []
        for file in _yielding(walk_root(self._root)):
            listed_bytes += file.counted_bytes
            if file.kind is FileKind.OBJECT:
                objects.append(file.listed())
            elif file.kind is FileKind.QUARANTINED or self._temporaries.abandoned(
                os.path.basename(file.path), file.modified_ns
            ):
                leftovers.append((file.path, file.stored_bytes))
        return eviction_order(objects), leftovers, listed_bytes

    def _remove(self, files: Iterable[tuple[str, int]], total: int, target: int) -> Exception | None:
        failure: OSError | None = None
        removed_bytes = 0
        for number, (path, stored_bytes) in enumerate(files, 1):
            if total <= target or self._closed:
                break
            try:
                # Of two that remove one file only one did: the other has nothing to give back.
                if unlink_if_there(path):
                    removed_bytes += stored_bytes
                total -= stored_bytes
            except OSError as error:
                failure = error  # another file may do
            if number % _BATCH_FILES == 0:
                self._usage.give_back(removed_bytes, lambda: True)
                removed_bytes = 0
                time.sleep(0)
        self._usage.give_back(removed_bytes, lambda: True)
        return failure if total > target else None

    @contextmanager
    def _lease(self) -> Iterator[None]:
        """One collector at a time, over all processes; the kernel ends the lease of one that dies."""
        make_folders(self._root)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(os.path.join(self._root, "collector"), flags, FILE_MODE)
        try:
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if self._closed:
                        raise BackendError("the backend was closed") from None
                    time.sleep(_LEASE_RETRY_S)
            yield
        finally:
            os.close(fd)


def _yielding(files: Iterable[StoredFile]) -> Iterator[StoredFile]:
    """The same, giving other threads a turn now and then: listing a large root takes seconds."""
    for number, file in enumerate(files, 1):
        if number % _BATCH_FILES == 0:
            time.sleep(0)
        yield file
