"""Pressure: which kept state goes, with the blocks that only it needs, when blocks want room.

Greedy-dual like the states' own order (store.eviction.GreedyDual), but by value per byte, and over states only that
nothing else builds on: to give up any other frees no block. Source: Cao and Irani 1997 (with sizes).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

_COUNTED_USES = 8


@dataclass(slots=True)
class _Entry:
    base: float  # the level as of its last use
    uses: int = 0
    value: float = 0.0
    number: int = 0  # of the entry in the heap that counts
    passed: bool = False  # out of the heap, since it could not be given up


class Pressure:
    """Orders prefixes by what to give up first. Single-threaded; amortised O(log n) a call."""

    def __init__(self) -> None:
        self._known: dict[bytes, _Entry] = {}
        self._heap: list[tuple[float, int, bytes]] = []
        self._numbers = 0
        self._level = 0.0

    def offer(self, prefix: bytes, value: float) -> None:
        """A prefix that could be given up, and what it saves per byte; again when that changed."""
        entry = self._known.setdefault(prefix, _Entry(self._level))
        entry.value = value
        self._push(prefix, entry)

    def touch(self, prefix: bytes) -> None:
        """A prefix was used."""
        entry = self._known.get(prefix)
        if entry is not None:
            entry.base = self._level
            entry.uses = min(entry.uses + 1, _COUNTED_USES)
            self._push(prefix, entry)

    def idle(self, prefix: bytes) -> None:
        """A prefix that could not be given up might be now."""
        entry = self._known.get(prefix)
        if entry is not None and entry.passed:
            self._push(prefix, entry)

    def remove(self, prefix: bytes) -> None:
        """A prefix is not kept any more."""
        self._known.pop(prefix, None)

    def clear(self) -> None:
        """Nothing is kept any more."""
        self._known.clear()
        self._heap.clear()

    def relieve(self, frees: Callable[[bytes], bool], give_up: Callable[[bytes], bool]) -> bool:
        """Give up the lowest prefix that `frees` something and can be; False if there is none.

        What frees nothing is left out until it is offered again, what cannot be given up now until it is idle.
        """
        while self._heap:
            priority, number, prefix = heapq.heappop(self._heap)
            entry = self._known.get(prefix)
            if entry is None or entry.number != number or not frees(prefix):
                continue
            if give_up(prefix):
                self._level = max(self._level, priority)
                return True
            entry.passed = True
        return False

    def _push(self, prefix: bytes, entry: _Entry) -> None:
        self._numbers += 1
        entry.number, entry.passed = self._numbers, False
        heapq.heappush(self._heap, (entry.base + entry.value * (1 + entry.uses), self._numbers, prefix))
        if len(self._heap) > 4 * len(self._known) + 64:
            self._heap = [item for item in self._heap if self._is_current(item)]
            heapq.heapify(self._heap)

    def _is_current(self, item: tuple[float, int, bytes]) -> bool:
        entry = self._known.get(item[2])
        return entry is not None and entry.number == item[1]
