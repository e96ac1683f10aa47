"""BlockStore: the units of chain groups, content-addressed and immutable."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ucmcache.keys import BlockKey, UnitKey
from ucmcache.store.arena import ArenaPlan
from ucmcache.store.eviction import LeafClock
from ucmcache.store.units import UnitStore


class BlockStore(UnitStore):
    """Blocks of attention-like groups: one copy per content, found by the engine's hash of the prefix they end.

    A block is of use together with every block before it that its group still needs. So in the groups named as
    `whole_chains` a chain is given up from its end, and what is needed (a kept state's path, a request that is still
    at work) is not given up at all: room for others then has to come from `on_full`.
    """

    def __init__(self, plans: Sequence[ArenaPlan], seeds: Mapping[int, bytes], namespace: bytes) -> None:
        self._clocks: dict[int, LeafClock] = {}  # by group
        super().__init__(plans, seeds, namespace)
        self.whole_chains: frozenset[int] = frozenset()
        self._needs: dict[int, dict[bytes, int]] = {group: {} for group in self._arena_of}

    def need(self, groups: Iterable[int], prefixes: Sequence[bytes], times: int = 1) -> None:
        """The blocks of these prefixes are needed, here or not, until released as often; needs count."""
        for group in groups:
            needs, arena, clock = self._needs[group], self._arena_of[group], self._clocks[group]
            for prefix in prefixes:
                before = needs.get(prefix, 0)
                needs[prefix] = before + times
                if not before:
                    slot = arena.slot(group, prefix)
                    if slot is not None:
                        clock.need(slot, True)

    def release(self, groups: Iterable[int], prefixes: Sequence[bytes], times: int = 1) -> None:
        """So many needs of each of these prefixes' blocks have ended."""
        for group in groups:
            needs, arena, clock = self._needs[group], self._arena_of[group], self._clocks[group]
            for prefix in prefixes:
                left = needs.pop(prefix) - times
                if left:
                    needs[prefix] = left
                else:
                    slot = arena.slot(group, prefix)
                    if slot is not None:
                        clock.need(slot, False)

    def needs(self, group: int, prefix: bytes) -> int:
        """How often a group's block is needed."""
        return self._needs[group].get(prefix, 0)

    def reserve(self, keys: Sequence[UnitKey]) -> list[int] | None:
        slots = super().reserve(keys)
        for key, slot in zip(keys, slots or (), strict=False):
            if key.group in self.whole_chains and isinstance(key, BlockKey):
                parent = self._arena_of[key.group].held(key.group, key.parent)
                if parent is not None:
                    self._clocks[key.group].link(slot, parent)
        return slots

    def commit(self, group: int, slot: int) -> None:
        owner = self._arena_of[group].owner(slot)
        super().commit(group, slot)
        if owner is not None and owner.prefix in self._needs[group]:
            self._clocks[group].need(slot, True)

    def abort(self, key: UnitKey, slot: int, cause: str) -> None:
        super().abort(key, slot, cause)
        self._clocks[key.group].remove(slot)

    def clear(self, namespace: bytes) -> None:
        super().clear(namespace)
        self._needs = {group: {} for group in self._arena_of}

    def _policy(self, plan: ArenaPlan) -> LeafClock:
        clock = LeafClock(plan.slots)
        self._clocks.update(dict.fromkeys(plan.groups, clock))
        return clock
