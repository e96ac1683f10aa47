"""A disk that is full, failing, read-only or taken away costs writes while it lasts, and nothing else."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.crash.disks import DISK_BYTES, failing_reads, failing_writes, mount, mounted
from tests.crash.load import LOAD_S, Load, size_of
from tests.crash.records import (
    KIB,
    MIB,
    NAMESPACE,
    close,
    du_bytes,
    key_of,
    object_path,
    outcome,
    put,
    regular_files,
    temporaries,
    verified,
)
from tests.crash.system_calls import calls_of, failing_call, watched
from ucmcache.errors import BackendError, BackendFullError, RecordError
from ucmcache.store import record
from ucmcache.store.backend import Bucket
from ucmcache.store.backends.file import FileBackend

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")

CODES = [errno.ENOSPC, errno.EIO, errno.EACCES]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 64 MiB."""
    with mounted(tmp_path / "disk") as path:
        yield path


def bucket_of(root: Path) -> Bucket:
    return FileBackend(root).bucket(NAMESPACE, 0)


def free_bytes(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


# -- full -------------------------------------------------------------------------------------------------------------


def test_a_disk_that_fills_up_keeps_what_it_has(disk: Path) -> None:
    backend = FileBackend(disk / "root")
    bucket = backend.bucket(NAMESPACE, 0)
    stored = 0
    with pytest.raises(BackendFullError):
        for stored in range(100):
            put(bucket, stored, MIB)
    assert 55 <= stored < 64
    for number in range(100, 120):
        with pytest.raises(BackendFullError):
            put(bucket, number, MIB)
        assert outcome(bucket, number, MIB) == record.GONE
    assert verified(bucket, range(120), MIB) == set(range(stored))
    assert temporaries(disk / "root") == []
    assert backend.used_bytes() == du_bytes(disk / "root")
    for number in range(3):
        assert bucket.delete(key_of(number).id)
    for number in (100, 101):
        put(bucket, number, MIB)
    assert verified(bucket, range(120), MIB) == {*range(3, stored), 100, 101}


def test_a_disk_filled_by_somebody_else(disk: Path) -> None:
    """To the last byte: not even a folder, or a temporary without a byte in it, has room."""
    bucket = bucket_of(disk / "root")
    put(bucket, 1, 100 * KIB)
    subprocess.run(["dd", "if=/dev/zero", f"of={disk / 'theirs'}", "bs=4k"], stderr=subprocess.DEVNULL)
    assert free_bytes(disk) == 0
    for number, nbytes in enumerate([1, 4096, 100 * KIB, MIB], 2):
        for _ in range(3):
            with pytest.raises(BackendFullError):
                put(bucket, number, nbytes)
            assert outcome(bucket, number, nbytes) == record.GONE
        assert outcome(bucket, 1, 100 * KIB) == ""
    with pytest.raises(BackendFullError):
        put(bucket, 1, 100 * KIB)  # a copy of what is there: it stays
    assert outcome(bucket, 1, 100 * KIB) == "" and len(regular_files(disk / "root")) == 1
    (disk / "theirs").unlink()
    put(bucket, 5, MIB)
    assert outcome(bucket, 5, MIB) == ""


def test_a_disk_smaller_than_the_capacity_makes_room_itself(disk: Path) -> None:
    backend = FileBackend(disk / "root", DISK_BYTES + DISK_BYTES // 4)
    bucket = backend.bucket(NAMESPACE, 0)
    kept, refused = set(), 0
    for number in range(300):
        try:
            put(bucket, number, MIB)
        except BackendFullError:
            refused += 1
            assert outcome(bucket, number, MIB) == record.GONE
            time.sleep(0.02)
        else:
            kept.add(number)
    assert 1 <= refused <= 150
    close(backend)
    found = verified(bucket_of(disk / "root"), range(300), MIB, may_go=True)
    assert found <= kept and len(found) >= 40, "no more is given up than there is need for"
    assert temporaries(disk / "root") == []


@pytest.mark.parametrize("capacity_bytes", [None, DISK_BYTES + DISK_BYTES // 4, DISK_BYTES // 2])
def test_threads_on_a_full_disk(disk: Path, capacity_bytes: int | None) -> None:
    backend = FileBackend(disk / "root", capacity_bytes)
    subprocess.run(["dd", "if=/dev/zero", f"of={disk / 'theirs'}", "bs=1M", "count=40"], stderr=subprocess.DEVNULL)
    with Load(backend, range(1000), threads=4) as load:
        load.wait_for("full", 20)
        (disk / "theirs").unlink()
        load.wait_for("put", 50)
        load.wait_for("got", 5)
    assert load.wrong == [] and load.counts["failed"] == 0
    assert temporaries(disk / "root") == []
    close(backend)


# -- failing at a byte ------------------------------------------------------------------------------------------------


def places(nbytes: int, drawn: int) -> list[int]:
    """Bytes of a record at which to fail: its edges, those of its first and last pages, and some at random."""
    end = nbytes + record.HEADER_BYTES
    edges = {edge + by for edge in (0, record.HEADER_BYTES, 4096, end // 4096 * 4096, end) for by in (-1, 0, 1)}
    return sorted({k for k in edges if 0 <= k < end} | set(random.Random(nbytes).sample(range(end), drawn)))


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
@pytest.mark.parametrize("nbytes", [3000, 70_001, 3 * MIB])
def test_a_write_that_fails_at_any_byte(tmp_path: Path, nbytes: int, code: int) -> None:
    root = tmp_path / "root"
    backend = FileBackend(root, 64 * MIB)
    bucket = backend.bucket(NAMESPACE, 0)
    put(bucket, 0, nbytes)
    kind = BackendFullError if code == errno.ENOSPC else BackendError
    for at in places(nbytes, 40):
        with pytest.MonkeyPatch.context() as patch:
            failing_writes(patch, at, code)
            for number in (0, 1):  # in place of what is there, and anew
                with pytest.raises(kind, match=os.strerror(code)):
                    put(bucket, number, nbytes)
            assert outcome(bucket, 1, nbytes) == record.GONE
        if code != errno.ENOSPC:  # a full disk has the collector make room meanwhile
            assert outcome(bucket, 0, nbytes) == ""
            assert len(regular_files(root)) == 1, f"something is left of a write that failed at byte {at}"
        assert temporaries(root) == []
        put(bucket, 0, nbytes)
    put(bucket, 1, nbytes)
    assert outcome(bucket, 1, nbytes) == ""
    close(backend)


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
@pytest.mark.parametrize("nbytes", [3000, 70_001, 3 * MIB])
def test_a_read_that_fails_at_any_byte(tmp_path: Path, nbytes: int, code: int) -> None:
    """What cannot be read now is neither a miss nor damaged."""
    bucket = bucket_of(tmp_path)
    put(bucket, 0, nbytes)
    for at in places(nbytes, 40):
        with pytest.MonkeyPatch.context() as patch:
            failing_reads(patch, at, code)
            with pytest.raises(BackendError, match=os.strerror(code)):
                outcome(bucket, 0, nbytes)
        assert outcome(bucket, 0, nbytes) == "", f"after a read that failed at byte {at}"
    assert regular_files(tmp_path) == [object_path(tmp_path, key_of(0))]


# -- failing at a call ------------------------------------------------------------------------------------------------


def eventually(condition: Callable[[], bool], within_s: float = 10.0) -> bool:
    """Whether `condition` holds within that time; the collector's thread may be at work meanwhile."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.001)
    return True


def operations(backend: FileBackend, bucket: Bucket, nbytes: int) -> dict[str, Callable[[], object]]:
    """Calls, each of which leaves records 0 and 1 as they are unless its name says otherwise."""
    return {
        "put": lambda: put(bucket, 2, nbytes),
        "put again": lambda: put(bucket, 0, nbytes),
        "get_into": lambda: outcome(bucket, 0, nbytes),
        "contains": lambda: bucket.contains(key_of(0).id),
        "touch": lambda: bucket.touch([key_of(0).id]),
        "scan": lambda: list(bucket.scan()),
        "delete": lambda: bucket.delete(key_of(2).id),
        "quarantine": lambda: bucket.quarantine(key_of(2).id),
        "describe": lambda: backend.describe(NAMESPACE, {"model": "tiny"}),
        "namespaces": backend.namespaces,
        "used_bytes": backend.used_bytes,
    }


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
@pytest.mark.parametrize("fsync", [False, True], ids=["", "fsync"])
@pytest.mark.parametrize("capacity_bytes", [None, 64 * MIB], ids=["unlimited", "64MiB"])
@pytest.mark.parametrize("operation", operations(FileBackend("/nowhere"), None, 0))  # type: ignore[arg-type]
def test_a_call_to_the_system_that_fails(
    tmp_path: Path, operation: str, capacity_bytes: int | None, fsync: bool, code: int
) -> None:
    """Each call in turn: what leaves is a BackendError, no descriptor stays open, and no object is half there."""
    nbytes = 70_001
    backend = FileBackend(tmp_path, capacity_bytes, fsync=fsync)
    bucket = backend.bucket(NAMESPACE, 0)
    for number in (0, 1):
        put(bucket, number, nbytes)
    call = operations(backend, bucket, nbytes)[operation]

    def prepare() -> None:
        for number in (0, 1):
            if not bucket.contains(key_of(number).id):
                put(bucket, number, nbytes)
        bucket.delete(key_of(2).id)
        if operation in ("delete", "quarantine"):
            put(bucket, 2, nbytes)

    # A full disk has the collector give something up, beside what is seen here.
    collected = capacity_bytes is not None and code == errno.ENOSPC
    prepare()
    names = calls_of(call)
    assert names
    descriptors = len(os.listdir("/proc/self/fd"))
    for number, name in enumerate(names):
        prepare()
        failed = False
        with watched(failing_call(number, code)):
            try:
                call()
            except BackendError:
                failed = True
        where = f"call {number}, {name}, of {names}"
        assert eventually(lambda: len(os.listdir("/proc/self/fd")) == descriptors), where
        visible = verified(bucket, range(3), nbytes, may_go=collected)
        assert {0, 1} <= visible or collected, where
        if operation == "put" and number <= names.index("replace"):
            assert (2 in visible) != failed or collected, where
        assert temporaries(tmp_path) == [], where
        call()  # and without the fault it works
    close(backend)


@pytest.mark.parametrize("fsync", [False, True], ids=["", "fsync"])
def test_a_put_that_raised_left_nothing(tmp_path: Path, fsync: bool) -> None:
    """close(2) is where a network file system reports what it could not write."""
    bucket = FileBackend(tmp_path, fsync=fsync).bucket(NAMESPACE, 0)
    put(bucket, 0, 5000)
    names = calls_of(lambda: put(bucket, 0, 5000))
    for number in range(names.index("replace") + 1, len(names)):
        bucket.delete(key_of(0).id)
        with watched(failing_call(number, errno.EIO)), pytest.raises(BackendError):
            put(bucket, 0, 5000)
        assert outcome(bucket, 0, 5000) == record.GONE, f"call {number}, {names[number]}, of {names}"


# -- read-only --------------------------------------------------------------------------------------------------------


def remount(disk: Path, mode: str) -> None:
    """Make the disk "ro" or "rw"; waits while a file of it is open for writing."""
    deadline_s = time.monotonic() + 30
    while refused := mount("-o", f"remount,{mode},size={DISK_BYTES}", str(disk)):
        assert "busy" in refused and time.monotonic() < deadline_s, refused


@pytest.mark.parametrize("capacity_bytes", [None, 32 * MIB])
def test_a_disk_that_becomes_read_only(disk: Path, capacity_bytes: int | None) -> None:
    nbytes = 100 * KIB
    backend = FileBackend(disk / "root", capacity_bytes)
    bucket = backend.bucket(NAMESPACE, 0)
    for number in range(5):
        put(bucket, number, nbytes)
    damaged = object_path(disk / "root", key_of(4))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    remount(disk, "ro")
    for number in (0, 9):
        with pytest.raises(BackendError, match="Read-only"):
            put(bucket, number, nbytes)
    for refused in (bucket.delete, bucket.quarantine):
        with pytest.raises(BackendError, match="Read-only"):
            refused(key_of(0).id)
    with pytest.raises(BackendError, match="Read-only"):
        backend.describe(NAMESPACE, {})
    for _ in range(2):  # what is damaged cannot be put aside, and is refused every time
        with pytest.raises(RecordError) as caught:
            record.read_into(bucket, key_of(4), memoryview(bytearray(nbytes)))
        assert caught.value.cause == "checksum" and "Read-only" in caught.value.__notes__[0]
    assert [outcome(bucket, number, nbytes) for number in (0, 1, 2, 3, 9)] == ["", "", "", "", record.GONE]
    assert len(set(bucket.scan())) == 5 and bucket.contains(key_of(0).id)
    bucket.touch([key_of(0).id])
    assert backend.used_bytes() == du_bytes(disk / "root")
    remount(disk, "rw")
    put(bucket, 9, nbytes)
    assert outcome(bucket, 4, nbytes) == "checksum"
    assert verified(bucket, range(10), nbytes) == {0, 1, 2, 3, 9}
    close(backend)


@pytest.mark.parametrize("capacity_bytes", [None, 16 * MIB])
def test_read_only_under_load(disk: Path, capacity_bytes: int | None) -> None:
    backend = FileBackend(disk / "root", capacity_bytes)
    with Load(backend, range(200), threads=3) as load:
        for _ in range(3):
            load.wait_for("put", 20)
            remount(disk, "ro")
            load.wait_for("failed", 20)
            load.wait_for("got", 5)
            remount(disk, "rw")
        load.wait_for("put", 20)
    assert load.wrong == []
    bucket = backend.bucket(NAMESPACE, 0)
    # A thread may have failed to remove its file before the disk was writable, and put it down after the last write.
    put(bucket, 0, size_of(0))
    assert temporaries(disk / "root") == []
    assert {outcome(bucket, number, size_of(number)) for number in range(200)} <= {"", record.GONE}
    close(backend)


# -- taken away -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity_bytes", [None, 16 * MIB])
def test_a_root_that_is_removed_under_load(tmp_path: Path, capacity_bytes: int | None) -> None:
    root = tmp_path / "root"
    backend = FileBackend(root, capacity_bytes)
    removals = 0
    with Load(backend, range(200), threads=4) as load:
        end_s = time.monotonic() + LOAD_S / 2
        while time.monotonic() < end_s:
            load.wait_for("put", 5)
            subprocess.run(["rm", "-rf", str(root)], stderr=subprocess.DEVNULL)
            removals += 1
        load.wait_for("put", 20)
        load.wait_for("got", 5)
    assert load.wrong == [] and removals >= 5
    bucket = backend.bucket(NAMESPACE, 0)
    assert {outcome(bucket, number, size_of(number)) for number in range(200)} <= {"", record.GONE}
    assert temporaries(root) == []
    put(bucket, 1, 5000)
    assert outcome(bucket, 1, 5000) == ""
    close(backend)


def test_a_root_that_becomes_something_else(tmp_path: Path) -> None:
    """A file where the root was: errors and no more, and all is well once it is gone."""
    root = tmp_path / "root"
    backend = FileBackend(root, MIB)
    bucket = backend.bucket(NAMESPACE, 0)
    put(bucket, 1, 5000)
    os.rename(root, tmp_path / "aside")
    root.write_bytes(b"")
    for _ in range(2):
        with pytest.raises(BackendError):
            put(bucket, 2, 5000)
        with pytest.raises(BackendError):
            outcome(bucket, 1, 5000)
    root.unlink()
    os.rename(tmp_path / "aside", root)
    put(bucket, 2, 5000)
    assert verified(bucket, range(3), 5000) == {1, 2}
    close(backend)
