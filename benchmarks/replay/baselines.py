"""Eviction policies to compare with; of use to the benchmark only.

Each follows `ucmcache.store.eviction.EvictionPolicy`, and is told by `name_of` which content a slot is about to hold:
those with ghosts recognise what comes back.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

Evictable = Callable[[int], bool]
_NEVER = 1e18  # later than any request


class Baseline:
    """A policy told of content by name, too: slots are used anew, contents come back."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._order: OrderedDict[int, None] = OrderedDict()  # the first is the next to go
        self.name_of: dict[int, bytes] = {}
        self.now = 0  # number of the request that is being replayed

    def add(self, slot: int) -> None:
        self._order[slot] = None

    def touch(self, slot: int) -> None: ...

    def remove(self, slot: int) -> None:
        self._order.pop(slot, None)

    def idle(self, slot: int) -> None: ...

    def revalue(self, slot: int, worth: float) -> None: ...

    def victims(self, count: int, evictable: Evictable) -> list[int] | None:
        chosen: list[int] = []
        for slot in self._order:
            if len(chosen) == count:
                break
            if evictable(slot):
                chosen.append(slot)
        return chosen if len(chosen) == count else None


class Fifo(Baseline):
    """First in, first out."""


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

    def idle(self, slot: int) -> None: ...

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int] | None:
        slots = len(self._occupied)
        chosen: list[int] = []
        seen: set[int] = set()
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
                continue
            chosen.append(slot)
            seen.add(slot)
        self._hand = hand
        return chosen or None


class Lru(Baseline):
    """What was used longest ago goes."""

    def touch(self, slot: int) -> None:
        self._order.move_to_end(slot)


