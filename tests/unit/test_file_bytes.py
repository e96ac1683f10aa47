"""Writing and reading whole files, past the page cache where the file system has such calls, whatever they return."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from ucmcache.errors import RecordError
from ucmcache.store.backends import file_bytes
from ucmcache.store.backends.file_bytes import read_exact, write_all
from ucmcache.store.backends.file_io import create_exclusive

PAGE, OWN, DIRECT = file_bytes._PAGE_BYTES, file_bytes._OWN_BYTES, file_bytes._DIRECT_FROM_BYTES
PIECE = file_bytes._PIECE_BYTES
EDGES = (0, PAGE, DIRECT, PIECE, OWN, 2 * OWN)
SIZES = [edge + offset for edge in EDGES for offset in (-1, 0, 1) if edge + offset >= 0]
SHM = Path("/dev/shm")

Call = Callable[..., int]
Cut = Callable[[int], list[int]]


@pytest.fixture(params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Where files go: a disk, and a file system in memory, which on older kernels has no such calls."""
    if request.param == "disk":
        yield tmp_path
        return
    if not SHM.is_dir():
        pytest.skip("no file system in memory here")
    with tempfile.TemporaryDirectory(dir=SHM) as name:
        yield Path(name)


def anywhere(size: int) -> list[int]:
    """Parts that begin anywhere."""
    return sorted(random.Random(size).choices(range(size + 1), k=2))


def paged(size: int) -> list[int]:
    """A page, then all the rest: a record."""
    return [min(PAGE, size)]


def pages_between(size: int) -> list[int]:
    """Pages that fill pages of memory, with others around them."""
    return sorted({min(cut, size) for cut in (PAGE, 3 * PAGE, 3 * PAGE + 7, DIRECT, DIRECT + 3 * PAGE)})


cuts = pytest.mark.parametrize("cut", [anywhere, paged, pages_between])


def aligned(size: int) -> memoryview:
    """New memory that begins with a page."""
    return memoryview(mmap.mmap(-1, max(size, 1)))[:size]


def parts_of(memory: memoryview, cut: Cut) -> list[memoryview]:
    return [memory[begin:end] for begin, end in pairwise([0, *cut(len(memory)), len(memory)])]


def memory_of(content: bytes) -> memoryview:
    memory = aligned(len(content))
    memory[:] = content
    return memory


def write(path: Path, content: bytes, cut: Cut = anywhere) -> None:
    fd = create_exclusive(str(path))
    try:
        write_all(fd, parts_of(memory_of(content), cut))
    finally:
        os.close(fd)


def written(folder: Path, content: bytes, cut: Cut = anywhere) -> bytes:
    path = folder / "file"
    write(path, content, cut)
    found = path.read_bytes()
    path.unlink()
    return found


def read(path: Path, size: int, cut: Cut, filled: Callable[[int], None] | None = None) -> bytes:
    memory = aligned(size)
    fd = os.open(path, os.O_RDONLY)
    try:
        read_exact(fd, parts_of(memory, cut), filled)
    finally:
        os.close(fd)
    return bytes(memory)


def forget(path: Path) -> None:
    """Have nothing of a file in the page cache, where that is possible."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def plainly(call: Call, fd: int, *arguments: object) -> int:
    """A call without the alignment that a direct one wants."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    try:
        return call(fd, *arguments)
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)


def nbytes(views: Sequence[memoryview]) -> int:
    return sum(map(len, views))


def front(views: Sequence[memoryview], size: int) -> list[memoryview]:
    return [memoryview(b"".join(views))[:size]] if size else []


# -- writing -----------------------------------------------------------------------------------------------------------


@cuts
@pytest.mark.parametrize("size", SIZES)
def test_every_size_is_written_whole(folder: Path, size: int, cut: Cut) -> None:
    content = random.Random(1).randbytes(size)
    assert written(folder, content, cut) == content


def test_large_files_do_not_pass_through_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[bool, int]] = []
    writev = os.writev

    def watched(fd: int, views: Sequence[memoryview]) -> int:
        calls.append((is_direct(fd), nbytes(views)))
        return writev(fd, views)

    monkeypatch.setattr(os, "writev", watched)
    content = random.Random(2).randbytes(2 * OWN + PAGE + 7)
    assert written(tmp_path, content, lambda size: [3]) == content
    if not calls[0][0]:
        pytest.skip("this file system has no writes past the page cache")
    # The first part does not fill its page; once a page of the file begins with one of memory, no more is copied.
    assert calls == [(True, OWN), (True, OWN + PAGE), (False, 7)]
    calls.clear()
    assert written(tmp_path, content[:-7], paged) == content[:-7]
    assert calls == [(True, 2 * OWN + PAGE)], "a record's pages are not written in one call"
    calls.clear()
    assert written(tmp_path, content[: DIRECT - 1]) == content[: DIRECT - 1]
    assert calls == [(False, DIRECT - 1)]


