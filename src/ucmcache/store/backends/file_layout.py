"""Where the file backend puts things, and how to list what is there.

root/usage, root/collector                          what all files take, and the lease of who makes room
root/ns-<32 hex>/namespace.json                     what the namespace stands for
root/ns-<32 hex>/r<rank>/<first 2 hex>/<32 hex>.kv  an object, named by its id
root/ns-<32 hex>/r<rank>/tmp/                       objects that are being written
root/ns-<32 hex>/r<rank>/quarantine/                objects that failed their check
root/ns-<32 hex>/tmp/                               namespace.json that is being written
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import xxhash

from ucmcache.store.backends.file_io import stored_bytes
from ucmcache.store.backends.file_order import SECOND_NS, Listed, place_from

TEMPORARY_FOLDER = "tmp"
QUARANTINE_FOLDER = "quarantine"
NAMESPACE_FILE = "namespace.json"
OBJECT_SUFFIX = ".kv"

_NAMESPACE_NAME = re.compile(r"ns-([0-9a-f]{32})")
_RANK_NAME = re.compile(r"r(0|[1-9][0-9]*)")
_SHARD_NAME = re.compile(r"[0-9a-f]{2}")
_QUARANTINED_NAME = re.compile(r"[0-9a-f]{32}\.kv\.[0-9a-f]{32}")
_TEMPORARY_NAME = re.compile(r"([0-9a-f]{16})-([1-9][0-9]{0,8})-[0-9a-f]{32}-([0-9]{1,18})\.tmp")

_DEAD_OWNER_S = 60
_ANY_OWNER_S = 3600


class FileKind(Enum):
    """What a file below the root is."""

    OBJECT = "object"
    QUARANTINED = "quarantined"
    TEMPORARY = "temporary"


class StoredFile(NamedTuple):
    """One file of the backend as a listing found it."""

    path: str
    kind: FileKind
    stored_bytes: int
    modified_ns: int
    access_ns: int
    inode: int

    @property
    def counted_bytes(self) -> int:
        """What it takes, or will once it is written."""
        match = _TEMPORARY_NAME.fullmatch(os.path.basename(self.path))
        return self.stored_bytes if match is None else max(self.stored_bytes, int(match[3]))

    def listed(self) -> Listed:
        """An object as the order of eviction needs it."""
        shard, name = os.path.split(self.path)
        used_s = max(self.access_ns, self.modified_ns) // SECOND_NS
        place = place_from(self.access_ns, self.modified_ns)
        return Listed(self.path, os.path.dirname(shard), _id_of(name), self.stored_bytes, used_s, place)


def process_alive(pid: int) -> bool:
    """Whether this machine runs a process `pid`, of any user."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def host_digest(host_name: str) -> str:
    """16 hex digits that tell this host's temporaries from another's."""
    return xxhash.xxh3_64_hexdigest(host_name.encode(errors="surrogateescape"))


@dataclass(frozen=True, slots=True)
class Temporaries:
    """Names for files that are being written, and the rule for those whose writer died."""

    clock_ns: Callable[[], int] = time.time_ns
    pid: Callable[[], int] = os.getpid
    unique: Callable[[], str] = lambda: uuid.uuid4().hex
    host: str = host_digest(os.uname().nodename)
    alive: Callable[[int], bool] = process_alive

    def name(self, nbytes: int) -> str:
        """A name that no other writer on any host uses, for a file that will take `nbytes`."""
        return f"{self.host}-{self.pid()}-{self.unique()}-{nbytes}.tmp"

    def abandoned(self, name: str, modified_ns: int) -> bool:
        """Whether the temporary `name`, last written to at `modified_ns`, will never be finished.

        A writer of another host cannot be asked whether it lives, and a live process may merely have inherited a dead
        one's number (usual in containers): for both, nothing written for an hour counts as dead.
        """
        match = _TEMPORARY_NAME.fullmatch(name)
        if match is None:
            return False
        age_s = (self.clock_ns() - modified_ns) / 1e9
        if age_s > _ANY_OWNER_S:
            return True
        return age_s > _DEAD_OWNER_S and match[1] == self.host and not self.alive(int(match[2]))


