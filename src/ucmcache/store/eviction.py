"""Who leaves when room is needed: the eviction contract, CLOCK over leaves for blocks, greedy-dual for states."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Protocol


class EvictionPolicy(Protocol):
    """Orders the occupied slots of one arena by what to give up first.

    Guaranteed by the caller: a slot is added once, and removed before it is added again; victims are removed; one that
    is not evictable is told by `idle` when it is. Promised: `victims` returns distinct slots that satisfy `evictable`.
    """

    def add(self, slot: int) -> None:
        """A slot now holds content."""

    def touch(self, slot: int) -> None:
        """The slot's content was used."""

    def remove(self, slot: int) -> None:
        """The slot no longer holds content."""

    def idle(self, slot: int) -> None:
        """The slot's content is in nobody's use any more: it may be given up again."""

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int] | None:
        """At least one and at most `count` slots to give up, in order; None if there is none."""


class LeafClock:
    """CLOCK over the leaves of chains: a slot goes only after all that continue it, and never while it is needed.

    A chain whose beginning is gone is of no use, so it is given up from its end; once that has begun, the rest of it is
    next, unless something else was touched less. A leaf that was touched since the hand last passed gets a second
    chance. One in use is passed over once, and offered again when it is idle. Slots are small integers below `slots`.
    Cost: amortised O(1).
    """

    def __init__(self, slots: int) -> None:
        self._occupied = bytearray(slots)
        self._referenced = bytearray(slots)
        self._needed = bytearray(slots)
        self._queued = bytearray(slots)
        self._children = [0] * slots
        self._parent = [(-1, 0)] * slots  # slot, and its generation: a slot may get other content
        self._generation = [0] * slots
        self._queue: deque[int] = deque()  # leaves that nobody needs, and some that are neither any more

    def link(self, slot: int, parent: int) -> None:
        """The slot's content continues that of `parent`; told before the slot is added."""
        self._parent[slot] = (parent, self._generation[parent])
        self._children[parent] += 1

    def need(self, slot: int, needed: bool) -> None:
        """Whether the slot's content must stay for the sake of others."""
        self._needed[slot] = needed
        self._offer(slot)

    def add(self, slot: int) -> None:
        # New content starts unreferenced: a scan that is never read again must not push out what is read.
        self._occupied[slot] = 1
        self._referenced[slot] = 0
        self._offer(slot)

    def touch(self, slot: int) -> None:
        self._referenced[slot] = 1

    def remove(self, slot: int) -> None:
        """The slot no longer holds content, or will not, after all."""
        self._occupied[slot] = self._referenced[slot] = self._needed[slot] = 0
        self._children[slot] = 0
        self._generation[slot] += 1
        (parent, generation), self._parent[slot] = self._parent[slot], (-1, 0)
        if parent >= 0 and self._generation[parent] == generation:
            self._children[parent] -= 1
            self._offer(parent, first=True)

    def idle(self, slot: int) -> None:
        self._offer(slot)

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int] | None:
        """One slot, whatever `count`: the next one may be the one that it continued."""
        while self._queue:
            slot = self._queue.popleft()
            self._queued[slot] = 0
            if not self._is_free_leaf(slot) or not evictable(slot):
                continue  # offered again when it is both
            if not self._referenced[slot]:
                return [slot]
            self._referenced[slot] = 0
            self._offer(slot)
        return None

    def _is_free_leaf(self, slot: int) -> bool:
        return bool(self._occupied[slot]) and not self._needed[slot] and not self._children[slot]

    def _offer(self, slot: int, *, first: bool = False) -> None:
        if self._is_free_leaf(slot) and not self._queued[slot]:
            self._queued[slot] = 1
            (self._queue.appendleft if first else self._queue.append)(slot)


class GreedyDual:
    """By worth: what saves least goes first, and what is not used sinks until it does.

    A slot has priority L + worth * (1 + uses), uses counted up to 8 and L as of its last use; the lowest goes, and L
    rises to the priority of what went. So a worthy slot outlives many unworthy ones, and nothing stays for ever. One in
    use is passed over once, and offered again when it is idle. Cost: amortised O(log slots).
    Source: Cao and Irani 1997 (greedy-dual), Cherkasova 1998 (with frequency).
    """

    _COUNTED_USES = 8

    def __init__(self, slots: int) -> None:
        self._worth = [0.0] * slots
        self._uses = [0] * slots
        self._base = [0.0] * slots
        self._entry = [0] * slots  # number of the slot's entry in the heap that counts; 0 for an empty slot
        self._passed = bytearray(slots)  # out of the heap, since it was in use
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
        self._entry[slot] = self._passed[slot] = 0

    def idle(self, slot: int) -> None:
        if self._passed[slot]:
            self._push(slot)

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int] | None:
        chosen: list[int] = []
        while self._heap and len(chosen) < count:
            priority, number, slot = heapq.heappop(self._heap)
            if self._entry[slot] != number:
                continue
            if evictable(slot):
                chosen.append(slot)
                self._level = max(self._level, priority)
            else:
                self._passed[slot] = 1
        return chosen or None

    def _push(self, slot: int) -> None:
        self._numbers += 1
        self._entry[slot] = self._numbers
        self._passed[slot] = 0
        priority = self._base[slot] + self._worth[slot] * (1 + self._uses[slot])
        heapq.heappush(self._heap, (priority, self._numbers, slot))
        if len(self._heap) > 4 * len(self._entry) + 64:
            self._heap = [entry for entry in self._heap if self._entry[entry[2]] == entry[1]]
            heapq.heapify(self._heap)