class Sieve(Baseline):
    """SIEVE (NSDI '24): a hand from old to new spares what was visited; new content is not moved."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self._visited: set[int] = set()
        self._hand: int | None = None

    def touch(self, slot: int) -> None:
        self._visited.add(slot)

    def remove(self, slot: int) -> None:
        super().remove(slot)
        self._visited.discard(slot)

    def victims(self, count: int, evictable: Evictable) -> list[int] | None:
        chosen: list[int] = []
        order = list(self._order)
        at = order.index(self._hand) if self._hand is not None and self._hand in self._order else 0
        for _ in range(2 * len(order)):
            if len(chosen) == count:
                break
            slot = order[at % len(order)]
            at += 1
            if slot in self._visited:
                self._visited.discard(slot)
            elif evictable(slot) and slot not in chosen:
                chosen.append(slot)
        self._hand = order[at % len(order)] if order else None
        return chosen if len(chosen) == count else None


class S3Fifo(Baseline):
    """S3-FIFO (SOSP '23): a tenth for newcomers, a main queue for what was asked for, ghosts of what left early."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self._small: OrderedDict[int, None] = OrderedDict()
        self._main: OrderedDict[int, None] = OrderedDict()
        self._uses: dict[int, int] = {}
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()

    def add(self, slot: int) -> None:
        queue = self._main if self.name_of.get(slot) in self._ghosts else self._small
        self._ghosts.pop(self.name_of.get(slot, b""), None)
        queue[slot] = None
        self._uses[slot] = 0

    def touch(self, slot: int) -> None:
        self._uses[slot] = min(self._uses.get(slot, 0) + 1, 3)

    def remove(self, slot: int) -> None:
        self._small.pop(slot, None)
        self._main.pop(slot, None)
        self._uses.pop(slot, None)

    def victims(self, count: int, evictable: Evictable) -> list[int] | None:
        chosen: list[int] = []
        for _ in range(8 * (len(self._small) + len(self._main)) + 8):
            if len(chosen) == count:
                return chosen
            if self._small and (len(self._small) > self.slots // 10 or not self._main):
                slot = next(iter(self._small))
                del self._small[slot]
                if self._uses[slot] > 0 or not evictable(slot):
                    self._main[slot] = None
                    self._uses[slot] = 0
                    continue
                self._ghosts[self.name_of.get(slot, b"")] = None
                if len(self._ghosts) > self.slots:
                    self._ghosts.popitem(last=False)
            elif not self._main:
                break
            else:
                slot = next(iter(self._main))
                self._main.move_to_end(slot)
                if self._uses[slot] > 0 or not evictable(slot):
                    self._uses[slot] -= self._uses[slot] > 0
                    continue
                del self._main[slot]
            chosen.append(slot)
        if len(chosen) == count:
            return chosen
        self._main.update(dict.fromkeys(chosen))
        return None


class TwoQueue(Baseline):
    """2Q (VLDB '94): a quarter for newcomers, ghosts of half the size; what comes back goes into the main LRU."""

    def __init__(self, slots: int, share: float = 0.25) -> None:
        super().__init__(slots)
        self._share = share
        self._in: OrderedDict[int, None] = OrderedDict()
        self._main: OrderedDict[int, None] = OrderedDict()
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()

    def add(self, slot: int) -> None:
        (self._main if self.name_of.get(slot) in self._ghosts else self._in)[slot] = None
        self._ghosts.pop(self.name_of.get(slot, b""), None)

    def touch(self, slot: int) -> None:
        if slot in self._main:
            self._main.move_to_end(slot)
        elif slot in self._in:  # without it, a state that is read once more would be gone with the newcomers
            del self._in[slot]
            self._main[slot] = None

    def remove(self, slot: int) -> None:
        self._in.pop(slot, None)
        self._main.pop(slot, None)

    def victims(self, count: int, evictable: Evictable) -> list[int] | None:
        chosen: list[int] = []
        while len(chosen) < count:
            first, second = self._in, self._main
            if len(self._in) <= self._share * self.slots:
                first, second = second, first
            slot = next((s for queue in (first, second) for s in queue if s not in chosen and evictable(s)), None)
            if slot is None:
                return None
            chosen.append(slot)
            if slot in self._in:
                self._ghosts[self.name_of.get(slot, b"")] = None
                if len(self._ghosts) > self.slots // 2:
                    self._ghosts.popitem(last=False)
        return chosen


class Arc(Baseline):
    """ARC (FAST '03): what was asked for once beside what was asked for again, their shares set by what returns."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self._once: OrderedDict[int, None] = OrderedDict()
        self._again: OrderedDict[int, None] = OrderedDict()
        self._once_ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._again_ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._target = 0.0

    def add(self, slot: int) -> None:
        name = self.name_of.get(slot, b"")
        if name in self._once_ghosts:
            self._target = min(
                self.slots, self._target + max(1.0, len(self._again_ghosts) / max(1, len(self._once_ghosts)))
            )
            del self._once_ghosts[name]
            self._again[slot] = None
        elif name in self._again_ghosts:
            self._target = max(0.0, self._target - max(1.0, len(self._once_ghosts) / max(1, len(self._again_ghosts))))
            del self._again_ghosts[name]
            self._again[slot] = None
        else:
            self._once[slot] = None

    def touch(self, slot: int) -> None:
        if slot in self._once:
            del self._once[slot]
            self._again[slot] = None
        elif slot in self._again:
            self._again.move_to_end(slot)

    def remove(self, slot: int) -> None:
        self._once.pop(slot, None)
        self._again.pop(slot, None)

    def victims(self, count: int, evictable: Evictable) -> list[int] | None:
        chosen: list[int] = []
        while len(chosen) < count:
            once_first = len(self._once) > max(self._target, 0) or not self._again
            queues = (self._once, self._again) if once_first else (self._again, self._once)
            slot = next((s for queue in queues for s in queue if s not in chosen and evictable(s)), None)
            if slot is None:
                return None
            chosen.append(slot)
            ghosts = self._once_ghosts if slot in self._once else self._again_ghosts
            ghosts[self.name_of.get(slot, b"")] = None
            if len(ghosts) > self.slots:
                ghosts.popitem(last=False)
        return chosen


class Marconi(Baseline):
    """Marconi's S(n) = recency + alpha * FLOP efficiency (MLSys '25), both scaled to 0..1 over what is held.

    All states are of one size here, so efficiency is the tokens between a state and its ancestor.
    """

    def __init__(self, slots: int, alpha: float) -> None:
        super().__init__(slots)
        self._alpha = alpha
        self._now = 0
        self._used = np.full(slots, np.inf)  # inf for an empty slot
        self._saves = np.zeros(slots)

    def add(self, slot: int) -> None:
        self._saves[slot] = 0.0
        self.touch(slot)

    def touch(self, slot: int) -> None:
        self._now += 1
        self._used[slot] = self._now

    def revalue(self, slot: int, worth: float) -> None:
        self._saves[slot] = worth

    def remove(self, slot: int) -> None:
        self._used[slot] = np.inf

    def victims(self, count: int, evictable: Evictable) -> list[int] | None:
        held = np.flatnonzero(np.isfinite(self._used))
        scores = np.full(self._used.size, np.inf)
        if held.size:
            scores[held] = _scaled(self._used[held]) + self._alpha * _scaled(self._saves[held])
        return _lowest(scores, count, evictable)


class Belady(Baseline):
    """Offline: the state goes whose next read is farthest.

    `reads` maps a prefix to the requests that read its state in a replay without eviction, ascending. An approximation,
    not a bound: it counts reads and not tokens, and a request whose state is gone reads a shallower one instead, which
    is not foreseen. Source: Belady 1966.
    """

    def __init__(self, slots: int, reads: Mapping[bytes, Sequence[int]]) -> None:
        super().__init__(slots)
        self._reads = reads
        self._next = np.full(slots, -np.inf)  # request of the next read; -inf for an empty slot

    def add(self, slot: int) -> None:
        requests = self._reads.get(self.name_of.get(slot, b""), ())
        index = bisect_right(requests, self.now)
        self._next[slot] = requests[index] if index < len(requests) else _NEVER

    def touch(self, slot: int) -> None:
        self.add(slot)

    def remove(self, slot: int) -> None:
        self._next[slot] = -np.inf

    def victims(self, count: int, evictable: Evictable) -> list[int] | None:
        for slot in np.flatnonzero(np.isfinite(self._next) & (self._next <= self.now)):
            self.add(int(slot))  # that read went to another state
        return _lowest(-self._next, count, evictable)


def _lowest(scores: NDArray[np.float64], count: int, evictable: Evictable) -> list[int] | None:
    """The evictable slots of lowest score, inf being an empty slot; None if there are fewer than `count`."""
    lowest = int(scores.argmin())
    if count == 1 and np.isfinite(scores[lowest]) and evictable(lowest):
        return [lowest]  # nearly always, and much faster than to sort
    ordered = (int(slot) for slot in np.argsort(scores, kind="stable") if np.isfinite(scores[slot]))
    chosen = list(islice(filter(evictable, ordered), count))
    return chosen if len(chosen) == count else None


def _scaled(values: NDArray[np.float64]) -> NDArray[np.float64]:
    low, high = values.min(), values.max()
    return (values - low) / (high - low) if high > low else np.zeros_like(values)
