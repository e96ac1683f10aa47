"""Who leaves when room is needed: the eviction contract, CLOCK for blocks, greedy-dual for states."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Protocol


class EvictionPolicy(Protocol):
    """Orders the occupied slots of one arena by what to give up first.

    Guaranteed by the caller: a slot is added once, and removed before it is added again.
    Promised: `victims` returns distinct slots that satisfy `evictable`, and changes nothing that is found afterwards if
    it returns None.
    """

    def add(self, slot: int) -> None:
        """A slot now holds content."""

    def touch(self, slot: int) -> None:
        """The slot's content was used."""

    def remove(self, slot: int) -> None:
        """The slot no longer holds content."""

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int] | None:
        """`count` slots to give up, in order; None if so many cannot be had (all or nothing)."""


class Clock:
    """CLOCK: a hand sweeps the slots; a referenced slot gets a second chance, an unreferenced one goes.

    Slots are small integers below `slots`. Cost: at most two sweeps a call.
    """

    def __init__(self, slots: int) -> None:
        self._occupied = bytearray(slots)
        self._referenced = bytearray(slots)
        self._hand = 0

    def add(self, slot: int) -> None:
        # New content starts unreferenced: a scan that is never read again must not push out what is read.
        self._occupied[slot] = 1
        self._referenced[slot] = 0

    def touch(self, slot: int) -> None:
        self._referenced[slot] = 1

    def remove(self, slot: int) -> None:
        self._occupied[slot] = 0
        self._referenced[slot] = 0

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int] | None:
        slots = len(self._occupied)
        chosen: list[int] = []
        seen: set[int] = set()
        spared: list[int] = []
        hand = self._hand
        for _ in range(2 * slots):
            if len(chosen) == count:
                break
            slot = hand
            hand = hand + 1 if hand + 1 < slots else 0
            if not self._occupied[slot] or slot in seen or not evictable(slot):
                continue
            if self._referenced[slot]:
                self._referenced[slot] = 0
                spared.append(slot)
                continue
            chosen.append(slot)
            seen.add(slot)
        if len(chosen) < count:
            # Nothing is given up, so nobody's second chance may have been spent either.
            for slot in spared:
                self._referenced[slot] = 1
            return None
        self._hand = hand
        return chosen


class GreedyDual:
    """By worth: what saves least goes first, and what is not used sinks until it does.

    A slot has priority L + worth * (1 + uses), uses counted up to 8 and L as of its last use; the lowest goes, and L
    rises to the priority of what went. So a worthy slot outlives many unworthy ones, and nothing stays for ever.
    Source: Cao and Irani 1997 (greedy-dual), Cherkasova 1998 (with frequency).
    """

    _COUNTED_USES = 8

    def __init__(self, slots: int) -> None:
        self._worth = [0.0] * slots
        self._uses = [0] * slots
        self._base = [0.0] * slots
        self._entry = [0] * slots  # number of the slot's entry in the heap that counts; 0 for an empty slot
        self._heap: list[tuple[float, int, int]] = []  # priority, number, slot
        self._numbers = 0
        self._level = 0.0  # L

    def add(self, slot: int) -> None:
        self._worth[slot] = 0.0
        self._uses[slot] = 0
        self._base[slot] = self._level
        self._push(slot)

    def revalue(self, slot: int, worth: float) -> None:
        """What the slot's content saves, in any unit that all slots share; 0 until it is told."""
        if self._entry[slot] and worth != self._worth[slot]:
            self._worth[slot] = worth
            self._push(slot)

    def touch(self, slot: int) -> None:
        if self._entry[slot]:
            self._uses[slot] = min(self._uses[slot] + 1, self._COUNTED_USES)
            self._base[slot] = self._level
            self._push(slot)

    def remove(self, slot: int) -> None:
        self._entry[slot] = 0

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int] | None:
        chosen: list[tuple[float, int, int]] = []
        spared: list[tuple[float, int, int]] = []
        while self._heap and len(chosen) < count:
            entry = heapq.heappop(self._heap)
            _, number, slot = entry
            if self._entry[slot] == number:
                (chosen if evictable(slot) else spared).append(entry)
        given_up = len(chosen) == count
        for entry in spared if given_up else [*spared, *chosen]:
            heapq.heappush(self._heap, entry)
        if not given_up:
            return None
        if chosen:
            self._level = max(self._level, chosen[-1][0])
        return [slot for _, _, slot in chosen]

    def _push(self, slot: int) -> None:
        self._numbers += 1
        self._entry[slot] = self._numbers
        priority = self._base[slot] + self._worth[slot] * (1 + self._uses[slot])
        heapq.heappush(self._heap, (priority, self._numbers, slot))
        if len(self._heap) > 4 * len(self._entry) + 64:
            self._heap = [entry for entry in self._heap if self._entry[entry[2]] == entry[1]]
            heapq.heapify(self._heap)