def namespace_folder(root: str, namespace: bytes) -> str:
    """Folder of a namespace."""
    return os.path.join(root, f"ns-{namespace.hex()}")


def namespace_folders(root: str) -> Iterator[tuple[bytes, str]]:
    """Digest and folder of every namespace under `root`; none if there is no root. Raises OSError."""
    for entry in _folders(root, _NAMESPACE_NAME):
        yield bytes.fromhex(entry.name[3:]), entry.path


def walk_root(root: str) -> Iterator[StoredFile]:
    """Every file of every namespace that counts against the capacity, each once. Raises OSError."""
    for _, namespace in namespace_folders(root):
        yield from walk_temporaries(namespace)
        for rank in _folders(namespace, _RANK_NAME):
            # In this order, which is that in which files move: one that is finished meanwhile is met again, not missed.
            unfinished = list(walk_temporaries(rank.path))
            yield from unfinished
            met = {file.inode for file in unfinished}
            yield from (file for file in walk_objects(rank.path) if file.inode not in met)
            yield from walk_quarantine(rank.path)


def walk_objects(bucket: str) -> Iterator[StoredFile]:
    """The objects of one bucket folder, each once. Raises OSError."""
    for shard in _folders(bucket, _SHARD_NAME):
        yield from _files(shard.path, _object_name(shard.name), FileKind.OBJECT)


def object_ids(bucket: str, skip: Callable[[OSError], None]) -> Iterator[bytes]:
    """Ids of the objects of one bucket folder, each once, without asking the disk about any of them.

    Raises OSError; a sub-folder that cannot be listed is told to `skip` and passed over.
    """
    for shard in _folders(bucket, _SHARD_NAME):
        try:
            entries = _entries(shard.path, _object_name(shard.name))
        except OSError as error:
            skip(error)
            continue
        for entry in entries:
            if entry.is_file(follow_symlinks=False):
                yield _id_of(entry.name)


def walk_quarantine(bucket: str) -> Iterator[StoredFile]:
    """The quarantined objects of one bucket folder. Raises OSError."""
    return _files(os.path.join(bucket, QUARANTINE_FOLDER), _QUARANTINED_NAME, FileKind.QUARANTINED)


def walk_temporaries(folder: str) -> Iterator[StoredFile]:
    """What is being written below a bucket or namespace folder. Raises OSError."""
    return _files(os.path.join(folder, TEMPORARY_FOLDER), _TEMPORARY_NAME, FileKind.TEMPORARY)


def _object_name(shard: str) -> re.Pattern[str]:
    return re.compile(shard + r"[0-9a-f]{30}" + re.escape(OBJECT_SUFFIX))


def _id_of(name: str) -> bytes:
    return bytes.fromhex(name.removesuffix(OBJECT_SUFFIX))


def _folders(parent: str, name: re.Pattern[str]) -> list[os.DirEntry[str]]:
    return [entry for entry in _entries(parent, name) if entry.is_dir(follow_symlinks=False)]


def _files(folder: str, name: re.Pattern[str], kind: FileKind) -> Iterator[StoredFile]:
    for entry in _entries(folder, name):
        if not entry.is_file(follow_symlinks=False):
            continue
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue  # removed since it was listed
        yield StoredFile(entry.path, kind, stored_bytes(status), status.st_mtime_ns, status.st_atime_ns, status.st_ino)


def _entries(folder: str, name: re.Pattern[str]) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as listing:
            # By name, since a listing may show a name twice that is replaced meanwhile.
            return list({entry.name: entry for entry in listing if name.fullmatch(entry.name)}.values())
    except FileNotFoundError:
        return []
