"""A circuit breaker: a backend that keeps failing is left alone for a while, so that nobody waits for it in vain."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

FAILURES = 5
COOL_DOWN_S = 10.0


class Breaker:
    """Opens after `failures` calls in a row that failed; `cool_down_s` later one call is let through to try.

    If that one succeeds the breaker closes, else it stays open for as long again. Threads may call at once.
    Guaranteed by the caller: every call that `allows` let through ends in `succeeded` or `failed`.
    """

    def __init__(
        self, failures: int = FAILURES, cool_down_s: float = COOL_DOWN_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most = failures
        self._cool_down_s = cool_down_s
        self._clock = clock
        self._lock = threading.Lock()
        self._failed = 0  # in a row
        self._retry_s: float | None = None  # when to try again; None while closed
        self._trying = False
        self.openings = 0

    @property
    def is_open(self) -> bool:
        """Whether a call made now would be refused."""
        with self._lock:
            return self._refuses()

    def allows(self) -> bool:
        """Whether to make a call now."""
        with self._lock:
            if self._refuses():
                return False
            self._trying = self._retry_s is not None
            return True

    def succeeded(self) -> None:
        """A call that was allowed did what it was asked."""
        with self._lock:
            self._failed = 0
            self._retry_s = None
            self._trying = False

    def failed(self, again: bool = False) -> None:
        """A call that was allowed failed for a reason of the backend's own.

        One that failed `again` says nothing new, unless it was the one that was let through to try.
        """
        with self._lock:
            if again and not self._trying:
                return
            self._failed += 1
            if self._failed >= self._most or self._trying:
                self.openings += self._retry_s is None
                self._retry_s = self._clock() + self._cool_down_s
                self._trying = False

    def trip(self) -> None:
        """Open at once, or stay open for longer: a call hangs."""
        with self._lock:
            self.openings += self._retry_s is None
            self._retry_s = self._clock() + self._cool_down_s
            self._trying = False

    def _refuses(self) -> bool:
        return self._retry_s is not None and (self._trying or self._clock() < self._retry_s)
