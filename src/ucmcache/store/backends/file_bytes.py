"""Whole reads and writes of a file: past the page cache where that is faster, and right where it is not possible.

Writes leave the page cache to those who need it (docs/adr/0007). A read takes what lies in the page cache from there,
and the rest straight from the disk: one request for all of it, where the kernel's read-ahead makes several in turn.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from ctypes import CDLL, Structure, byref, c_uint64
from itertools import islice
from typing import NamedTuple, cast

import numpy as np

from ucmcache.errors import RecordError
from ucmcache.store.backend import Buffer
from ucmcache.store.backends import byte_views

_PAGE_BYTES = 4096  # what every file system of today that has O_DIRECT takes as a unit
_DIRECT_FROM_BYTES = 64 << 10  # for a write that is smaller, waiting for the disk costs more than the page cache
_OWN_BYTES = 4 << 20
_PIECE_BYTES = 256 << 10  # of a read that is checked as it comes: it is in the second cache still when it is
_IOV_MAX = 1024  # views per system call that Linux takes
_REFUSALS = {errno.EINVAL, errno.EOPNOTSUPP}  # of a file system, or of memory that it cannot use
_threads = threading.local()

_CACHESTAT = 451  # the number of this system call on every architecture
_libc = CDLL(None)


class _CacheRange(Structure):
    _fields_ = [("offset", c_uint64), ("nbytes", c_uint64)]


class _CacheCounts(Structure):  # in pages
    _fields_ = [(name, c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")]


def write_all(fd: int, parts: Sequence[Buffer]) -> None:
    """Write the concatenation of `parts` to an empty file. Raises OSError, after any number of bytes."""
    pending = deque(byte_views(parts))
    if sum(map(len, pending)) >= _DIRECT_FROM_BYTES:
        _write_direct(fd, pending)
    while pending:
        written = os.writev(fd, list(islice(pending, _IOV_MAX)))
        if not written:
            raise OSError(errno.EIO, "a write took no bytes")
        _advance(pending, written)


def _write_direct(fd: int, pending: deque[memoryview]) -> None:
    """Write whole pages of `pending` around the page cache, as far as the file system lets us."""
    if not _set_direct(fd, True):
        return
    try:
        while (pages := _pages_of(pending)).nbytes >= _PAGE_BYTES:
            for own, view in pages.copied:
                own[:] = view
            written = os.writev(fd, _cut(pages.memory, pages.nbytes // _PAGE_BYTES * _PAGE_BYTES))
            if not written:
                return
            _advance(pending, written)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        # Nothing was written by this call: it wants another alignment, as any does after a short write.
    finally:
        if pending:
            _set_direct(fd, False)


def read_exact(fd: int, parts: Sequence[memoryview], filled: Callable[[int], None] | None = None) -> None:
    """Fill `parts` from the start of a file; `filled` hears, in order, of bytes that are in place.

    Raises RecordError("length") if the file ends before, OSError for I/O.
    """
    pending = deque(byte_views(parts))
    nbytes = sum(map(len, pending))
    at = 0 if _in_page_cache(fd, nbytes) else _read_direct(fd, pending, filled)
    while pending:
        got = os.preadv(fd, _cut(pending, _PIECE_BYTES if filled else nbytes), at)
        at += _got(pending, got, filled)


def _read_direct(fd: int, pending: deque[memoryview], filled: Callable[[int], None] | None) -> int:
    """Read around the page cache, as far as the file system lets us; how many bytes."""
    at = 0
    if not _set_direct(fd, True):
        return at
    try:
        while pending and not at % _PAGE_BYTES:
            pages = _pages_of(pending)
            got = min(os.preadv(fd, pages.memory, at), pages.nbytes)
            for own, view in pages.copied:
                view[:] = own
            at += _got(pending, got, filled)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
    finally:
        if pending:
            _set_direct(fd, False)
    return at


def _got(pending: deque[memoryview], nbytes: int, filled: Callable[[int], None] | None) -> int:
    if not nbytes:
        raise RecordError("length", "the file was cut short while it was read")
    _advance(pending, nbytes)
    if filled:
        filled(nbytes)
    return nbytes


def _in_page_cache(fd: int, nbytes: int) -> bool:
    """Whether all of a file is there, without reading any of it (reading would start what it waits for)."""
    counts = _CacheCounts()
    if _libc.syscall(_CACHESTAT, fd, byref(_CacheRange(0, nbytes)), byref(counts), 0):
        # Older than Linux 6.5, or a file system that cannot tell. Large files are not written by way of the page cache.
        return nbytes < _DIRECT_FROM_BYTES
    return bool(counts.cached >= -(-nbytes // mmap.PAGESIZE))


class _Pages(NamedTuple):
    """Whole pages of memory for what comes next: its own where it fills some, else this thread's."""

    memory: list[memoryview]
    copied: list[tuple[memoryview, memoryview]]  # of this thread's memory, and of what it stands for
    nbytes: int  # that they stand for; a last page may have more


def _pages_of(pending: deque[memoryview]) -> _Pages:
    """Pages for as much of the front of `pending`, which stays as it is, as one call can move."""
    own = _own_pages()
    memory: list[memoryview] = []
    copied: list[tuple[memoryview, memoryview]] = []
    begin = end = 0  # in own: of what is not in `memory` yet
    nbytes = 0
    for view in islice(pending, _IOV_MAX // 2 - 1):
        if end % _PAGE_BYTES == 0 and len(view) >= _PAGE_BYTES and _address(view) % _PAGE_BYTES == 0:
            if end > begin:
                memory.append(own[begin:end])
                begin = end
            whole = len(view) // _PAGE_BYTES * _PAGE_BYTES
            memory.append(view[:whole])
            nbytes += whole
            view = view[whole:]
        room = min(len(view), len(own) - end)
        if room:
            copied.append((own[end : end + room], view[:room]))
            end += room
            nbytes += room
        if room < len(view):
            break
    if end > begin:
        memory.append(own[begin : -(-end // _PAGE_BYTES) * _PAGE_BYTES])
    return _Pages(memory, copied, nbytes)


def _own_pages() -> memoryview:
    """This thread's page-aligned memory; the same every time, so that its pages are there."""
    view = getattr(_threads, "pages", None)
    if view is None:
        view = _threads.pages = memoryview(mmap.mmap(-1, _OWN_BYTES))
    return cast(memoryview, view)


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)


def _set_direct(fd: int, direct: bool) -> bool:
    """Have calls on `fd` go around the page cache, or not; False where the file system has no such calls."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        return False
    return True


def _cut(views: Iterable[memoryview], nbytes: int) -> list[memoryview]:
    """The first `nbytes` of `views`, or all that one call can move."""
    front: list[memoryview] = []
    for view in islice(views, _IOV_MAX):
        front.append(view[:nbytes])
        nbytes -= len(front[-1])
        if not nbytes:
            break
    return front


def _advance(pending: deque[memoryview], done_bytes: int) -> None:
    while done_bytes:
        view = pending.popleft()
        if len(view) > done_bytes:
            pending.appendleft(view[done_bytes:])
            return
        done_bytes -= len(view)
