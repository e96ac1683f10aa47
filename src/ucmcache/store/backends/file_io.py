"""System calls of the file backend: opening without surprises, folders, errors by one name."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ucmcache.errors import BackendError

FOLDER_MODE = 0o700
FILE_MODE = 0o600

# O_NONBLOCK: opening a fifo that lies under a valid name must not wait for its writer.
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# What opening tells of a name under which there is something, but no file of ours: a link, a socket or a device.
_NOT_A_FILE = {errno.ELOOP, errno.ENXIO, errno.ENODEV}


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
