"""A rank's calls to its backend, on threads of their own: nothing that computes or schedules ever waits for one.

Reads go before writes, and never wait for a thread that writes: a request waits for a read, nobody for a write. What
cannot be taken is refused at once and told why; nothing is dropped in silence.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass

from ucmcache.errors import BackendFullError, RecordError
from ucmcache.store.breaker import Breaker

# Why a call was not made, or not made again.
REFUSED = "breaker"  # its backend is left alone for a while
QUEUE_FULL = "queue_full"
SHUTDOWN = "shutdown"
FULL = "full"

READ_BACKOFF_S = (0.01, 0.05)
WRITE_BACKOFF_S = (0.1, 0.5, 2.0)
THREADS = 3  # of which two may write: one hashes while the other waits for the disk


@dataclass(slots=True, eq=False)
class Call:
    """One call to a backend. `run` returns a cause, empty for success, or raises.

    `done` gets the cause and what was raised last, on any thread, once, and does not raise.
    """

    run: Callable[[], str]
    done: Callable[[str, Exception | None], None]
    is_read: bool = False
    nbytes: int = 0  # of the slot that a write keeps from being used
    backoff_s: Sequence[float] = ()  # how long to wait before each further attempt
    key: Hashable = None
    attempts: int = 0


class Pipeline:
    """Makes calls in the order of their submission, reads first, and each again as often as its backoff says.

    Writes that wait hold at most `queue_bytes` (None: any), others are refused. A call that takes longer than
    `deadline_s` opens the breaker; there are never more such calls than threads, and while they take all that a call
    could be made on, it is refused. `watch` has to be called now and then. `on_retry` hears of every further attempt.
    """

    def __init__(
        self,
        deadline_s: float,
        *,
        queue_bytes: int | None = None,
        threads: int = THREADS,
        breaker: Breaker | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_retry: Callable[[], None] = lambda: None,
    ) -> None:
        self.queue_bytes = queue_bytes
        self.breaker = breaker or Breaker()
        self._deadline_s = deadline_s
        self._most_threads = threads
        self._clock = clock
        self._on_retry = on_retry
        self._lock = threading.Lock()
        self._to_do = threading.Condition(self._lock)  # threads wait here
        self._ended = threading.Condition(self._lock)  # and here those who wait for calls
        self._idle_threads = 0
        self._reads: deque[Call] = deque()
        self._writes: deque[Call] = deque()
        self._again: list[tuple[float, int, Call]] = []  # when, number, call
        self._numbers = 0
        self._queued_bytes = 0
        self._active: dict[Call, float] = {}  # since when
        self._late: set[Call] = set()
        self._ending = 0  # calls that are made, or refused, and about to be told so
        self._keys: Counter[Hashable] = Counter()
        self._threads: list[threading.Thread] = []
        self._closing = False

    @property
    def answers(self) -> bool:
        """Whether reads are made now; else they are refused."""
        return self._makes(is_read=True)

    @property
    def pending(self) -> int:
        """Calls that were taken and are not done."""
        with self._lock:
            return self._pending()

    def submit(self, calls: Sequence[Call]) -> None:
        """Take calls, or refuse them at once."""
        refused: list[tuple[Call, str]] = []
        makes = {is_read: self._makes(is_read) for is_read in (True, False)}
        with self._lock:
            for call in calls:
                cause = SHUTDOWN if self._closing else "" if makes[call.is_read] else REFUSED
                if not cause and not call.is_read and call.nbytes and self._queued_bytes:
                    full = self.queue_bytes is not None and self._queued_bytes + call.nbytes > self.queue_bytes
                    cause = QUEUE_FULL if full else ""
                if cause:
                    refused.append((call, cause))
                else:
                    self._queue(call)
                    self._keys[call.key] += 1
            if self._pending() and len(self._threads) < self._most_threads:
                self._start_threads()
            self._to_do.notify()
        for call, cause in refused:
            call.done(cause, None)

    def watch(self) -> None:
        """Notice calls that hang, and refuse what waits while the backend does not answer."""
        now_s = self._clock()
        with self._lock:
            late = {call for call, since_s in self._active.items() if now_s - since_s > self._deadline_s} - self._late
            self._late |= late
        if late:
            self.breaker.trip()
        for is_read in (True, False):
            if not self._makes(is_read):
                self._refuse_all(REFUSED, is_read)

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing is pending; False if that took too long."""
        with self._lock:
            return self._ended.wait_for(lambda: not self._pending(), timeout_s)

    def wait_for(self, keys: Collection[Hashable], timeout_s: float) -> bool:
        """Wait until no call with one of these keys is pending; False if that took too long."""
        with self._lock:
            return self._ended.wait_for(lambda: not any(self._keys[key] for key in keys), timeout_s)

    def close(self, timeout_s: float) -> int:
        """Take no more calls, finish those that were taken, within a deadline; how many were given up."""
        with self._lock:
            self._closing = True
            while self._again:  # their last chance is now
                self._queue(heapq.heappop(self._again)[2])
            self._to_do.notify_all()
        self.wait_idle(timeout_s if self.answers else 0.0)
        given_up = self._refuse_all(SHUTDOWN, is_read=True) + self._refuse_all(SHUTDOWN, is_read=False)
        with self._lock:
            return given_up + len(self._active)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _start_threads(self) -> None:
        # Daemons: one that hangs on dead storage must not keep an exiting process for ever.
        for number in range(self._most_threads):
            thread = threading.Thread(target=self._work, name=f"ucmcache-io-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _pending(self) -> int:
        return len(self._reads) + len(self._writes) + len(self._again) + len(self._active) + self._ending

    def _queue(self, call: Call) -> None:
        (self._reads if call.is_read else self._writes).append(call)
        self._queued_bytes += 0 if call.is_read else call.nbytes

    def _work(self) -> None:
        while (call := self._next()) is not None:
            cause, error, again = self._made(call)
            with self._lock:
                del self._active[call]
                self._late.discard(call)
                again = again and call.attempts < len(call.backoff_s) and not self._closing
                if again:
                    self._numbers += 1
                    due_s = self._clock() + call.backoff_s[call.attempts]
                    heapq.heappush(self._again, (due_s, self._numbers, call))
                    call.attempts += 1
                else:
                    self._ending += 1
            if again:
                self._on_retry()
            else:
                self._end([call], cause, error)

    def _next(self) -> Call | None:
        with self._lock:
            while (call := self._taken()) is None:
                if self._closing and not self._writes and not self._again:
                    return None
                self._idle_threads += 1
                self._to_do.wait(self._again[0][0] - self._clock() if self._again else None)
                self._idle_threads -= 1
            if self._idle_threads and self._can_take():
                self._to_do.notify()  # one wakes the next, as far as there is work: waking all for each call costs more
            return call

    def _taken(self) -> Call | None:
        now_s = self._clock()
        while self._again and self._again[0][0] <= now_s:
            self._queue(heapq.heappop(self._again)[2])
        if not self._can_take():
            return None
        if self._reads:
            call = self._reads.popleft()
        else:
            call = self._writes.popleft()
            self._queued_bytes -= call.nbytes
        self._active[call] = now_s
        return call

    def _can_take(self) -> bool:
        return bool(self._reads or (self._writes and _writing(self._active) < self._most_writing))

    @property
    def _most_writing(self) -> int:
        return max(1, self._most_threads - 1)

    def _makes(self, is_read: bool) -> bool:
        """Whether a call that is submitted now would be made."""
        with self._lock:
            hung = len(self._late) >= self._most_threads
            hung = hung or (not is_read and _writing(self._late) >= self._most_writing)
        return not hung and not self.breaker.is_open

    def _made(self, call: Call) -> tuple[str, Exception | None, bool]:
        """Make a call; its cause, what it raised, and whether another attempt might do better."""
        if not self.breaker.allows():
            return REFUSED, None, False
        try:
            cause = call.run()
        except RecordError as error:
            self._answered(call)
            return error.cause, error, False
        except BackendFullError as error:
            self._answered(call)
            return FULL, error, True
        except Exception as error:
            self.breaker.failed(again=call.attempts > 0)
            return type(error).__name__, error, not self.breaker.is_open
        self._answered(call)
        return cause, None, False

    def _answered(self, call: Call) -> None:
        with self._lock:
            late = call in self._late
        if not late:  # the breaker has already judged that one
            self.breaker.succeeded()

    def _end(self, calls: Sequence[Call], cause: str, error: Exception | None) -> None:
        for call in calls:
            call.done(cause, error)
        with self._lock:  # afterwards: who waits for a call waits for what it brings about, too
            self._ending -= len(calls)
            before = len(self._keys)
            for call in calls:
                self._keys[call.key] -= 1
                if not self._keys[call.key]:
                    del self._keys[call.key]
            if len(self._keys) < before:
                self._ended.notify_all()

    def _refuse_all(self, cause: str, is_read: bool) -> int:
        with self._lock:
            waiting = self._reads if is_read else self._writes
            calls = [*waiting, *(call for _, _, call in self._again if call.is_read == is_read)]
            waiting.clear()
            self._again = [one for one in self._again if one[2].is_read != is_read]
            heapq.heapify(self._again)
            if not is_read:
                self._queued_bytes = 0
            self._ending += len(calls)
        self._end(calls, cause, None)
        return len(calls)


def _writing(calls: Iterable[Call]) -> int:
    return sum(not call.is_read for call in calls)
