"""Threads for storage that an exiting process does not wait for.

The standard library's pool joins its threads at exit, so one call that hangs on dead storage keeps the process for
ever.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class DaemonPool(Executor):
    """A fixed number of daemon threads that run jobs in the order they were submitted.

    Guaranteed by the caller: whoever needs a job's effect waits for its future before the process ends.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run `fn` later. Raises RuntimeError after shutdown."""
        if self._closed.is_set():
            raise RuntimeError("the pool is shut down")
        future: Future[Any] = Future()
        self._jobs.put((future, lambda: fn(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more jobs; with `cancel_futures`, those not yet started are cancelled."""
        if not self._closed.is_set():
            self._closed.set()
            while cancel_futures:
                try:
                    job = self._jobs.get_nowait()
                except queue.Empty:
                    break
                if job is not None:
                    job[0].cancel()
            for _ in self._threads:
                self._jobs.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, run = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = run()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
