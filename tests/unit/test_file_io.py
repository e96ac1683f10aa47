"""Writing whole files, past the page cache where the file system has such writes, whatever it returns."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ucmcache.store.backends import file_io
from ucmcache.store.backends.file_io import create_exclusive, write_all

PAGE, BOUNCE, DIRECT = file_io._PAGE_BYTES, file_io._BOUNCE_BYTES, file_io._DIRECT_FROM_BYTES
SIZES = [edge + offset for edge in (0, PAGE, DIRECT, BOUNCE, 2 * BOUNCE) for offset in (-1, 0, 1) if edge + offset >= 0]
SHM = Path("/dev/shm")


@pytest.fixture(params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Where files go: a disk, and a file system in memory, which on older kernels has no such writes."""
    if request.param == "disk":
        yield tmp_path
        return
    if not SHM.is_dir():
        pytest.skip("no file system in memory here")
    with tempfile.TemporaryDirectory(dir=SHM) as name:
        yield Path(name)


def written(folder: Path, content: bytes, parts: int = 3) -> bytes:
    cuts = sorted(random.Random(len(content)).choices(range(len(content) + 1), k=parts - 1))
    path = folder / "file"
    fd = create_exclusive(str(path))
    try:
        write_all(fd, [content[a:b] for a, b in zip([0, *cuts], [*cuts, len(content)], strict=True)])
    finally:
        os.close(fd)
    found = path.read_bytes()
    path.unlink()
    return found


@pytest.mark.parametrize("size", SIZES)
def test_every_size_is_written_whole(folder: Path, size: int) -> None:
    content = random.Random(1).randbytes(size)
    assert written(folder, content) == content


def test_large_files_do_not_pass_through_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    direct: list[int] = []
    write = os.write

    def watched(fd: int, data: memoryview) -> int:
        direct.append(len(data))
        return write(fd, data)

    monkeypatch.setattr(os, "write", watched)
    content = random.Random(2).randbytes(2 * BOUNCE + PAGE + 7)
    assert written(tmp_path, content) == content
    if len(direct) == 1:
        pytest.skip("this file system has no writes past the page cache")
    assert direct == [BOUNCE, BOUNCE, PAGE]
    direct.clear()
    assert written(tmp_path, content[: DIRECT - 1]) == content[: DIRECT - 1]
    assert direct == []


@pytest.mark.parametrize("shortened_to", [1, PAGE - 1, PAGE, 3 * PAGE + 5, 0])
@pytest.mark.parametrize("call", [0, 1, 2])
def test_a_write_may_take_less_than_it_was_given(
    folder: Path, call: int, shortened_to: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    write = os.write

    def short(fd: int, data: memoryview) -> int:
        nonlocal calls
        calls += 1
        if calls - 1 != call:
            return write(fd, data)
        # What a write of that length does, without the alignment that a direct one wants.
        return os.pwrite(fd, b"", 0) if not shortened_to else _buffered(fd, data[:shortened_to])

    monkeypatch.setattr(os, "write", short)
    content = random.Random(3).randbytes(2 * BOUNCE + 5 * PAGE + 7)
    assert written(folder, content) == content


def _buffered(fd: int, data: memoryview) -> int:
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    try:
        return os.writev(fd, [data])
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)


@pytest.mark.parametrize("refusal", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_refuses_only_at_the_write(
    folder: Path, refusal: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(fd: int, data: memoryview) -> int:
        raise OSError(refusal, os.strerror(refusal))

    monkeypatch.setattr(os, "write", refused)
    content = random.Random(4).randbytes(2 * BOUNCE + 7)
    assert written(folder, content) == content


@pytest.mark.parametrize("failure", [errno.ENOSPC, errno.EIO])
def test_a_failure_is_a_failure(folder: Path, failure: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    write = os.write

    def failing(fd: int, data: memoryview) -> int:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(failure, os.strerror(failure))
        return write(fd, data)

    def second(fd: int, parts: list[memoryview]) -> int:
        raise OSError(failure, os.strerror(failure))

    monkeypatch.setattr(os, "write", failing)
    monkeypatch.setattr(os, "writev", second)
    with pytest.raises(OSError) as caught:
        written(folder, random.Random(5).randbytes(2 * BOUNCE + 7))
    assert caught.value.errno == failure
