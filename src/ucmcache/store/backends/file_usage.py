"""How many bytes a root holds, counted together by all processes that write to it.

Two numbers in one small file, changed under a lock that the kernel releases when its holder dies. The file is opened
anew each time: it may be removed, with the whole root, under a running engine.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ucmcache.store.backends.file_io import FILE_MODE, make_folders

_FIELDS = struct.Struct("<8sqq")
_MAGIC = b"ucmuse1\n"
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


class Usage:
    """The shared count of `root`; thread- and process-safe. Every method raises OSError.

    The count is never below what is really there, as long as everybody takes before writing and gives back only what
    was really removed: what is forgotten (a writer that died, an object that replaced another) stays counted until the
    next listing. Unknown (None) until the first listing.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._path = os.path.join(root, "usage")
        self._threads = threading.Lock()  # a kernel lock belongs to an open file, so threads need one of their own

    def total_bytes(self) -> int | None:
        """Bytes taken now; None if unknown."""
        with self._locked() as fd:
            fields = _read(fd)
        return None if fields is None else fields[0]

    def take(self, nbytes: int, limit_bytes: int | None, begin: Callable[[], None] = lambda: None) -> int | None:
        """Count `nbytes` more if they fit the limit; the total then, or None if they do not, or it is unknown.

        `begin` is called where they fit, or without a limit: it must leave a file that tells a listing of them.
        """
        with self._locked() as fd:
            fields = _read(fd)
            if limit_bytes is not None and (fields is None or fields[0] + nbytes > limit_bytes):
                return None
            # Before any listing that begins from now on.
            begin()
            if fields is None:
                return None
            _write(fd, fields[0] + nbytes, fields[1] + nbytes)
            return fields[0] + nbytes

    def give_back(self, nbytes: int, removed: Callable[[], bool]) -> bool:
        """Count `nbytes` less if `removed`, which is called now, has removed a file of so many; what it returned."""
        with self._locked() as fd:
            # Under the lock: a listing that did not meet the file must not see it given back later.
            if not removed():
                return False
            fields = _read(fd)
            if fields is not None:
                # Not from what was added since a listing began: that one may already have met the file.
                _write(fd, fields[0] - nbytes, fields[1])
            return True

    def begin_listing(self) -> None:
        """What is added from now on is counted beside the listing. One listing at a time."""
        with self._locked() as fd:
            fields = _read(fd)
            if fields is not None:
                _write(fd, fields[0], 0)

    def end_listing(self, listed_bytes: int) -> int:
        """Replace the count by what was listed and what was added meanwhile; the new total."""
        with self._locked(create=True) as fd:
            fields = _read(fd)
            total = listed_bytes + (0 if fields is None else fields[1])
            if fd is not None and fields is None:
                os.ftruncate(fd, 0)
            _write(fd, total, 0)
            return total

    @contextmanager
    def _locked(self, create: bool = False) -> Iterator[int | None]:
        with self._threads:
            try:
                fd = os.open(self._path, _FLAGS | (os.O_CREAT if create else 0), FILE_MODE)
            except FileNotFoundError:
                if not create:
                    yield None
                    return
                make_folders(self._root)
                fd = os.open(self._path, _FLAGS | os.O_CREAT, FILE_MODE)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                yield fd
            finally:
                os.close(fd)


def _read(fd: int | None) -> tuple[int, int] | None:
    """Total and what was added since the last listing began; None for a file that says nothing."""
    if fd is None:
        return None
    raw = os.pread(fd, _FIELDS.size + 1, 0)
    if len(raw) != _FIELDS.size:
        return None
    magic, total, added = _FIELDS.unpack(raw)
    return (total, added) if magic == _MAGIC else None


def _write(fd: int | None, total: int, added: int) -> None:
    if fd is not None:
        os.pwrite(fd, _FIELDS.pack(_MAGIC, max(total, 0), max(added, 0)), 0)
