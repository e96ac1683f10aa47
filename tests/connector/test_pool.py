"""DaemonPool: order, shutdown, and a process that ends although a job does not."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from ucmcache.connector.pool import DaemonPool


def test_jobs_run_in_order_and_report() -> None:
    pool = DaemonPool(1, "test")
    seen: list[int] = []
    futures = [pool.submit(seen.append, i) for i in range(50)]
    failing = pool.submit(int, "no number")
    for future in futures:
        future.result(timeout=10)
    assert seen == list(range(50))
    with pytest.raises(ValueError, match="no number"):
        failing.result(timeout=10)
    pool.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        pool.submit(int)


def test_shutdown_cancels_what_has_not_started() -> None:
    pool, started, release = DaemonPool(1, "test"), threading.Event(), threading.Event()

    def run() -> bool:
        started.set()
        return release.wait(10)

    running = pool.submit(run)
    waiting = pool.submit(int)
    assert started.wait(10)
    pool.shutdown(wait=False, cancel_futures=True)
    assert waiting.cancelled()
    release.set()
    assert running.result(timeout=10)


def test_a_process_ends_although_its_storage_hangs() -> None:
    code = (
        "import time; from ucmcache.connector.pool import DaemonPool\n"
        "pool = DaemonPool(2, 'io'); pool.submit(time.sleep, 3600)\n"
        "pool.shutdown(wait=False, cancel_futures=True); print('ended')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "ended\n"
