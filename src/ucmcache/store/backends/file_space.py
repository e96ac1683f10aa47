"""Capacity of a file backend's root: what it holds, and which objects make room."""

from __future__ import annotations

import os
import threading

from ucmcache.errors import BackendError
from ucmcache.store.backends import check_capacity, check_fits
from ucmcache.store.backends.file_io import failing_as, unlink_if_there
from ucmcache.store.backends.file_layout import FileKind, StoredFile, Temporaries, walk_root

# Evicting below the limit, not just to it, makes one listing serve many writes.
_SLACK_PARTS = 10
# Other processes may fill the same root; this bounds what they add unnoticed.
_UNSEEN_PARTS = 8


class Space:
    """Keeps the files below one root within `capacity_bytes` of real disk space; None is no limit.

    Thread-safe. Other processes may write to and evict from the same root: a total is kept between listings, and a
    listing is made at the first write, whenever the total passes the capacity, and after each eighth of the capacity
    written from here. Promised: the object just written is never evicted for itself. Raises ConfigError for a capacity
    that is not positive.
    """

    def __init__(self, root: str, capacity_bytes: int | None, temporaries: Temporaries) -> None:
        check_capacity(capacity_bytes)
        self._root = root
        self._capacity_bytes = capacity_bytes
        self._temporaries = temporaries
        self._lock = threading.Lock()
        self._total_bytes: int | None = None  # as of the last listing and what was added here since
        self._unseen_bytes = 0  # added here since the last listing

    def admit(self, object_bytes: int) -> None:
        """Raises BackendError for an object that even an empty root could not hold."""
        check_fits(object_bytes, self._capacity_bytes)

    def added(self, path: str, stored_bytes: int) -> None:
        """Account for the file `path`, and make room if that takes the root over its capacity. Raises BackendError."""
        if self._capacity_bytes is None:
            return
        with self._lock:
            self._unseen_bytes += stored_bytes
            if self._total_bytes is not None:
                self._total_bytes += stored_bytes
                due = self._unseen_bytes > self._capacity_bytes // _UNSEEN_PARTS
                if self._total_bytes <= self._capacity_bytes and not due:
                    return
            with failing_as(f"making room in {self._root}"):
                self._make_room(path, self._capacity_bytes)

    def removed(self, stored_bytes: int) -> None:
        """Account for a file that is gone."""
        with self._lock:
            if self._total_bytes is not None:
                self._total_bytes = max(0, self._total_bytes - stored_bytes)

    def _make_room(self, keep: str, capacity_bytes: int) -> None:
        files = list(walk_root(self._root))
        total_bytes = sum(file.stored_bytes for file in files)
        failure: OSError | None = None
        if total_bytes > capacity_bytes:
            target_bytes = capacity_bytes - capacity_bytes // _SLACK_PARTS
            for file in self._victims(files, keep):
                if total_bytes <= target_bytes:
                    break
                try:
                    unlink_if_there(file.path)
                    total_bytes -= file.stored_bytes
                except OSError as error:
                    failure = error  # another file may do
        self._total_bytes, self._unseen_bytes = total_bytes, 0
        # Without a failure the rest is other writers' unfinished files, which will be accounted for in their turn.
        if failure is not None and total_bytes > capacity_bytes:
            raise BackendError(f"{self._root} is over its capacity and cannot be emptied: {failure}") from failure

    def _victims(self, files: list[StoredFile], keep: str) -> list[StoredFile]:
        """What may go, in the order in which it should: dead writers' leftovers, then by last use."""
        abandoned, evictable = [], []
        for file in files:
            if file.kind is FileKind.TEMPORARY:
                if self._temporaries.abandoned(os.path.basename(file.path), file.modified_ns):
                    abandoned.append(file)
            elif file.path != keep:
                evictable.append(file)
        return abandoned + sorted(evictable, key=lambda file: file.used_ns)
