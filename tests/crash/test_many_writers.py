"""Several processes on one directory, full all the time: nothing wrong is read, nothing is counted twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.crash.load import LOAD_S, SIZES, size_of
from tests.crash.mixed_writer import NUMBERS, lease_holder
from tests.crash.records import KIB, MIB, NAMESPACE, backend_after, close, du_bytes, key_of, outcome, put, temporaries
from ucmcache.store import record
from ucmcache.store.backends.file import FileBackend
from ucmcache.store.backends.file_usage import Usage

CAPACITY_BYTES = 16 * MIB
SAMPLE_S = 0.1


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.crash.mixed_writer", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        text=True,
    )


def result(writer: subprocess.Popen[str]) -> dict[str, Any]:
    """What a writer tells at its end; that it complained of something fails the test."""
    out, complaints = writer.communicate(timeout=LOAD_S + 60)
    # A collector that waits for its turn when the backend is closed says so.
    unexpected = [line for line in complaints.splitlines() if not line.endswith("the backend was closed")]
    assert writer.returncode == 0 and unexpected == [], complaints
    return dict(json.loads(out))


@contextmanager
def writers_on(root: Path, count: int) -> Iterator[list[subprocess.Popen[str]]]:
    writers = [start("load", root, CAPACITY_BYTES, LOAD_S, seed) for seed in range(count)]
    try:
        yield writers
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()


@contextmanager
def held_still(writers: list[subprocess.Popen[str]]) -> Iterator[None]:
    """No writer moves meanwhile: what is measured then was so at one moment."""
    for writer in writers:
        os.kill(writer.pid, signal.SIGSTOP)
    try:
        for writer in writers:
            wait_stopped(writer.pid)
        yield
    finally:
        for writer in writers:
            os.kill(writer.pid, signal.SIGCONT)


def wait_stopped(pid: int) -> None:
    """Until every thread has stopped, or there is none any more."""
    deadline_s = time.monotonic() + 10
    states = {""}
    while not states <= {"T", "Z"}:
        assert time.monotonic() < deadline_s, states
        tasks = Path(f"/proc/{pid}/task").glob("*/stat")
        states = {task.read_text().rpartition(")")[2].split()[0] for task in tasks}


def check_sound(root: Path) -> None:
    """Every object is right, `used_bytes` is du, and a full root goes on being filled and never holds more."""
    backend = backend_after(root, 62, CAPACITY_BYTES)
    bucket = backend.bucket(NAMESPACE, 0)
    assert backend.used_bytes() == du_bytes(root) <= CAPACITY_BYTES
    ids = set(bucket.scan())
    there = {number for number in NUMBERS if key_of(number).id in ids}
    assert len(there) == len(ids) > 20
    assert {outcome(bucket, number, size_of(number)) for number in there} == {""}
    for number in range(1000, 1100):
        put(bucket, number, 300 * KIB)
        if number % 10 == 0:
            assert du_bytes(root) <= CAPACITY_BYTES
    close(backend)
    assert FileBackend(root).used_bytes() == du_bytes(root) <= CAPACITY_BYTES
    assert temporaries(root) == []


@pytest.mark.timeout(LOAD_S + 120)
@pytest.mark.parametrize("count", [2, 4])
def test_processes_share_a_full_root(tmp_path: Path, count: int) -> None:
    root = tmp_path / "root"
    largest_bytes = 0
    with writers_on(root, count) as writers:
        while all(writer.poll() is None for writer in writers):
            with held_still(writers):
                largest_bytes = max(largest_bytes, du_bytes(root))
            time.sleep(SAMPLE_S)
        results = [result(writer) for writer in writers]
    assert [one["wrong"] for one in results] == [[]] * count
    total = sum((Counter(one["counts"]) for one in results), Counter[str]())
    assert total["failed"] == total["full"] == 0
    assert total["put"] > 100 and total["got"] > 20 and total["deleted"] > 5, total
    assert sum(one["collected"] for one in results) > 50, "the collector was at work"
    # A writer may have begun one object for which there is no room yet; taking room first, none does.
    assert CAPACITY_BYTES // 2 < largest_bytes <= CAPACITY_BYTES + count * 2 * max(SIZES)
    check_sound(root)


@pytest.mark.timeout(LOAD_S + 120)
def test_who_collects_is_killed(tmp_path: Path) -> None:
    """The lease ends with its holder: the others go on, and one of them collects."""
    root = tmp_path / "root"
    with writers_on(root, 3) as writers:
        by_pid = {writer.pid: writer for writer in writers}
        deadline_s = time.monotonic() + LOAD_S
        while (holder := lease_holder(root)) not in by_pid:
            assert time.monotonic() < deadline_s, "nobody ever collected"
        killed = by_pid[holder]
        killed.kill()
        assert killed.wait() == -signal.SIGKILL
        others = [writer for writer in writers if writer is not killed]
        while all(writer.poll() is None for writer in others):
            with held_still(others):
                assert du_bytes(root) <= CAPACITY_BYTES
            time.sleep(SAMPLE_S)
        results = [result(writer) for writer in others]
    assert [one["wrong"] for one in results] == [[], []]
    assert all(one["counts"].get("failed", 0) == one["counts"].get("full", 0) == 0 for one in results)
    assert sum(one["collected"] for one in results) > 20
    check_sound(root)


@pytest.mark.parametrize("how", ["delete", "quarantine", "clear"])
def test_what_several_remove_is_removed_once(tmp_path: Path, how: str) -> None:
    for attempt in range(10):
        if len([one for one in removed_by_each(tmp_path / str(attempt), how) if one]) > 1:
            return
    pytest.fail("ten times one process removed everything before the others came to it")


def removed_by_each(root: Path, how: str) -> list[int]:
    """How many objects each of four processes removed, that set out to remove the same at the same time."""
    backend = FileBackend(root, CAPACITY_BYTES)
    bucket = backend.bucket(NAMESPACE, 0)
    others = [1000, 1001]
    for number in (*NUMBERS, *others):
        put(bucket, number, 3000)
    removers = [start("remove", root, how) for _ in range(4)]
    for remover in removers:
        assert remover.stdout is not None and remover.stdout.readline() == "ready\n"
    for remover in removers:
        assert remover.stdin is not None
        remover.stdin.write("go\n")
        remover.stdin.flush()
    removed = [int(result(remover)["removed"]) for remover in removers]
    assert sum(removed) == len(NUMBERS) + (len(others) if how == "clear" else 0), removed
    assert {outcome(bucket, number, 3000) for number in NUMBERS} == {record.GONE}
    assert {outcome(bucket, number, 3000) for number in others} == {record.GONE if how == "clear" else ""}
    # Given back once each: the count is what is really there, without a listing.
    assert Usage(str(root)).total_bytes() == backend.used_bytes() == du_bytes(root)
    close(backend)
    return removed
