"""How a file becomes visible: written in tmp/ under a name of its own, then moved into place whole."""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from ucmcache.errors import BackendError, BackendFullError
from ucmcache.store.backend import Buffer
from ucmcache.store.backends import byte_views
from ucmcache.store.backends.file_bytes import write_all
from ucmcache.store.backends.file_io import (
    create_exclusive,
    make_folders,
    regular_status,
    stored_bytes,
    sync_folder,
    unlink_if_there,
)
from ucmcache.store.backends.file_layout import TEMPORARY_FOLDER, Temporaries, walk_temporaries
from ucmcache.store.backends.file_order import place_of, times_of
from ucmcache.store.backends.file_space import Space

_PAGE_BYTES = 4096  # files take whole ones
_CLOSED = -1
_LEFT_FILES = 64  # remembered to be removed once that is possible
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT}


class WriteFolder:
    """A bucket's or namespace's folder, with its own tmp/ beside what is moved out of there by rename.

    Thread-safe; other processes may write to the same folder. Nothing is made on disk before the first write.
    """

    def __init__(self, root: str, path: str, temporaries: Temporaries, space: Space, fsync: bool) -> None:
        self.path = path
        self.temporaries = temporaries
        self.space = space
        self._root = root
        self._below = os.path.relpath(path, root).split(os.sep)
        self._lock = threading.Lock()
        self._swept = False
        self._left: deque[tuple[str, int]] = deque(maxlen=_LEFT_FILES)
        self._fsync = fsync

    def make(self, *below: str) -> str:
        """Make this folder and those `below`; returns the last. Raises OSError."""
        return make_folders(self._root, *self._below, *below)

    def write(self, name: str, parts: Sequence[Buffer], counts: bool = True) -> int:
        """Put a whole file at `name` (relative), or nothing; returns the bytes of disk it takes.

        One that does not count takes none of the capacity. Raises OSError, BackendError for want of room.
        """
        self._sweep_once()
        size_bytes = sum(len(view) for view in byte_views(parts))
        taken_bytes = -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES if counts else 0
        temporary = os.path.join(self.path, TEMPORARY_FOLDER, self.temporaries.name(taken_bytes))
        opened: list[int] = []
        try:
            self.space.take(taken_bytes, lambda: opened.append(self._create(temporary)))
            stored = self._write(opened, temporary, name, parts)
        except BaseException as error:
            if opened:  # else the name is another's
                self._remove(temporary, taken_bytes)
            if isinstance(error, OSError) and error.errno in _DISK_FULL:
                self.space.disk_is_full()
                raise BackendFullError(f"writing {os.path.join(self.path, name)}: {error}") from error
            raise
        finally:
            if opened and opened[0] != _CLOSED:
                os.close(opened[0])
        for _ in range(len(self._left)):
            with suppress(IndexError):  # another thread has it
                self._remove(*self._left.popleft())
        # Some file systems count blocks only once they are flushed; until then the length is the better estimate.
        stored = max(stored, size_bytes)
        if counts:
            with suppress(BackendError):
                self.space.correct(taken_bytes, stored)
        return stored

    def _remove(self, temporary: str, taken_bytes: int) -> None:
        try:
            self.space.remove(temporary, taken_bytes)
        except OSError:
            # As on a disk that has become read-only: nobody else removes what a living writer has left.
            self._left.append((temporary, taken_bytes))

    def _create(self, temporary: str) -> int:
        try:
            return create_exclusive(temporary)
        except FileNotFoundError:  # the first write, or the folder was removed under a running engine
            self.make(TEMPORARY_FOLDER)
            return create_exclusive(temporary)

    def _write(self, opened: list[int], temporary: str, name: str, parts: Sequence[Buffer]) -> int:
        fd = opened[0]
        write_all(fd, parts)
        os.utime(fd, ns=times_of(self.temporaries.clock_ns(), place_of(parts)))
        if self._fsync:
            os.fsync(fd)
        status = os.fstat(fd)
        # Closed before anybody can see it: a network's file system may tell only then that it could not write.
        opened[0] = _CLOSED
        os.close(fd)
        self._move(temporary, name)
        return stored_bytes(status)

    def _move(self, temporary: str, name: str) -> None:
        path = os.path.join(self.path, name)
        is_new = self._fsync and regular_status(path) is None
        try:
            os.replace(temporary, path)
        except FileNotFoundError:
            self.make(os.path.dirname(name))
            os.replace(temporary, path)
        if self._fsync:
            try:
                sync_folder(os.path.dirname(path))
            except OSError:
                if is_new:  # else it is as good as what was there
                    unlink_if_there(path)
                raise

    def _sweep_once(self) -> None:
        with self._lock:
            if self._swept:
                return
            for file in walk_temporaries(self.path):
                if self.temporaries.abandoned(os.path.basename(file.path), file.modified_ns):
                    unlink_if_there(file.path)
            self._swept = True
