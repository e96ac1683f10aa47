"""The file backend's capacity, and what it does with leftovers of dead writers."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from pathlib import Path

import pytest

from tests.unit.files import ID, KIB, NAMESPACE, SECOND_NS, Clock, files_below, get, number_id, object_path
from ucmcache.errors import BackendError, BackendFullError
from ucmcache.store.backend import Bucket
from ucmcache.store.backends import file_folder
from ucmcache.store.backends.file import FileBackend
from ucmcache.store.backends.file_layout import Temporaries, host_digest, process_alive
from ucmcache.store.backends.file_usage import Usage

# -- capacity ---------------------------------------------------------------------------------------------------------


def fill(bucket: Bucket, clock: Clock, numbers: range, size: int = 64 * KIB) -> None:
    for number in numbers:
        clock.forward(1)
        bucket.put(number_id(number), [os.urandom(size)])


def numbers_in(*buckets: Bucket) -> list[int]:
    return sorted(int.from_bytes(id, "little") for bucket in buckets for id in bucket.scan())


def settled(backend: FileBackend) -> None:
    """Wait until no collection is due."""
    space = backend._space
    with space._changed:
        assert space._changed.wait_for(lambda: space._done >= space._wanted, 10)


def counted(backend: FileBackend) -> int:
    total = Usage(backend.root).total_bytes()
    assert total is not None
    return total


def test_capacity_evicts_the_least_recently_used_of_all_namespaces(tmp_path: Path) -> None:
    clock = Clock()
    backend = FileBackend(tmp_path, 11 * 64 * KIB, clock_ns=clock)
    first, second = backend.bucket(NAMESPACE, 0), backend.bucket(b"m" * 16, 1)
    fill(first, clock, range(5))
    fill(second, clock, range(5, 10))
    settled(backend)
    assert numbers_in(first, second) == list(range(10))
    clock.forward(100)
    assert get(first, number_id(0), 64 * KIB) is not None
    fill(second, clock, range(10, 11))
    settled(backend)
    # Eleven are more than 95 of 100, so it goes to 90: the two that were used the longest ago.
    assert numbers_in(first, second) == [0, 3, 4, 5, 6, 7, 8, 9, 10]
    assert backend.used_bytes() == counted(backend) == 9 * 64 * KIB


def test_what_is_used_elsewhere_is_kept(tmp_path: Path) -> None:
    clock = Clock()
    backend = FileBackend(tmp_path, 11 * 64 * KIB, clock_ns=clock)
    bucket = backend.bucket(NAMESPACE, 0)
    fill(bucket, clock, range(10))
    clock.forward(100)
    bucket.touch([number_id(0), number_id(99), number_id(2)])
    fill(bucket, clock, range(10, 11))
    settled(backend)
    assert numbers_in(bucket) == [0, 2, 4, 5, 6, 7, 8, 9, 10]


def test_reads_touch_at_most_once_a_minute(tmp_path: Path) -> None:
    clock = Clock()
    bucket = FileBackend(tmp_path, clock_ns=clock).bucket(NAMESPACE, 0)
    bucket.put(ID, [b"x"])
    written_ns = clock.now_ns // SECOND_NS * SECOND_NS
    clock.now_ns = written_ns
    for wait_s, touched in ((59, False), (1, True), (59, False), (1, True)):
        clock.forward(wait_s)
        get(bucket, ID, 1)
        status = object_path(tmp_path).stat()
        assert status.st_mtime_ns == written_ns
        assert (status.st_atime_ns == clock.now_ns) == touched


def test_a_read_survives_a_disk_that_keeps_no_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    bucket = FileBackend(tmp_path, clock_ns=clock).bucket(NAMESPACE, 0)
    bucket.put(ID, [b"x"])
    clock.forward(100)

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "utime", fail)
    assert get(bucket, ID, 1) == b"x"


def test_the_object_just_written_stays(tmp_path: Path) -> None:
    clock = Clock()
    capacity = 256 * KIB
    backend = FileBackend(tmp_path, capacity, clock_ns=clock)
    bucket = backend.bucket(NAMESPACE, 0)
    fill(bucket, clock, range(3), 60 * KIB)
    bucket.put(ID, [os.urandom(capacity - capacity // 10 - 8 * KIB)])
    settled(backend)
    assert list(bucket.scan()) == [ID]


def test_an_object_beyond_the_capacity_is_refused(tmp_path: Path) -> None:
    backend = FileBackend(tmp_path, 5000)
    bucket = backend.bucket(NAMESPACE, 0)
    bucket.put(number_id(1), [b"stays"])
    for size in (5001, 4999):  # 4999 bytes take two blocks of 4096
        with pytest.raises(BackendError, match="does not fit"):
            bucket.put(ID, [bytes(size)])
    assert numbers_in(bucket) == [1] and counted(backend) == backend.used_bytes()


def test_what_was_there_before_there_was_a_capacity_is_counted(tmp_path: Path) -> None:
    clock = Clock()
    capacity = 20 * 64 * KIB
    theirs = FileBackend(tmp_path, clock_ns=clock)
    fill(theirs.bucket(NAMESPACE, 0), clock, range(25))
    ours = FileBackend(tmp_path, capacity, clock_ns=clock)
    assert ours.used_bytes() > capacity
    fill(ours.bucket(NAMESPACE, 1), clock, range(25, 26))
    assert ours.used_bytes() == counted(ours) <= capacity  # the first write lists
    # From then on all count, with a capacity of their own or without.
    fill(theirs.bucket(NAMESPACE, 0), clock, range(30, 50))
    assert ours.used_bytes() == counted(ours)
    fill(ours.bucket(NAMESPACE, 1), clock, range(50, 53))
    settled(ours)
    assert ours.used_bytes() == counted(ours) <= capacity
    assert {50, 51, 52} <= set(numbers_in(ours.bucket(NAMESPACE, 1)))


def test_all_that_share_a_root_share_its_capacity(tmp_path: Path) -> None:
    clock = Clock()
    capacity = 20 * 64 * KIB
    backends = [FileBackend(tmp_path, capacity, clock_ns=clock) for _ in range(4)]
    for number in range(100):
        fill(backends[number % 4].bucket(NAMESPACE, number % 4), clock, range(number, number + 1))
        assert backends[0].used_bytes() <= capacity
    for backend in backends:
        settled(backend)
    kept = numbers_in(*(backends[0].bucket(NAMESPACE, rank) for rank in range(4)))
    assert kept == list(range(100 - len(kept), 100)) and len(kept) >= 17


def test_removing_frees_at_once_and_replacing_at_the_next_listing(tmp_path: Path) -> None:
    clock = Clock()
    backend = FileBackend(tmp_path, 20 * 64 * KIB, clock_ns=clock)
    bucket = backend.bucket(NAMESPACE, 0)
    fill(bucket, clock, range(4))
    for _ in range(30):
        fill(bucket, clock, range(5, 6))
        bucket.delete(number_id(6))
        fill(bucket, clock, range(6, 7))
        assert backend.used_bytes() <= counted(backend) <= 20 * 64 * KIB
    settled(backend)
    assert numbers_in(bucket) == [0, 1, 2, 3, 5, 6]


def test_quarantine_makes_room_before_objects(tmp_path: Path) -> None:
    clock = Clock()
    backend = FileBackend(tmp_path, 11 * 64 * KIB, clock_ns=clock)
    bucket = backend.bucket(NAMESPACE, 0)
    fill(bucket, clock, range(1, 10))
    fill(bucket, clock, range(1))
    bucket.quarantine(number_id(0))
    fill(bucket, clock, range(10, 11))
    settled(backend)
    assert numbers_in(bucket) == list(range(2, 11))
    assert backend.used_bytes() <= 10 * 64 * KIB


def test_a_root_that_cannot_be_emptied_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    bucket = FileBackend(tmp_path, 4 * 64 * KIB, clock_ns=clock).bucket(NAMESPACE, 0)
    fill(bucket, clock, range(3))
    unlink = os.unlink

    def stubborn(path: str) -> None:
        if ".kv" in path:
            raise PermissionError(errno.EPERM, "immutable")
        unlink(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", stubborn)
        with pytest.raises(BackendFullError, match="cannot be emptied"):
            fill(bucket, clock, range(9, 11))
    assert numbers_in(bucket) == [0, 1, 2, 9]
    fill(bucket, clock, range(10, 11))
    assert numbers_in(bucket)[-2:] == [9, 10]


def test_a_full_disk_gives_up_some_of_its_capacity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    backend = FileBackend(tmp_path, 100 * 64 * KIB, clock_ns=clock)
    bucket = backend.bucket(NAMESPACE, 0)
    fill(bucket, clock, range(30))

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(file_folder, "write_all", full)
        with pytest.raises(BackendFullError, match="No space left"):
            bucket.put(number_id(50), [bytes(64 * KIB)])
    settled(backend)
    assert numbers_in(bucket) == list(range(3, 30))


def test_threads_share_the_capacity(tmp_path: Path) -> None:
    capacity = 1 << 20
    backend = FileBackend(tmp_path, capacity)
    failures: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            bucket = backend.bucket(NAMESPACE, rank)
            for number in range(40):
                bucket.put(number_id(number), [bytes([rank]) * 64 * KIB])
                get(bucket, number_id(number), 64 * KIB)
                # A walk takes time: it may meet a file that goes later, and the one that takes its room.
                assert backend.used_bytes() <= capacity + 4 * 64 * KIB
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    settled(backend)
    assert failures == [] and 0 < backend.used_bytes() == counted(backend) <= capacity
    objects = sum(len(list(backend.bucket(NAMESPACE, rank).scan())) for rank in range(4))
    assert len(files_below(tmp_path)) == objects


def test_a_closed_backend_ends_its_collector(tmp_path: Path) -> None:
    before = threading.active_count()
    for _ in range(5):
        backend = FileBackend(tmp_path, 256 * KIB)
        fill(backend.bucket(NAMESPACE, 0), Clock(), range(8))
        thread = backend._space._thread
        backend.close()
        assert thread is not None
        thread.join(5)
    assert threading.active_count() == before


def test_a_count_that_says_nothing_is_made_anew(tmp_path: Path) -> None:
    clock = Clock()
    backend = FileBackend(tmp_path, 10 * 64 * KIB, clock_ns=clock)
    bucket = backend.bucket(NAMESPACE, 0)
    fill(bucket, clock, range(3))
    for content in (b"", b"nonsense", bytes(24), bytes(1000)):
        (tmp_path / "usage").write_bytes(content)
        fill(bucket, clock, range(3, 4))
        settled(backend)
        assert backend.used_bytes() <= counted(backend) <= 5 * 64 * KIB


# -- leftovers --------------------------------------------------------------------------------------------------------

HOST, OTHER_HOST = host_digest("here"), host_digest("there")


@pytest.mark.parametrize(
    ("host", "pid", "age_s", "abandoned"),
    [
        (HOST, 7, 61, True),  # 7 is dead, 8 alive
        (HOST, 7, 59, False),
        (HOST, 8, 61, False),
        (HOST, 8, 3599, False),
        (HOST, 8, 3601, True),
        (OTHER_HOST, 7, 3599, False),
        (OTHER_HOST, 7, 3601, True),
    ],
)
def test_which_temporaries_are_swept(tmp_path: Path, host: str, pid: int, age_s: int, abandoned: bool) -> None:
    clock = Clock()
    backend = FileBackend(tmp_path, clock_ns=clock, host_name="here", alive=lambda pid: pid == 8)
    folder = object_path(tmp_path).parent.parent / "tmp"
    folder.mkdir(parents=True)
    left = folder / f"{host}-{pid}-{'0' * 32}-4096.tmp"
    left.write_bytes(b"half")
    foreign = folder / "notes.txt"
    foreign.write_bytes(b"")
    for path in (left, foreign):
        os.utime(path, ns=(clock.now_ns - age_s * SECOND_NS,) * 2)
    bucket = backend.bucket(NAMESPACE, 0)
    assert list(bucket.scan()) == [] and left.exists()
    assert backend.used_bytes() > 0
    bucket.put(ID, [b"x"])
    assert left.exists() != abandoned and foreign.exists()


def test_making_room_starts_with_leftovers(tmp_path: Path) -> None:
    clock = Clock()
    backend = FileBackend(tmp_path, 10 * 64 * KIB, clock_ns=clock)
    bucket = backend.bucket(NAMESPACE, 0)
    fill(bucket, clock, range(2))
    left = object_path(tmp_path).parent.parent / "tmp" / f"{OTHER_HOST}-1-{'0' * 32}-4096.tmp"
    left.write_bytes(os.urandom(8 * 64 * KIB))
    (tmp_path / "usage").unlink()  # so that it is counted
    clock.forward(4000)
    fill(bucket, clock, range(2, 4))
    settled(backend)
    assert numbers_in(bucket) == [0, 1, 2, 3] and not left.exists()


def test_temporaries_have_names_of_their_own() -> None:
    temporaries = Temporaries(pid=lambda: 12, unique=lambda: "0" * 32, host=HOST)
    assert temporaries.name(4096) == f"{HOST}-12-{'0' * 32}-4096.tmp"
    assert Temporaries().name(1) != Temporaries().name(1)


def test_a_taken_temporary_is_not_touched(tmp_path: Path) -> None:
    bucket = FileBackend(tmp_path, unique=lambda: "0" * 32).bucket(NAMESPACE, 0)
    bucket.put(number_id(1), [b"x"])
    [folder] = tmp_path.glob("ns-*/r0/tmp")
    taken = folder / f"{host_digest(os.uname().nodename)}-{os.getpid()}-{'0' * 32}-4096.tmp"
    taken.write_bytes(b"another writer's")
    with pytest.raises(BackendError):
        bucket.put(ID, [b"x"])
    assert taken.read_bytes() == b"another writer's"


def test_who_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    assert process_alive(os.getpid())
    child = subprocess.Popen(["true"])
    child.wait()
    assert not process_alive(child.pid)

    def foreign(pid: int, signal: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", foreign)
    assert process_alive(1)
