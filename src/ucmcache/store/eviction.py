"""Who leaves when room is needed: the eviction contract and CLOCK."""

from __future__ import annotations

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
