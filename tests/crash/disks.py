"""Disks that fail: a small one of its own, and calls that stop at a byte."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.crash.records import MIB
from tests.crash.system_calls import front, is_direct

DISK_BYTES = 64 * MIB


def mount(*arguments: str) -> str:
    """Run mount(8); what it complained of."""
    return subprocess.run(["mount", *arguments], stderr=subprocess.PIPE, text=True).stderr.strip()


@contextmanager
def mounted(path: Path) -> Iterator[Path]:
    """A file system of its own, of DISK_BYTES, at the new folder `path`; skips the test where it cannot be had."""
    path.mkdir()
    refused = mount("-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(path))
    if refused:
        pytest.skip(f"a tmpfs cannot be mounted here (it needs root, or CAP_SYS_ADMIN in a container): {refused}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def is_temporary(fd: int) -> bool:
    return os.readlink(f"/proc/self/fd/{fd}").endswith(".tmp")


def failing_writes(patch: pytest.MonkeyPatch, at: int, code: int) -> None:
    """A disk that takes `at` bytes of each object and then fails."""
    writev = os.writev

    def failing_writev(fd: int, views: Sequence[Any]) -> int:
        room = at - os.lseek(fd, 0, os.SEEK_CUR)
        if not is_temporary(fd) or room >= sum(map(len, views)):
            return writev(fd, views)
        if is_direct(fd):
            room = room // 4096 * 4096
        if room <= 0:
            raise OSError(code, os.strerror(code))
        return writev(fd, front(views, room))

    patch.setattr(os, "writev", failing_writev)


def failing_reads(patch: pytest.MonkeyPatch, at: int, code: int) -> None:
    """A disk that gives `at` bytes of each object and then fails."""
    preadv = os.preadv

    def failing_preadv(fd: int, views: Sequence[Any], begin: int) -> int:
        room = at - begin
        if room < sum(map(len, views)) and is_direct(fd):
            room = room // 4096 * 4096
        if room <= 0:
            raise OSError(code, os.strerror(code))
        return preadv(fd, front(views, room), begin)

    patch.setattr(os, "preadv", failing_preadv)
