"""An engine on a disk that fails under it: right outputs while it lasts, and the disk is used again afterwards.

The disk is a file system of its own, of 64 MiB. What cannot be had of a real one (an I/O error at a byte) is injected
below the file backend, at the system calls.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.crash.disks import DISK_BYTES, failing_reads, failing_writes, mount, mounted
from tests.sim.engine import VOCAB, SimEngine
from tests.sim.test_resume import HOST, MIXES, assert_at_rest

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")

_COOL_DOWN_S = 0.3


@contextmanager
def full(disk: Path) -> Iterator[None]:
    """Nothing is left on the disk."""
    ballast = disk / "ballast"
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)), open(ballast, "wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 20))
    yield
    ballast.unlink()


@contextmanager
def read_only(disk: Path) -> Iterator[None]:
    assert mount("-o", "remount,ro", str(disk)) == ""
    yield
    assert mount("-o", f"remount,rw,size={DISK_BYTES}", str(disk)) == ""


def failing(code: int) -> Callable[[Path], AbstractContextManager[None]]:
    """Reads and writes fail at a byte: of the header, or of the payload behind it."""

    @contextmanager
    def fault(disk: Path) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            failing_writes(patch, 4096 + 100, code)
            failing_reads(patch, 4096 + 100, code)
            yield

    return fault


@contextmanager
def removed_again_and_again(disk: Path) -> Iterator[None]:
    stop = threading.Event()

    def remove() -> None:
        while not stop.is_set():
            shutil.rmtree(disk / "root", ignore_errors=True)
            stop.wait(0.005)

    thread = threading.Thread(target=remove)
    thread.start()
    yield
    stop.set()
    thread.join()


@contextmanager
def gone(disk: Path) -> Iterator[None]:
    """The mount point is taken away, as by an administrator; what is below belongs to nobody who may write there."""
    (disk / "root").rename(disk / "elsewhere")
    (disk / "root").write_bytes(b"not a folder")
    yield
    (disk / "root").unlink()
    (disk / "elsewhere").rename(disk / "root")


FAULTS: dict[str, Callable[[Path], AbstractContextManager[None]]] = {
    "full": full,
    "read-only": read_only,
    "EIO": failing(errno.EIO),
    "EACCES": failing(errno.EACCES),
    "removed": removed_again_and_again,
    "gone": gone,
}
# What counts as an answer of the backend: a full disk says so, a removed root is an empty one.
ANSWERS = {"full", "removed"}


class Life:
    """One engine and what it is asked."""

    def __init__(self, hybrid: Path, disk: Path, capacity: str | None) -> None:
        self.others = set(threading.enumerate())
        backend = {"url": (disk / "root").as_uri(), "capacity": capacity, "deadline": "1s"}
        self.engine = SimEngine(MIXES["all"], hybrid, {**HOST, "backend": backend, "promise_deadline": "5s"})
        self.numbers = itertools.count()
        self.worker: Any = self.engine.ranks[0].connector._worker
        for pipeline in (self.worker._pipeline, self.engine.side._discovery._pipeline):
            pipeline.breaker._cool_down_s = _COOL_DOWN_S
        self.most_threads = 0

    def serve(self, seed: int, turns: int = 1) -> int:
        """Serve a prompt, each time without the engine's own cache; the tokens that were resumed."""
        rng = random.Random(seed)
        prompt = [rng.randrange(VOCAB) for _ in range(70)]
        before = self.engine.counts.get("adopted_tokens", 0)
        for _ in range(turns):
            assert self.engine.generate(f"r{next(self.numbers)}", prompt) == SimEngine.expected(prompt, 4)
            self.engine.run()
            assert self.engine.reset_local()
            self.most_threads = max(self.most_threads, len(self.threads()))
        return self.engine.counts.get("adopted_tokens", 0) - before

    def forget_host(self) -> None:
        """Give up all of host memory, so that only the disk has anything."""
        coordinator = self.engine.side.coordinator
        for store in (coordinator.states, coordinator.blocks):
            for arena in store.arenas:
                for slot in range(arena.plan.slots):
                    arena.evict(slot)

    def from_disk(self, seed: int) -> int:
        """Tokens of a prompt that are resumed from the disk alone."""
        self.forget_host()
        before = self.engine.counts.get("read_bytes", 0)
        adopted = self.serve(seed)
        return adopted if self.engine.counts.get("read_bytes", 0) > before else 0

    def threads(self) -> list[str]:
        """Names of the threads that storage has now."""
        return [one.name for one in threading.enumerate() if one not in self.others and one.name.startswith("ucmcache")]

    def failures(self) -> int:
        return sum(n for name, n in self.engine.counts.items() if name.startswith("failures/"))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk") as path:
        yield path


@pytest.mark.parametrize("capacity", [None, "48MiB"])
@pytest.mark.parametrize("fault", list(FAULTS))
def test_an_engine_on_a_disk_that_fails(
    hybrid: Path, disk: Path, fault: str, capacity: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ucmcache.connector.worker.WRITE_BACKOFF_S", (0.01, 0.05))  # each prompt waits for its saves
    life = Life(hybrid, disk, capacity)
    breaker = life.worker._pipeline.breaker
    known = range(4)
    for seed in known:
        life.serve(seed)
    assert life.from_disk(0) == 64
    assert breaker.openings == 0 and life.failures() == 0
    with FAULTS[fault](disk):
        for seed in range(100, 112):
            life.serve(seed, turns=2)  # the second time from host memory, as far as that has it
        for seed in known:
            life.from_disk(seed)
        if fault not in ANSWERS:
            assert breaker.openings >= 1
    if fault != "removed":  # there, a write either finds its folder or makes it
        assert life.failures() > 0
    for _ in range(50):  # one call finds that it works again, at some prompt after the breaker's time
        time.sleep(_COOL_DOWN_S / 10)
        life.serve(next(life.numbers) + 1000)
        if not breaker.is_open and life.from_disk(5000) == 64:
            break
    else:
        pytest.fail("the disk is not used again")
    assert not breaker.is_open
    assert_at_rest(life.engine)
    assert life.most_threads <= 6  # three for the worker's calls, two that ask, one that makes room
    began_s = time.monotonic()
    life.engine.close()
    assert time.monotonic() - began_s < 5
    deadline_s = time.monotonic() + 5
    while life.threads() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not life.threads()
