"""What both stores share: units found by group and prefix, in host slots or known to be in the backend.

An index only: it runs in the scheduler process, single-threaded, and never touches bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ucmcache.keys import UnitKey, physical_id
from ucmcache.store.arena import Arena, ArenaPlan, Owner, Presence
from ucmcache.store.eviction import Clock, EvictionPolicy

# How many keys' fates are remembered, to name the cause of a later miss.
_FATES = 65_536


class UnitStore:
    """Index of one kind of unit over the arenas that hold it.

    `seeds` maps group -> 16-byte group seed; with `namespace` it names a unit in the backend. Guaranteed by the caller:
    groups passed in are in `seeds`. Promised: only committed units are READY; a reservation is all or nothing.
    """

    def __init__(self, plans: Sequence[ArenaPlan], seeds: Mapping[int, bytes], namespace: bytes) -> None:
        self.arenas = [Arena(plan, self._evicted, self._policy(plan)) for plan in plans]
        self._arena_of = {group: arena for arena in self.arenas for group in arena.plan.groups}
        self._seeds = dict(seeds)
        self._namespace = namespace
        self._stored: set[bytes] = set()
        self._fates: OrderedDict[Owner, str] = OrderedDict()
        self.evicted_units = 0

    def _policy(self, plan: ArenaPlan) -> EvictionPolicy:
        return Clock(plan.slots)

    def presence(self, group: int, prefixes: Sequence[bytes]) -> NDArray[np.uint8]:
        """Presence code of each prefix's unit, as uint8."""
        codes = self._arena_of[group].presence(group, prefixes)
        if self._stored:
            for i in np.flatnonzero(codes == Presence.ABSENT):
                if self._id(group, prefixes[i]) in self._stored:
                    codes[i] = Presence.STORED
        return codes

    def slot(self, key: UnitKey) -> int | None:
        """Host slot of a READY unit, or None."""
        return self._arena_of[key.group].slot(key.group, key.prefix)

    def reserve(self, keys: Sequence[UnitKey]) -> list[int] | None:
        """A host slot for each key, or None with nothing reserved. Guaranteed by the caller: no key has one yet."""
        shares = [(arena, [i for i, key in enumerate(keys) if key.group in arena.plan.groups]) for arena in self.arenas]
        if not all(arena.has_room(len(mine)) for arena, mine in shares):
            for key in keys:
                self.note(key, "refused")
            return None
        slots: dict[int, int] = {}
        for arena, mine in shares:
            got = arena.reserve([Owner(keys[i].group, keys[i].prefix) for i in mine])
            slots.update(zip(mine, got or (), strict=True))
        return [slots[i] for i in range(len(keys))]

    def commit(self, group: int, slot: int) -> None:
        """A reserved slot's bytes are in host memory and verified."""
        self._arena_of[group].commit(slot)

    def abort(self, key: UnitKey, slot: int, cause: str) -> None:
        """A reservation is given up for `cause`; the slot is free again."""
        self._arena_of[key.group].abort(slot)
        self.note(key, cause)

    def pin(self, group: int, slot: int) -> None:
        """Keep a slot's content until `unpin`."""
        self._arena_of[group].pin(slot)

    def unpin(self, group: int, slot: int) -> None:
        """Release one pin."""
        self._arena_of[group].unpin(slot)

    def touch(self, group: int, slot: int) -> None:
        """A slot's content was used."""
        self._arena_of[group].touch(slot)

    def note(self, key: UnitKey, fate: str) -> None:
        """Remember why a key is not here: evicted, refused or failed."""
        self._remember(Owner(key.group, key.prefix), fate)

    def fate(self, group: int, prefix: bytes) -> str | None:
        """Why a key that was once here or wanted is not, or None if it never was."""
        return self._fates.get(Owner(group, prefix))

    def add_stored(self, ids: Iterable[bytes]) -> None:
        """Physical ids found in the backend."""
        self._stored.update(ids)

    def set_stored(self, key: UnitKey, stored: bool) -> None:
        """The backend now holds the unit, or turned out not to."""
        (self._stored.add if stored else self._stored.discard)(self._id(key.group, key.prefix))

    @property
    def pinned_slots(self) -> int:
        """Slots with a pin, over all arenas."""
        return sum(arena.pinned_slots for arena in self.arenas)

    @property
    def free_slots(self) -> int:
        """Empty slots, over all arenas."""
        return sum(arena.free_slots for arena in self.arenas)

    def clear(self, namespace: bytes) -> None:
        """Forget everything and go on under another namespace; what is in flight ends as usual, and is not found."""
        self._namespace = namespace
        for arena in self.arenas:
            arena.forget()
        self._stored.clear()
        self._fates.clear()

    def _id(self, group: int, prefix: bytes) -> bytes:
        return physical_id(self._namespace, self._seeds[group], prefix)

    def _evicted(self, owner: Owner) -> None:
        self.evicted_units += 1
        self._remember(owner, "evicted")

    def _remember(self, owner: Owner, fate: str) -> None:
        self._fates[owner] = fate
        self._fates.move_to_end(owner)
        if len(self._fates) > _FATES:
            self._fates.popitem(last=False)
