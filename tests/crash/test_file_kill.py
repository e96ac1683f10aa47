"""kill -9 at any moment leaves whole objects only, all that was reported durable, and a count that is right (T4).

UCMCACHE_KILLS is how many kills there are in all; at 5000 every point of every scenario is taken.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.crash.records import (
    NAMESPACE,
    backend_after,
    close,
    du_bytes,
    key_of,
    object_path,
    outcome,
    put,
    temporaries,
)
from tests.crash.scenarios import CAPACITY_BYTES, ENDLESS_CAPACITY_BYTES, RECORD_BYTES, SMALL_BYTES, size_of
from tests.crash.zygote import Child, Zygote
from ucmcache.store import record
from ucmcache.store.backends.file import FileBackend

KILLS = int(os.environ.get("UCMCACHE_KILLS", "240"))
AT_POINTS = {"save": 0.2, "save_fsync": 0.2, "scan": 0.15, "collect": 0.3}  # of all kills; the rest at random times
DAMAGED = 7
DEAD_PID = 999_999_999
NEVER = -1


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    yield zygote
    zygote.close()


# -- what a root is before --------------------------------------------------------------------------------------------


def empty(root: Path) -> None:
    pass


def with_leftovers(root: Path) -> None:
    """Eight records, the last of them damaged, and what a writer left that died an hour ago."""
    backend = FileBackend(root)
    bucket = backend.bucket(NAMESPACE, 0)
    for number in range(8):
        put(bucket, number, size_of(number))
    backend.describe(NAMESPACE, {"model": "tiny"})
    close(backend)
    damage(root, DAMAGED)
    leave_temporary(root)


def full(root: Path) -> None:
    """As much as there may be before the collector begins; one record is in quarantine, one was never finished."""
    backend = FileBackend(root, CAPACITY_BYTES)
    bucket = backend.bucket(NAMESPACE, 0)
    for number in range(94):
        put(bucket, number, SMALL_BYTES)
    damage(root, 93)
    assert outcome(bucket, 93, SMALL_BYTES) == "checksum"
    close(backend)
    leave_temporary(root)


def damage(root: Path, number: int) -> None:
    path = object_path(root, key_of(number))
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def leave_temporary(root: Path) -> None:
    dead = FileBackend(root, pid=lambda: DEAD_PID)
    [folder] = root.glob("ns-*/r0/tmp")
    left = folder / dead._temporaries.name(RECORD_BYTES)  # there is no other way to a dead writer's name
    left.write_bytes(b"half")
    os.utime(left, (time.time() - 4000,) * 2)


BEFORE: dict[str, Callable[[Path], None]] = {
    "save": empty,
    "save_fsync": empty,
    "scan": with_leftovers,
    "collect": full,
}


# -- what it must be after --------------------------------------------------------------------------------------------


def payload_bytes(scenario: str, number: int) -> int:
    return SMALL_BYTES if scenario == "collect" else size_of(number)


def promised(before: range, reports: list[str]) -> tuple[set[int], set[int]]:
    """Numbers of the records that must be there, and of those that may be."""
    must, may = set(before), set(before)
    for report in reports:
        step, _, number = report.partition(" ")
        if step == "putting":
            may.add(int(number))
        elif step == "put":
            must.add(int(number))
        elif step == "removing":
            must.discard(int(number))
        elif step == "removed":
            may.discard(int(number))
    return must, may


def visible(root: Path, scenario: str, may: set[int]) -> set[int]:
    """The records that are visible, each bit for bit right, and none of them unexpected."""
    number_of = {key_of(number).id: number for number in may}
    bucket = FileBackend(root).bucket(NAMESPACE, 0)
    found = {number_of[id] for id in bucket.scan()}
    causes = {number: outcome(bucket, number, payload_bytes(scenario, number)) for number in found}
    damaged = {DAMAGED: "checksum"} if scenario == "scan" and DAMAGED in found else {}
    assert {number: cause for number, cause in causes.items() if cause} == damaged
    return found - set(damaged)


def check_sweep(root: Path, capacity_bytes: int | None, left: list[Path]) -> None:
    """`left` stays for as long as its writer may be alive somewhere, and then goes with the next write."""
    for after_s, expected in ((30, left), (62, [])):
        backend = backend_after(root, after_s, capacity_bytes)
        put(backend.bucket(NAMESPACE, 0), 9999, SMALL_BYTES)
        backend.describe(NAMESPACE, {"model": "tiny"})
        close(backend)
        assert [path for path in left if path.exists()] == expected
    assert temporaries(root) == []


def check_capacity(root: Path, capacity_bytes: int, nbytes: int) -> None:
    """Whatever the dead left in the count: who comes next is not refused, and the root never holds more."""
    backend = backend_after(root, 62, capacity_bytes)
    bucket = backend.bucket(NAMESPACE, 0)
    for number in range(2000, 2012):
        put(bucket, number, nbytes)
        if number % 3 == 0:
            assert du_bytes(root) <= capacity_bytes
    close(backend)


def check(root: Path, scenario: str, before: range, reports: list[str]) -> None:
    """All that the issue demands of a root after a death."""
    must, may = promised(before, reports)
    left = [path for path in temporaries(root) if f"-{DEAD_PID}-" not in path.name]
    assert len(left) <= 1
    if root.exists():
        assert FileBackend(root).used_bytes() == du_bytes(root)
    found = visible(root, scenario, may)
    if scenario == "scan":
        must.discard(DAMAGED)
    if scenario == "collect":
        # What it gave up is what there was no room for, and no more; the count may hold one dead writer's page.
        assert CAPACITY_BYTES * 90 // 100 - 2 * RECORD_BYTES <= du_bytes(root) <= CAPACITY_BYTES
        check_sweep(root, CAPACITY_BYTES, left)
        check_capacity(root, CAPACITY_BYTES, SMALL_BYTES)
    else:
        assert must <= found
        check_sweep(root, None, left)
        assert must <= visible(root, scenario, may | {9999})
    assert FileBackend(root).used_bytes() == du_bytes(root)


# -- the kills --------------------------------------------------------------------------------------------------------


def run_through(zygote: Zygote, scenario: str, root: Path) -> tuple[list[str], list[str]]:
    """Names of all points of a scenario, in order, and its reports."""
    child = zygote.fork(scenario, root, NEVER, signal.SIGKILL)
    assert child.end() == 0
    word, _, names = child.reports.pop().partition(" ")
    assert word == "points"
    return list(json.loads(names)), child.reports


def chosen(names: list[str], count: int) -> list[int]:
    """`count` points, half of them the first of their name; all of them if there are no more."""
    firsts = list({name: names.index(name) for name in names}.values())
    others = sorted(set(range(len(names))) - set(firsts))
    chance = random.Random(count)
    chance.shuffle(firsts)
    chance.shuffle(others)
    half = max(count // 2, count - len(others))
    return sorted([*firsts[:half], *others[: count - min(half, len(firsts))]])


@pytest.mark.parametrize("scenario", AT_POINTS)
def test_kills_at_chosen_points(tmp_path: Path, zygote: Zygote, scenario: str) -> None:
    template = tmp_path / "template"
    BEFORE[scenario](template)
    before = {"scan": range(8), "collect": range(93)}.get(scenario, range(0))

    def fresh(name: str) -> Path:
        root = tmp_path / name
        if template.exists():
            shutil.copytree(template, root)
        return root

    names, reports = run_through(zygote, scenario, fresh("through"))
    check(tmp_path / "through", scenario, before, reports)
    points = chosen(names, int(KILLS * AT_POINTS[scenario]))
    deaths = 0
    for point in points:
        root = fresh(f"at{point}")
        child = zygote.fork(scenario, root, point, signal.SIGKILL)
        status = child.end()
        # How the threads take turns decides how many points there are, so the last few may not come.
        assert status == -signal.SIGKILL or (status == 0 and scenario == "collect")
        deaths += status == -signal.SIGKILL
        try:
            check(root, scenario, before, child.reports)
        except BaseException as error:
            error.add_note(f"killed at point {point}, {names[point]}, of {len(names)}; reports: {child.reports}")
            raise
        shutil.rmtree(root)
    assert deaths >= 0.8 * len(points)


def test_kills_at_random_times(tmp_path: Path, zygote: Zygote) -> None:
    """One after the other on one root, two threads each, with the collector at work."""
    root = tmp_path / "root"
    chance = random.Random(20)
    reported = 0
    known: set[int] = set()
    lives = int(KILLS * (1 - sum(AT_POINTS.values())))
    for _ in range(lives):
        child = zygote.fork("endless", root, NEVER, signal.SIGKILL)
        time.sleep(chance.uniform(0, 0.05))
        os.kill(child.pid, signal.SIGKILL)
        assert child.end() == -signal.SIGKILL
        reported += sum(report.startswith("put ") for report in child.reports)
        if not root.exists():
            continue
        known |= {int(report.split()[1]) for report in child.reports}
        left = temporaries(root)
        assert len(left) <= 2
        assert FileBackend(root).used_bytes() == du_bytes(root) <= ENDLESS_CAPACITY_BYTES
        visible(root, "endless", known)
        check_sweep(root, ENDLESS_CAPACITY_BYTES, left)
        known.add(9999)
    check_capacity(root, ENDLESS_CAPACITY_BYTES, 300_000)
    assert reported > lives


# -- writers that only seem dead --------------------------------------------------------------------------------------


@pytest.fixture
def stopped(tmp_path: Path, zygote: Zygote) -> Iterator[tuple[Child, Path]]:
    """A writer that was stopped amid a write, and its temporary."""
    root = tmp_path / "root"
    names, _ = run_through(zygote, "one", tmp_path / "through")
    child = zygote.fork("one", root, names.index("before writev"), signal.SIGSTOP)
    try:
        child.wait_stopped()
        [left] = temporaries(root)
        yield child, left
    finally:
        if "ended" not in child.reports:
            os.kill(child.pid, signal.SIGKILL)
            child.end()


def go_on(child: Child) -> str:
    """The last that a stopped child says of its write."""
    os.kill(child.pid, signal.SIGCONT)
    assert child.end() == 0
    child.reports.append("ended")
    return [report for report in child.reports if report.endswith(" 1")][-1]


def test_a_writer_that_lives_keeps_its_temporary(tmp_path: Path, stopped: tuple[Child, Path]) -> None:
    child, left = stopped
    root = tmp_path / "root"
    for after_s in (62, 3500):
        put(backend_after(root, after_s).bucket(NAMESPACE, 0), 2, SMALL_BYTES)
        assert left.exists()
    assert FileBackend(root).used_bytes() == du_bytes(root)
    assert go_on(child) == "put 1"
    assert outcome(FileBackend(root).bucket(NAMESPACE, 0), 1, size_of(1)) == "" and temporaries(root) == []


def test_a_writer_that_slept_for_an_hour_fails(tmp_path: Path, stopped: tuple[Child, Path]) -> None:
    child, left = stopped
    root = tmp_path / "root"
    put(backend_after(root, 3700).bucket(NAMESPACE, 0), 2, SMALL_BYTES)
    assert not left.exists()
    assert go_on(child) == "failed 1"
    bucket = FileBackend(root).bucket(NAMESPACE, 0)
    assert outcome(bucket, 1, size_of(1)) == record.GONE and outcome(bucket, 2, SMALL_BYTES) == ""
    assert temporaries(root) == [] and FileBackend(root).used_bytes() == du_bytes(root)


def test_a_writer_that_dies_late_is_swept(tmp_path: Path, stopped: tuple[Child, Path]) -> None:
    child, left = stopped
    root = tmp_path / "root"
    os.kill(child.pid, signal.SIGKILL)
    assert child.end() == -signal.SIGKILL
    child.reports.append("ended")
    check_sweep(root, None, [left])
