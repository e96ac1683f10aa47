"""System calls of the file backend: whole reads and writes, opening without surprises, errors by one name."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import cast

from ucmcache.errors import BackendError, RecordError
from ucmcache.store.backend import Buffer
from ucmcache.store.backends import byte_views

FOLDER_MODE = 0o700
FILE_MODE = 0o600

_PAGE_BYTES = 4096  # what every file system of today that has O_DIRECT takes as a unit
_DIRECT_FROM_BYTES = 64 << 10  # below it, waiting for the disk costs more than the page cache
_BOUNCE_BYTES = 4 << 20
_IOV_MAX = 1024  # views per system call that Linux takes
# O_NONBLOCK: opening a fifo that lies under a valid name must not wait for its writer.
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# What opening tells of a name under which there is something, but no file of ours: a link, a socket or a device.
_NOT_A_FILE = {errno.ELOOP, errno.ENXIO, errno.ENODEV}
_threads = threading.local()


@contextmanager
def failing_as(doing: str) -> Iterator[None]:
    """Turn an OSError of the body into the BackendError "`doing`: ..."."""
    try:
        yield
    except OSError as error:
        raise BackendError(f"{doing}: {error}") from error


def make_folders(root: str, *below: str) -> str:
    """Make `root` (parents as the umask says) and each folder below it, private to this user; returns the last."""
    os.makedirs(os.path.dirname(root), exist_ok=True)
    path = root
    with suppress(FileExistsError):
        os.mkdir(path, FOLDER_MODE)
    for name in filter(None, below):
        path = os.path.join(path, name)
        with suppress(FileExistsError):
            os.mkdir(path, FOLDER_MODE)
    return path


def sync_folder(path: str) -> None:
    """Have the names in a folder on the disk. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def create_exclusive(path: str) -> int:
    """Descriptor of the new private file `path`. Raises OSError, FileExistsError if there is anything."""
    return os.open(path, _CREATE_FLAGS, FILE_MODE)


def open_regular(path: str) -> tuple[int, os.stat_result] | None:
    """Descriptor and status of the regular file `path`; None if there is nothing, or something else, or a link."""
    try:
        try:
            # Without a trace in the access time, in which we keep more (file_order); only a file's owner may.
            fd = os.open(path, _READ_FLAGS | os.O_NOATIME)
        except PermissionError:
            fd = os.open(path, _READ_FLAGS)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in _NOT_A_FILE:
            return None
        raise
    try:
        status = os.fstat(fd)
    except BaseException:
        os.close(fd)
        raise
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        return None
    return fd, status


def regular_status(path: str) -> os.stat_result | None:
    """Status of the regular file `path`; None if there is nothing, or something else, or a link."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def write_all(fd: int, parts: Sequence[Buffer]) -> None:
    """Write the concatenation of `parts`. Raises OSError, after any number of bytes.

    Past the page cache where that works (docs/adr/0007), but for what does not fill its last page.
    """
    pending = deque(byte_views(parts))
    if sum(map(len, pending)) >= _DIRECT_FROM_BYTES:
        _write_direct(fd, pending)
    while pending:
        written = os.writev(fd, list(islice(pending, _IOV_MAX)))
        if not written:
            raise OSError(errno.EIO, "a write took no bytes")
        _advance(pending, written)


def _write_direct(fd: int, pending: deque[memoryview]) -> None:
    """Write whole pages of `pending` around the page cache, as far as the file system lets us.

    Guaranteed by the caller: `fd` is at the start of a page of the file.
    """
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError:
        return  # not on this file system
    bounce = _bounce()
    try:
        while (filled := _fill(bounce, pending) // _PAGE_BYTES * _PAGE_BYTES) > 0:
            written = os.write(fd, bounce[:filled])
            if not written:
                return
            _advance(pending, written)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        # Nothing was written by this call: it wants another alignment, as any does after a short write.
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)


def _bounce() -> memoryview:
    """This thread's page-aligned memory; the same every time, so that its pages are there."""
    view = getattr(_threads, "bounce", None)
    if view is None:
        view = _threads.bounce = memoryview(mmap.mmap(-1, _BOUNCE_BYTES))
    return cast(memoryview, view)


def _fill(bounce: memoryview, pending: deque[memoryview]) -> int:
    """Copy as much as fits from the front of `pending`, which stays as it is; returns the bytes."""
    filled = 0
    for view in pending:
        length = min(len(view), len(bounce) - filled)
        bounce[filled : filled + length] = view[:length]
        filled += length
        if filled == len(bounce):
            break
    return filled


def read_exact(fd: int, parts: Sequence[memoryview]) -> None:
    """Fill `parts`. Raises RecordError("length") if the file ends before, OSError for I/O."""
    pending = deque(byte_views(parts))
    while pending:
        got = os.readv(fd, list(islice(pending, _IOV_MAX)))
        if not got:
            raise RecordError("length", "the file was cut short while it was read")
        _advance(pending, got)


def stored_bytes(status: os.stat_result) -> int:
    """Bytes that a file really takes on its disk."""
    return status.st_blocks * 512


def unlink_if_there(path: str) -> bool:
    """Remove `path`; False if it was gone before. Raises OSError."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True


def _advance(pending: deque[memoryview], done_bytes: int) -> None:
    while done_bytes:
        view = pending.popleft()
        if len(view) > done_bytes:
            pending.appendleft(view[done_bytes:])
            return
        done_bytes -= len(view)
