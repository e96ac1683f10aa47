"""A worker's host memory: taken whole at start, cut into slots once the scheduler has said how.

The first touch of a page costs more than reading its content from a warm file, and the kernel's work for it competes
with the engine's. So every page is had before the first request, where time is cheap and where too little memory can
still be refused (docs/adr/0006). What several ranks hold alike is kept once: each rank gives its part of the slots, in
memory that the others map (docs/adr/0011).
"""

from __future__ import annotations

import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ucmcache.errors import ContractError
from ucmcache.store.arena import ArenaPlan

Memory = mmap.mmap | memoryview | NDArray[np.uint8]

_MADV_POPULATE_WRITE = 23  # Linux 5.14; not named by Python's mmap. Changes no content.
_SHARE_BYTES = 64 << 20  # what one thread populates at a time: many huge pages, and a share for every thread soon
_THREADS = 4  # more do not clear memory faster than its bandwidth allows


class MemoryHandle(NamedTuple):
    """Where another process of the same machine finds a worker's shared memory."""

    boot: str
    pid: int
    fd: int
    device: int
    inode: int
    nbytes: int


def take_memory(nbytes: int) -> mmap.mmap:
    """Private zeroed memory with all its pages. Raises MemoryError or OSError where the kernel has not so many."""
    return _populated(mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), nbytes)


def take_shared_memory(nbytes: int) -> tuple[mmap.mmap, MemoryHandle]:
    """The same, for other processes of this user to map while the handle's descriptor is open here; who takes it closes
    it."""
    # Not a file below /dev/shm: containers often have little room there.
    fd = os.memfd_create("ucmcache", os.MFD_CLOEXEC)
    try:
        os.truncate(fd, max(nbytes, 1))
        memory = _populated(mmap.mmap(fd, max(nbytes, 1)), nbytes)
    except BaseException:
        os.close(fd)
        raise
    status = os.fstat(fd)
    return memory, MemoryHandle(_boot(), os.getpid(), fd, status.st_dev, status.st_ino, max(nbytes, 1))


def map_shared(handle: MemoryHandle) -> mmap.mmap:
    """The memory behind another process's handle. Raises OSError where it cannot be had from here."""
    if handle.boot != _boot():
        raise OSError(errno.EHOSTUNREACH, "the memory belongs to a process of another machine")
    fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino, status.st_size) != (handle.device, handle.inode, handle.nbytes):
            raise OSError(errno.ESTALE, f"descriptor {handle.fd} of process {handle.pid} is something else here")
        return mmap.mmap(fd, handle.nbytes)
    finally:
        os.close(fd)


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _populated(memory: mmap.mmap, nbytes: int) -> mmap.mmap:
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:
        list(threads.map(lambda start: _populate(memory, start), range(0, nbytes, _SHARE_BYTES)))
    return memory


def _populate(memory: mmap.mmap, start: int) -> None:
    length = min(_SHARE_BYTES, len(memory) - start)
    try:
        memory.madvise(_MADV_POPULATE_WRITE, start, length)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise MemoryError(f"the kernel gave no pages for {len(memory)} bytes of host memory: {error}") from error
        # An older kernel gives them as they are touched.
        np.frombuffer(memory, dtype=np.uint8)[start : start + length : mmap.PAGESIZE] = 0


class SlotMemory:
    """The bytes of one arena: slots of `slot_bytes`, over memory that the caller gives.

    One writable buffer (plain, shared or pinned) of at least rows * slot_bytes bytes for each of the `spread` ranks
    that share the arena's slots, in their order.
    """

    def __init__(self, plan: ArenaPlan, *memories: Memory) -> None:
        needed = plan.rows * plan.slot_bytes
        if len(memories) != plan.spread:
            raise ContractError(f"an arena spread over {plan.spread} ranks got the memory of {len(memories)}")
        self.plan = plan
        self._parts: list[NDArray[np.uint8]] = []
        for memory in memories:
            flat = np.frombuffer(memory, dtype=np.uint8)
            if flat.nbytes < needed:
                raise ContractError(f"arena memory has {flat.nbytes} bytes, {needed} are needed")
            self._parts.append(flat[:needed].reshape(plan.rows, plan.slot_bytes))

    def row(self, slot: int) -> NDArray[np.uint8]:
        """All bytes of a slot, writable."""
        part, row = slot % self.plan.spread, slot // self.plan.spread
        found: NDArray[np.uint8] = self._parts[part][row]
        return found

    def view(self, slot: int, nbytes: int) -> memoryview:
        """The first `nbytes` of a slot, writable."""
        return self.row(slot)[:nbytes].data