@cuts
@pytest.mark.parametrize("shortened_to", [1, PAGE - 1, PAGE, 3 * PAGE + 5, 0])
@pytest.mark.parametrize("call", [0, 1, 2])
def test_a_write_may_take_less_than_it_was_given(
    folder: Path, call: int, shortened_to: int, cut: Cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    writev = os.writev

    def short(fd: int, views: Sequence[memoryview]) -> int:
        nonlocal calls
        calls += 1
        if calls - 1 != call:
            return writev(fd, views)
        if not shortened_to and not is_direct(fd):
            return writev(fd, views)  # a plain write that takes nothing is a failure
        return plainly(writev, fd, front(views, shortened_to))

    monkeypatch.setattr(os, "writev", short)
    content = random.Random(3).randbytes(2 * OWN + 5 * PAGE + 7)
    assert written(folder, content, cut) == content


@pytest.mark.parametrize("refusal", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("refused_call", [0, 1])
def test_a_file_system_that_refuses_only_at_the_write(
    folder: Path, refusal: int, refused_call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    writev = os.writev

    def refusing(fd: int, views: Sequence[memoryview]) -> int:
        nonlocal calls
        calls += 1
        if is_direct(fd) and calls - 1 >= refused_call:
            raise OSError(refusal, os.strerror(refusal))
        return writev(fd, views)

    monkeypatch.setattr(os, "writev", refusing)
    content = random.Random(4).randbytes(2 * OWN + 7)
    assert written(folder, content) == content


@pytest.mark.parametrize("failure", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("call", [0, 1, 2])
def test_a_failure_is_a_failure(folder: Path, failure: int, call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    writev = os.writev

    def failing(fd: int, views: Sequence[memoryview]) -> int:
        nonlocal calls
        calls += 1
        if calls > call:
            raise OSError(failure, os.strerror(failure))
        return writev(fd, [view[:OWN] for view in views[:1]])

    monkeypatch.setattr(os, "writev", failing)
    with pytest.raises(OSError) as caught:
        written(folder, random.Random(5).randbytes(4 * OWN + 7), paged)
    assert caught.value.errno == failure


# -- reading -----------------------------------------------------------------------------------------------------------


@cuts
@pytest.mark.parametrize("cold", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_every_size_is_read_whole_and_told_in_order(folder: Path, size: int, cold: bool, cut: Cut) -> None:
    content = random.Random(6).randbytes(size)
    path = folder / "file"
    path.write_bytes(content)
    if cold:
        forget(path)
    assert read(path, size, cut) == content
    told: list[int] = []
    assert read(path, size, cut, told.append) == content
    assert sum(told) == size and all(told)


def test_what_is_told_is_in_place(tmp_path: Path) -> None:
    content = random.Random(7).randbytes(2 * OWN + 5 * PAGE + 7)
    path = tmp_path / "file"
    path.write_bytes(content)
    for cold in (False, True):
        if cold:
            forget(path)
        memory, told = aligned(len(content)), [0]

        def filled(size: int, memory: memoryview = memory, told: list[int] = told) -> None:
            told[0] += size
            assert memory[: told[0]] == content[: told[0]]

        with open(path, "rb") as file:
            read_exact(file.fileno(), [memory[:3], memory[3:]], filled)
        assert told == [len(content)]


def test_the_disk_is_read_past_the_page_cache_and_what_is_there_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    content = random.Random(8).randbytes(OWN + PAGE)
    path.write_bytes(content)
    calls: list[bool] = []
    preadv = os.preadv

    def watched(fd: int, views: Sequence[memoryview], at: int) -> int:
        calls.append(is_direct(fd))
        return preadv(fd, views, at)

    monkeypatch.setattr(os, "preadv", watched)
    assert read(path, len(content), paged) == content
    if calls != [False]:
        pytest.skip("this kernel or file system does not tell what is in the page cache")
    forget(path)
    calls.clear()
    assert read(path, len(content), paged) == content
    assert calls in ([True], [False]), "one call for all of it"
    if calls == [False]:
        pytest.skip("this file system has no reads past the page cache")


@cuts
@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("shortened_to", [1, PAGE - 1, PAGE, 3 * PAGE + 5])
@pytest.mark.parametrize("call", [0, 1, 2])
def test_a_read_may_give_less_than_was_asked(
    folder: Path, call: int, shortened_to: int, tells: bool, cut: Cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = random.Random(9).randbytes(2 * OWN + 5 * PAGE + 7)
    path = folder / "file"
    path.write_bytes(content)
    calls = 0
    preadv = os.preadv

    def short(fd: int, views: Sequence[memoryview], at: int) -> int:
        nonlocal calls
        calls += 1
        if calls - 1 != call:
            return preadv(fd, views, at)
        return plainly(preadv, fd, [views[0][:shortened_to]], at)

    monkeypatch.setattr(os, "preadv", short)
    monkeypatch.setattr(file_bytes, "_in_page_cache", lambda fd, size: not tells)
    assert read(path, len(content), cut, (lambda size: None) if tells else None) == content


@pytest.mark.parametrize("refusal", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_refuses_only_at_the_read(
    folder: Path, refusal: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = random.Random(10).randbytes(OWN + 7)
    path = folder / "file"
    path.write_bytes(content)
    preadv = os.preadv

    def refusing(fd: int, views: Sequence[memoryview], at: int) -> int:
        if is_direct(fd):
            raise OSError(refusal, os.strerror(refusal))
        return preadv(fd, views, at)

    monkeypatch.setattr(os, "preadv", refusing)
    monkeypatch.setattr(file_bytes, "_in_page_cache", lambda fd, size: False)
    assert read(path, len(content), anywhere) == content


@pytest.mark.parametrize("cached", [True, False])
def test_a_failing_read_fails_and_a_short_file_is_no_record(
    folder: Path, cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "file"
    path.write_bytes(bytes(DIRECT))
    monkeypatch.setattr(file_bytes, "_in_page_cache", lambda fd, size: cached)
    with pytest.raises(RecordError) as caught:
        read(path, DIRECT + 1, anywhere)
    assert caught.value.cause == "length"

    def failing(fd: int, views: Sequence[memoryview], at: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(OSError) as failure:
        read(path, DIRECT, anywhere)
    assert failure.value.errno == errno.EIO


def test_a_kernel_that_cannot_tell_what_is_in_the_page_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_bytes, "_CACHESTAT", 100_000)  # no system call
    for size in SIZES:
        path = folder / str(size)
        write(path, random.Random(size).randbytes(size))
        assert read(path, size, anywhere) == random.Random(size).randbytes(size)
