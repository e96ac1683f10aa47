"""Objects as files of a local or shared disk; safe with several processes and hosts on one root.

Every write goes to a file of its own and becomes visible by one rename, so killing a writer at any point leaves whole
objects only. Without `fsync` a power cut may cost objects or tear them, and the record layer recognises those.
Nothing but a regular file is ever read as an object; the folders themselves are private (0700), so trusted.
"""

from __future__ import annotations

import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from urllib.parse import unquote_to_bytes, urlsplit

from ucmcache.errors import BackendError, ConfigError, RecordError
from ucmcache.store.backend import Bucket, Buffer
from ucmcache.store.backends import check_bucket_name
from ucmcache.store.backends.file_bytes import read_exact
from ucmcache.store.backends.file_folder import WriteFolder
from ucmcache.store.backends.file_io import (
    failing_as,
    open_regular,
    regular_status,
    stored_bytes,
)
from ucmcache.store.backends.file_layout import (
    NAMESPACE_FILE,
    OBJECT_SUFFIX,
    QUARANTINE_FOLDER,
    Temporaries,
    host_digest,
    namespace_folder,
    namespace_folders,
    object_ids,
    process_alive,
    walk_objects,
    walk_quarantine,
    walk_root,
)
from ucmcache.store.backends.file_order import touched
from ucmcache.store.backends.file_space import Space

logger = logging.getLogger(__name__)

QUARANTINE_FILES = 16  # kept per bucket for inspection

_OPTIONS = {"": False, "fsync=false": False, "fsync=true": True}
_TOUCH_INTERVAL_NS = 60 * 10**9
_DESCRIPTION_LIMIT_BYTES = 1 << 20


class FileBackend:
    """A directory tree (see `file_layout`), made at the first write.

    With `capacity_bytes` objects of all namespaces make room, in the order of `file_order`. With `fsync` an object that
    was put is on the disk itself. Time, process identity and randomness may be given. Raises ConfigError for a capacity
    that is not positive.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        capacity_bytes: int | None = None,
        *,
        fsync: bool = False,
        clock_ns: Callable[[], int] = time.time_ns,
        pid: Callable[[], int] = os.getpid,
        unique: Callable[[], str] = lambda: uuid.uuid4().hex,
        host_name: str | None = None,
        alive: Callable[[int], bool] = process_alive,
    ) -> None:
        self.root = os.path.abspath(root)
        host = host_digest(os.uname().nodename if host_name is None else host_name)
        self._temporaries = Temporaries(clock_ns, pid, unique, host, alive)
        self._space = Space(self.root, capacity_bytes, self._temporaries)
        self._fsync = fsync
        self._folders: dict[str, WriteFolder] = {}
        self._closed = False

    @classmethod
    def from_url(cls, url: str, capacity_bytes: int | None = None) -> FileBackend:
        """The backend of `file:///absolute/path` (percent-decoded), with `?fsync=true` if wanted.

        Raises ConfigError for any other URL.
        """
        try:
            split = urlsplit(url)
        except ValueError as error:
            raise _refused(url, str(error)) from error
        path = unquote_to_bytes(split.path)
        if split.scheme != "file":
            raise _refused(url, "its scheme is not file")
        if split.netloc:
            raise _refused(url, f'"{split.netloc}" is read as a host name')
        if split.query not in _OPTIONS or split.fragment:
            raise _refused(url, "the only option is fsync=true; a ? or # in a path is written %3F or %23")
        if not path.startswith(b"/") or not path.strip(b"/") or b"\0" in path:
            raise _refused(url, "it names no absolute path of a directory")
        return cls(os.fsdecode(path), capacity_bytes, fsync=_OPTIONS[split.query])

    def bucket(self, namespace: bytes, rank: int) -> Bucket:
        """The bucket of a namespace (16 bytes) and rank. Raises ContractError for a malformed name."""
        self._check_open()
        check_bucket_name(namespace, rank)
        return _FileBucket(self._folder(namespace, f"r{rank}"), self._check_open)

    def describe(self, namespace: bytes, fields: Mapping[str, str]) -> None:
        """Write the namespace's namespace.json. Raises BackendError."""
        self._check_open()
        text = json.dumps(dict(fields), sort_keys=True, indent=1).encode()
        with failing_as(f"describing a namespace in {self.root}"):
            self._folder(namespace).write(NAMESPACE_FILE, [text], counts=False)

    def namespaces(self) -> dict[bytes, dict[str, str]]:
        """Digest -> fields of every readable namespace.json. Raises BackendError if the root cannot be listed."""
        self._check_open()
        with failing_as(f"listing {self.root}"):
            found = {
                namespace: _read_fields(os.path.join(folder, NAMESPACE_FILE))
                for namespace, folder in namespace_folders(self.root)
            }
        return {namespace: fields for namespace, fields in found.items() if fields is not None}

    def used_bytes(self) -> int:
        """Bytes of disk that all objects take, with quarantined and unfinished ones; lists the whole root."""
        self._check_open()
        with failing_as(f"listing {self.root}"):
            return sum(file.stored_bytes for file in walk_root(self.root))

    def close(self) -> None:
        """Calls made afterwards raise BackendError; nothing is kept open in between calls."""
        self._closed = True
        self._space.close()

    def _folder(self, namespace: bytes, *below: str) -> WriteFolder:
        path = os.path.join(namespace_folder(self.root, namespace), *below)
        # One per path, so that a bucket opened twice is swept once.
        return self._folders.setdefault(path, self._new_folder(path))

    def _new_folder(self, path: str) -> WriteFolder:
        return WriteFolder(self.root, path, self._temporaries, self._space, self._fsync)

    def _check_open(self) -> None:
        if self._closed:
            raise BackendError(f"the file backend of {self.root} is closed")


