"""SnapshotStore: the states of recurrent groups, keyed by position and prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from ucmcache.keys import SnapshotKey, UnitKey, is_exact, split_id
from ucmcache.store.arena import Arena, ArenaPlan, Owner
from ucmcache.store.eviction import EvictionPolicy, GreedyDual
from ucmcache.store.units import UnitStore


class SnapshotStore(UnitStore):
    """States of recurrent groups: each stands for exactly one prefix and one position, and serves no other.

    A load copies the state into the request's own block, so a request never writes into a stored state. Evicts by
    worth, and the states of one prefix together: one group's is of no use without the others'. `on_gone` hears of every
    prefix whose states are not all here any more, nor on their way; `on_idle` of one with a state that is in nobody's
    use any more. `on_exact` hears of every prefix off the grid, or its head, that something is kept for;
    `on_exact_gone` when host memory has nothing any more, nor has the backend.
    """

    def __init__(self, plans: Sequence[ArenaPlan], seeds: Mapping[int, bytes], namespace: bytes) -> None:
        self._worth: dict[bytes, float] = {}
        self.on_gone: Callable[[bytes], None] = lambda prefix: None
        self.on_idle: Callable[[bytes], None] = lambda prefix: None
        self.on_exact: Callable[[bytes], None] = lambda prefix: None
        self.on_exact_gone: Callable[[bytes], None] = lambda prefix: None
        super().__init__(plans, seeds, namespace)
        self._has_exact = any(map(is_exact, self._arena_of))

    def revalue(self, prefix: bytes, worth: float) -> None:
        """What the states of `prefix` save, in tokens of any scale that all prefixes share."""
        self._worth[prefix] = worth
        for group, arena in self._arena_of.items():
            slot = arena.slot(group, prefix)
            if slot is not None:
                arena.revalue(slot, worth)

    def give_up(self, prefix: bytes) -> bool:
        """Evict the states of a prefix; False, with nothing changed, if one is in use or not there yet."""
        slots = [(arena, arena.held(group, prefix)) for group, arena in self._arena_of.items()]
        held = [(arena, slot) for arena, slot in slots if slot is not None]
        if not all(arena.evictable(slot) for arena, slot in held):
            return False
        for arena, slot in held:
            arena.evict(slot)  # the first takes its siblings along
        return bool(held)

    def reserve(self, keys: Sequence[UnitKey]) -> list[int] | None:
        slots = super().reserve(keys)
        for key in keys if slots is not None else ():
            if is_exact(key.group):
                self.on_exact(key.prefix)
        return slots

    def add_stored(self, ids: Iterable[bytes]) -> None:
        ids = list(ids)
        super().add_stored(ids)
        for head, tag in map(split_id, ids) if self._has_exact else ():
            if is_exact(self._group_of.get(tag, 0)):
                self.on_exact(head)

    def commit(self, group: int, slot: int) -> None:
        super().commit(group, slot)
        arena = self._arena_of[group]
        owner = arena.owner(slot)
        if owner is not None:
            arena.revalue(slot, self._worth.get(owner.prefix, 0.0))
        self._idle(arena, slot)

    def abort(self, key: UnitKey, slot: int, cause: str) -> None:
        super().abort(key, slot, cause)
        self._left(key.prefix)

    def unpin(self, group: int, slot: int) -> None:
        super().unpin(group, slot)
        self._idle(self._arena_of[group], slot)

    def clear(self, namespace: bytes) -> None:
        super().clear(namespace)
        self._worth.clear()

    def _policy(self, plan: ArenaPlan) -> EvictionPolicy:
        return GreedyDual(plan.slots)

    def _evicted(self, owner: Owner) -> None:
        super()._evicted(owner)
        for group, arena in self._arena_of.items():
            slot = arena.slot(group, owner.prefix)
            if slot is not None:
                arena.evict(slot)  # hears of it here, too; not if it is in use
        self._left(owner.prefix)
        if is_exact(owner.group) and not self.is_stored(SnapshotKey(owner.group, owner.prefix, 0)):
            self.on_exact_gone(owner.prefix)

    def _left(self, prefix: bytes) -> None:
        """One group's state has left: those of the others that could not go with it save nothing."""
        if prefix in self._worth:
            self.revalue(prefix, 0.0)
            del self._worth[prefix]
            self.on_gone(prefix)

    def _idle(self, arena: Arena, slot: int) -> None:
        owner = arena.owner(slot)
        if owner is not None and arena.evictable(slot):
            self.on_idle(owner.prefix)
