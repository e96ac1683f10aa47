"""Killing a writer at any moment leaves whole objects and, at worst, a temporary that is swept later (T4)."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.crash.file_writer import NAMESPACE, PAYLOAD_BYTES, key_of, payload_of
from ucmcache.store import record
from ucmcache.store.backends.file import FileBackend

KILLS = 20


def start(root: Path, first: int, where: str) -> subprocess.Popen[bytes]:
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.crash.file_writer", str(root), str(first), where],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert child.stdout is not None
    with child.stdout as stdout:
        assert stdout.readline() == b"ready\n"
    return child


def verified(root: Path, candidates: range) -> int:
    """Check every visible object, bit for bit; how many there are."""
    bucket = FileBackend(root).bucket(NAMESPACE, 0)
    numbers = {key_of(number).id: number for number in candidates}
    found = [numbers[id] for id in bucket.scan()]
    for number in found:
        payload = bytearray(PAYLOAD_BYTES)
        assert record.read_into(bucket, key_of(number), memoryview(payload))
        assert payload == payload_of(number)
    assert list(root.glob("ns-*/r0/quarantine/*")) == []
    return len(found)


def temporaries(root: Path) -> list[Path]:
    return list(root.glob("ns-*/r0/tmp/*"))


def sweep(root: Path, after_s: float) -> None:
    """Write one object to a backend that is opened `after_s` from now."""
    backend = FileBackend(root, clock_ns=lambda: time.time_ns() + int(after_s * 1e9))
    record.write(backend.bucket(NAMESPACE, 0), key_of(0), payload_of(0))
    backend.close()


def test_random_kills(tmp_path: Path) -> None:
    chance = random.Random(20)
    for round_number in range(KILLS):
        first = 1 + round_number * 1000
        child = start(tmp_path, first, "never")
        time.sleep(chance.uniform(0, 0.06))
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        verified(tmp_path, range(first + 1000))
        assert len(temporaries(tmp_path)) <= 1
        sweep(tmp_path, after_s=62)
        assert temporaries(tmp_path) == []
        FileBackend(tmp_path).bucket(NAMESPACE, 0).clear()


@pytest.mark.parametrize(
    ("where", "visible", "left"), [("mid_write", 0, 1), ("before_replace", 0, 1), ("after_replace", 1, 0)]
)
def test_death_at_a_chosen_point(tmp_path: Path, where: str, visible: int, left: int) -> None:
    child = start(tmp_path, 1, where)
    assert child.wait() == -signal.SIGKILL
    assert verified(tmp_path, range(2)) == visible
    assert len(temporaries(tmp_path)) == left
    sweep(tmp_path, after_s=30)
    assert len(temporaries(tmp_path)) == left  # too young: its writer might be one that cannot be seen from here
    sweep(tmp_path, after_s=62)
    assert temporaries(tmp_path) == []
    assert verified(tmp_path, range(2)) == visible + 1


def test_a_living_writer_keeps_its_temporary(tmp_path: Path) -> None:
    child = start(tmp_path, 1, "never")
    try:
        child.send_signal(signal.SIGSTOP)
        name = FileBackend(tmp_path, pid=lambda: child.pid)._temporaries.name(4096)
        folder = tmp_path / f"ns-{NAMESPACE.hex()}" / "r0" / "tmp"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"half")
        sweep(tmp_path, after_s=62)
        assert (folder / name).exists()
    finally:
        child.kill()
        child.wait()
    sweep(tmp_path, after_s=62)
    assert temporaries(tmp_path) == []
