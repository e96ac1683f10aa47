"""Objects in this process's memory: for tests, demonstrations, and as the shortest complete backend to read."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence

from ucmcache.errors import BackendError, RecordError
from ucmcache.store.backend import Bucket, Buffer
from ucmcache.store.backends import byte_views, check_bucket_name, check_capacity, check_fits

_BucketName = tuple[bytes, int]


class MemoryBackend:
    """A dict behind a lock; gone with the process.

    With `capacity_bytes` the least recently used objects of all buckets make room. Raises ConfigError for a capacity
    that is not positive.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        check_capacity(capacity_bytes)
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._objects: OrderedDict[tuple[_BucketName, bytes], bytes] = OrderedDict()  # least recently used first
        self._used_bytes = 0
        self._fields: dict[bytes, dict[str, str]] = {}
        self._closed = False

    def bucket(self, namespace: bytes, rank: int) -> Bucket:
        """The bucket of a namespace (16 bytes) and rank. Raises ContractError for a malformed name."""
        self._check_open()
        check_bucket_name(namespace, rank)
        return _MemoryBucket(self, (namespace, rank))

    def describe(self, namespace: bytes, fields: Mapping[str, str]) -> None:
        """Remember what `namespace` stands for."""
        self._check_open()
        self._fields[namespace] = dict(fields)

    def namespaces(self) -> dict[bytes, dict[str, str]]:
        """Digest -> fields of every namespace described here."""
        self._check_open()
        return {namespace: dict(fields) for namespace, fields in self._fields.items()}

    def used_bytes(self) -> int:
        """Bytes of all objects together."""
        self._check_open()
        return self._used_bytes

    def close(self) -> None:
        """Let go of all objects; calls made afterwards raise BackendError."""
        with self._lock:
            self._closed = True
            self._objects.clear()
            self._fields.clear()

    # -- for the buckets ------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise BackendError("the memory backend is closed")

    def _put(self, bucket: _BucketName, id: bytes, content: bytes) -> None:
        check_fits(len(content), self._capacity_bytes)
        with self._lock:
            self._check_open()
            self._remove((bucket, id))
            self._objects[(bucket, id)] = content
            self._used_bytes += len(content)
            # The new object is the most recently used one and fits alone, so this ends before it.
            while self._capacity_bytes is not None and self._used_bytes > self._capacity_bytes:
                self._remove(next(iter(self._objects)))

    def _get(self, bucket: _BucketName, id: bytes) -> bytes | None:
        with self._lock:
            self._check_open()
            content = self._objects.get((bucket, id))
            if content is not None:
                self._objects.move_to_end((bucket, id))
            return content

    def _contains(self, bucket: _BucketName, id: bytes) -> bool:
        with self._lock:
            self._check_open()
            return (bucket, id) in self._objects

    def _touch(self, bucket: _BucketName, ids: Sequence[bytes]) -> None:
        with self._lock:
            self._check_open()
            for id in ids:
                if (bucket, id) in self._objects:
                    self._objects.move_to_end((bucket, id))

    def _delete(self, bucket: _BucketName, id: bytes) -> bool:
        with self._lock:
            self._check_open()
            return self._remove((bucket, id))

    def _list(self, bucket: _BucketName) -> list[bytes]:
        with self._lock:
            self._check_open()
            return [id for owner, id in self._objects if owner == bucket]

    def _clear(self, bucket: _BucketName) -> int:
        with self._lock:
            self._check_open()
            return sum(self._remove(name) for name in list(self._objects) if name[0] == bucket)

    def _remove(self, name: tuple[_BucketName, bytes]) -> bool:
        content = self._objects.pop(name, None)
        if content is not None:
            self._used_bytes -= len(content)
        return content is not None


class _MemoryBucket:
    """One bucket; see `ucmcache.store.backend.Bucket`."""

    def __init__(self, backend: MemoryBackend, name: _BucketName) -> None:
        self._backend = backend
        self._name = name

    def put(self, id: bytes, parts: Sequence[Buffer]) -> int:
        content = b"".join(byte_views(parts))
        self._backend._put(self._name, id, content)
        return len(content)

    def get_into(self, id: bytes, parts: Sequence[memoryview], filled: Callable[[int], None] | None = None) -> bool:
        content = self._backend._get(self._name, id)
        if content is None:
            return False
        views = byte_views(parts)
        wanted_bytes = sum(len(view) for view in views)
        if len(content) != wanted_bytes:
            raise RecordError("length", f"an object of {len(content)} bytes, asked for {wanted_bytes}")
        source, offset = memoryview(content), 0
        for view in views:
            view[:] = source[offset : offset + len(view)]
            offset += len(view)
        return True

    def contains(self, id: bytes) -> bool:
        return self._backend._contains(self._name, id)

    def touch(self, ids: Sequence[bytes]) -> None:
        self._backend._touch(self._name, ids)

    def delete(self, id: bytes) -> bool:
        return self._backend._delete(self._name, id)

    def quarantine(self, id: bytes) -> bool:
        # Nobody could inspect it later: it would end with the process.
        return self._backend._delete(self._name, id)

    def scan(self) -> Iterator[bytes]:
        return iter(self._backend._list(self._name))

    def clear(self) -> int:
        return self._backend._clear(self._name)