class _FileBucket:
    """One bucket; see `ucmcache.store.backend.Bucket`."""

    def __init__(self, folder: WriteFolder, check_open: Callable[[], None]) -> None:
        self._folder = folder
        self._space = folder.space
        self._check_open = check_open

    def put(self, id: bytes, parts: Sequence[Buffer]) -> int:
        self._check_open()
        name = self._name(id)
        with failing_as(f"writing {self._path(id)}"):
            # What it replaces stays counted until the next listing: two writers might both take it for theirs.
            return self._folder.write(name, parts)

    def get_into(self, id: bytes, parts: Sequence[memoryview], filled: Callable[[int], None] | None = None) -> bool:
        self._check_open()
        path = self._path(id)
        with failing_as(f"reading {path}"):
            opened = open_regular(path)
            if opened is None:
                return False
            fd, status = opened
            try:
                wanted_bytes = sum(part.nbytes for part in parts)
                if status.st_size != wanted_bytes:
                    raise RecordError("length", f"{path} has {status.st_size} bytes, asked for {wanted_bytes}")
                read_exact(fd, parts, filled)
                self._touch(fd, status)
            finally:
                os.close(fd)
        return True

    def contains(self, id: bytes) -> bool:
        self._check_open()
        path = self._path(id)
        with failing_as(f"looking for {path}"):
            return regular_status(path) is not None

    def touch(self, ids: Sequence[bytes]) -> None:
        self._check_open()
        with failing_as(f"touching objects of {self._folder.path}"):
            for path in map(self._path, ids):
                status = regular_status(path)
                if status is not None:
                    self._touch(path, status)

    def delete(self, id: bytes) -> bool:
        self._check_open()
        path = self._path(id)
        with failing_as(f"removing {path}"):
            return self._remove(path)

    def quarantine(self, id: bytes) -> bool:
        self._check_open()
        path = self._path(id)
        with failing_as(f"quarantining {path}"):
            if regular_status(path) is None:
                return False
            try:
                kept = os.path.join(
                    self._folder.make(QUARANTINE_FOLDER),
                    f"{os.path.basename(path)}.{self._folder.temporaries.unique()}",
                )
                now_ns = self._folder.temporaries.clock_ns()
                os.utime(path, ns=(now_ns, now_ns), follow_symlinks=False)  # the oldest in quarantine go first
                os.rename(path, kept)
            except OSError:
                # Out of reach is what was asked for; keeping it for inspection is the part that may fail.
                return self._remove(path)
            files = sorted(walk_quarantine(self._folder.path), key=lambda file: file.modified_ns)
            for file in files[:-QUARANTINE_FILES]:
                self._space.remove(file.path, file.stored_bytes)
            return True

    def scan(self) -> Iterator[bytes]:
        self._check_open()
        return self._scan()

    def clear(self) -> int:
        self._check_open()
        with failing_as(f"clearing {self._folder.path}"):
            return sum(self._remove(file.path) for file in walk_objects(self._folder.path))

    def _scan(self) -> Iterator[bytes]:
        with failing_as(f"listing {self._folder.path}"):
            yield from object_ids(self._folder.path, _skip_folder)

    def _name(self, id: bytes) -> str:
        text = id.hex()
        return os.path.join(text[:2], text + OBJECT_SUFFIX)

    def _path(self, id: bytes) -> str:
        return os.path.join(self._folder.path, self._name(id))

    def _remove(self, path: str) -> bool:
        status = regular_status(path)
        return status is not None and self._space.remove(path, stored_bytes(status))

    def _touch(self, file: int | str, status: os.stat_result) -> None:
        """Keep what is read from being evicted, at the price of one metadata write a minute."""
        now_ns = self._folder.temporaries.clock_ns()
        if now_ns - max(status.st_atime_ns, status.st_mtime_ns) >= _TOUCH_INTERVAL_NS:
            # The bytes are read; a disk that is mounted read-only or another user's file only loses its recency.
            with suppress(OSError):
                os.utime(file, ns=(touched(now_ns, status.st_atime_ns), status.st_mtime_ns))


def _read_fields(path: str) -> dict[str, str] | None:
    """The fields in a namespace.json; None for one that cannot be read or does not hold a flat map of text."""
    try:
        opened = open_regular(path)
        if opened is None:
            return None
        with open(opened[0], "rb") as file:
            fields = json.loads(file.read(_DESCRIPTION_LIMIT_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if isinstance(fields, dict) and all(isinstance(value, str) for value in fields.values()):
        return fields
    return None


def _refused(url: str, why: str) -> ConfigError:
    return ConfigError(
        f'backend.url is "{url}", but {why}; accepted is file:///absolute/path — write the directory as an absolute '
        "path after file://, without host, query or fragment"
    )


def _skip_folder(error: OSError) -> None:
    # What one folder holds is lost to this process; the rest is not.
    logger.warning("ucmcache: a folder of the backend cannot be listed and is passed over: %s", error)
