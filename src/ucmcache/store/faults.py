"""Wrappers that make any backend fail, dawdle or hang; `ucmcache.store.testing` offers them to backend authors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from ucmcache.errors import BackendError
from ucmcache.store.backend import Backend, Bucket, Buffer


class WrappedBackend:
    """A backend that calls `before(operation name)` ahead of every call into `inner`, for its buckets too.

    The name is the method's: "put", "get_into", "scan", "describe", "close" and so on.
    """

    def __init__(self, inner: Backend, before: Callable[[str], None]) -> None:
        self._inner = inner
        self._before = before

    def bucket(self, namespace: bytes, rank: int) -> Bucket:
        self._before("bucket")
        return _WrappedBucket(self._inner.bucket(namespace, rank), self._before)

    def describe(self, namespace: bytes, fields: Mapping[str, str]) -> None:
        self._before("describe")
        self._inner.describe(namespace, fields)

    def namespaces(self) -> dict[bytes, dict[str, str]]:
        self._before("namespaces")
        return self._inner.namespaces()

    def used_bytes(self) -> int:
        self._before("used_bytes")
        return self._inner.used_bytes()

    def close(self) -> None:
        self._before("close")
        self._inner.close()


class FlakyBackend(WrappedBackend):
    """Raises BackendError from every operation for whose name `fails` is true; `inner` does not see that call."""

    def __init__(self, inner: Backend, fails: Callable[[str], bool]) -> None:
        def before(operation: str) -> None:
            if fails(operation):
                raise BackendError(f"{operation} fails because it was told to")

        super().__init__(inner, before)


class SlowBackend(WrappedBackend):
    """Takes `delay_s` longer for every operation but opening a bucket, which is free by contract."""

    def __init__(self, inner: Backend, delay_s: float, sleep: Callable[[float], None] = time.sleep) -> None:
        def before(operation: str) -> None:
            if operation != "bucket":
                sleep(delay_s)

        super().__init__(inner, before)


class HungBackend(WrappedBackend):
    """Every operation for whose name `hangs` is true waits for `release`, as a mount whose server is gone does."""

    def __init__(self, inner: Backend, hangs: Callable[[str], bool] = lambda operation: operation != "bucket") -> None:
        self._released = threading.Event()
        self._lock = threading.Lock()
        self.waiting = 0  # calls that hang now

        def before(operation: str) -> None:
            if not hangs(operation) or self._released.is_set():
                return
            with self._lock:
                self.waiting += 1
            self._released.wait()
            with self._lock:
                self.waiting -= 1

        super().__init__(inner, before)

    def release(self) -> None:
        """The backend answers again, also the calls that hang."""
        self._released.set()


class _WrappedBucket:
    def __init__(self, inner: Bucket, before: Callable[[str], None]) -> None:
        self._inner = inner
        self._before = before

    def put(self, id: bytes, parts: Sequence[Buffer]) -> int:
        self._before("put")
        return self._inner.put(id, parts)

    def get_into(self, id: bytes, parts: Sequence[memoryview], filled: Callable[[int], None] | None = None) -> bool:
        self._before("get_into")
        return self._inner.get_into(id, parts, filled)

    def contains(self, id: bytes) -> bool:
        self._before("contains")
        return self._inner.contains(id)

    def touch(self, ids: Sequence[bytes]) -> None:
        self._before("touch")
        self._inner.touch(ids)

    def delete(self, id: bytes) -> bool:
        self._before("delete")
        return self._inner.delete(id)

    def quarantine(self, id: bytes) -> bool:
        self._before("quarantine")
        return self._inner.quarantine(id)

    def scan(self) -> Iterator[bytes]:
        self._before("scan")
        return self._inner.scan()

    def clear(self) -> int:
        self._before("clear")
        return self._inner.clear()
