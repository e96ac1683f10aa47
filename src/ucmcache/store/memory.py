"""A worker's host memory: taken whole at start, cut into slots once the scheduler has said how.

The first touch of a page costs more than reading its content from a warm file, and the kernel's work for it competes
with the engine's. So every page is had before the first request, where time is cheap and where too little memory can
still be refused (docs/adr/0006).
"""

from __future__ import annotations

import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from ucmcache.errors import ContractError
from ucmcache.store.arena import ArenaPlan

_MADV_POPULATE_WRITE = 23  # Linux 5.14; not named by Python's mmap. Changes no content.
_SHARE_BYTES = 64 << 20  # what one thread populates at a time: many huge pages, and a share for every thread soon
_THREADS = 4  # more do not clear memory faster than its bandwidth allows


def take_memory(nbytes: int) -> mmap.mmap:
    """Private zeroed memory with all its pages. Raises MemoryError or OSError where the kernel has not so many."""
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
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
    """A worker's bytes of one arena: `slots` rows of `slot_bytes`, over memory that the caller gives.

    `memory` is a writable buffer of at least slots * slot_bytes bytes: plain, shared or pinned.
    """

    def __init__(self, plan: ArenaPlan, memory: mmap.mmap | memoryview | NDArray[np.uint8]) -> None:
        flat = np.frombuffer(memory, dtype=np.uint8)
        needed = plan.slots * plan.slot_bytes
        if flat.nbytes < needed:
            raise ContractError(f"arena memory has {flat.nbytes} bytes, {needed} are needed")
        self.plan = plan
        self.rows: NDArray[np.uint8] = flat[:needed].reshape(plan.slots, plan.slot_bytes)

    def view(self, slot: int, nbytes: int) -> memoryview:
        """The first `nbytes` of a slot, writable."""
        return self.rows[slot, :nbytes].data
