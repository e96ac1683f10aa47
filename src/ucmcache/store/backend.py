"""The contract between ucmcache and whatever keeps bytes beyond host memory.

A backend is a flat map from 16-byte ids to immutable objects, inside a *bucket*: one per namespace and rank. It knows
nothing of models. Calls block and may be made from several threads at once; ucmcache never makes one on the thread that
schedules or computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Protocol, runtime_checkable
from urllib.parse import urlsplit

from ucmcache.errors import ConfigError

ENTRY_POINTS = "ucmcache.backends"

Buffer = bytes | bytearray | memoryview


@runtime_checkable
class Bucket(Protocol):
    """The objects of one namespace and rank.

    Guaranteed by the caller: ids are 16 bytes; an id always names the same content.
    Promised: an object is seen whole or not at all, also after a crash at any point and with other writers of the same
    id; `get_into` reports what is there, it does not vouch for it (the record layer checks).
    Never: follow a link, execute or unpickle content, raise for a missing object.
    """

    def put(self, id: bytes, parts: Sequence[Buffer]) -> int:
        """Store the concatenation of `parts` under `id`, atomically; returns the bytes it takes in the backend.

        An object that is already there is replaced. Raises BackendError, nothing is left behind then; BackendFullError
        for want of room.
        """

    def get_into(self, id: bytes, parts: Sequence[memoryview], filled: Callable[[int], None] | None = None) -> bool:
        """Fill the writable `parts` in order with the object's bytes; False if there is no such object.

        A backend that reads piece by piece may tell `filled` of so many more bytes that are in place, in order, and
        will not change any more: they are checked while they are in the CPU's cache. Nothing has to be told.

        Raises RecordError("length") unless the object is exactly as long as the parts together, BackendError for I/O.
        """

    def contains(self, id: bytes) -> bool:
        """Whether an object is there now."""

    def touch(self, ids: Sequence[bytes]) -> None:
        """These objects were used elsewhere, and should be kept rather than others; what is missing is passed over."""

    def delete(self, id: bytes) -> bool:
        """Remove an object; False if it was not there."""

    def quarantine(self, id: bytes) -> bool:
        """Take an object that failed its check out of reach, kept for inspection where that is possible."""

    def scan(self) -> Iterator[bytes]:
        """Ids of all objects, in no order, each once, as they are found; foreign files are skipped."""

    def clear(self) -> int:
        """Remove all objects of this bucket; returns how many."""


@runtime_checkable
class Backend(Protocol):
    """Opens buckets and remembers what each namespace stands for."""

    def bucket(self, namespace: bytes, rank: int) -> Bucket:
        """The bucket of a namespace (16 bytes) and rank; made when first written to, so opening is free."""

    def describe(self, namespace: bytes, fields: Mapping[str, str]) -> None:
        """Store the namespace's fields beside its objects, for people and for `namespaces`. Raises BackendError."""

    def namespaces(self) -> dict[bytes, dict[str, str]]:
        """Digest -> fields of every namespace described here; unreadable ones are left out."""

    def used_bytes(self) -> int:
        """Bytes that all objects of all namespaces take in the backend."""

    def close(self) -> None:
        """Release what the backend holds; calls made afterwards raise BackendError."""


def open_backend(url: str, capacity_bytes: int | None = None) -> Backend:
    """The backend that `url`'s scheme names: `file:///absolute/path`, `memory:`, or one that another package offers.

    Those are entry points of the group `ucmcache.backends`, named by their scheme. Raises ConfigError for any other.
    """
    # Imported here, so that a backend's own dependency is needed only where it is used.
    scheme = urlsplit(url).scheme
    if scheme == "file":
        from ucmcache.store.backends.file import FileBackend

        return FileBackend.from_url(url, capacity_bytes)
    if scheme == "memory":
        from ucmcache.store.backends.memory import MemoryBackend

        return MemoryBackend(capacity_bytes)
    offered = entry_points(group=ENTRY_POINTS)
    for point in offered:
        if point.name == scheme:
            backend: Backend = point.load()(url, capacity_bytes)
            return backend
    others = "".join(f", {name}: of another package" for name in sorted({point.name for point in offered}))
    raise ConfigError(
        f'backend.url is "{url}"; accepted are file:///absolute/path and memory:{others} — write the directory as '
        "file:///absolute/path, or install the package that offers this scheme"
    )
