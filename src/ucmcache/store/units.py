"""What both stores share: units found by group and prefix, in host slots or known to be in the backend.

An index only: it runs in the scheduler process, single-threaded, and never touches bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from itertools import compress, repeat

import numpy as np
from numpy.typing import NDArray

from ucmcache.keys import UnitKey, group_tag, heads, split_id
from ucmcache.store.arena import Arena, ArenaPlan, Owner, Presence
from ucmcache.store.eviction import EvictionPolicy

# How many keys' fates are remembered, to name the cause of a later miss.
_FATES = 65_536

Codes = NDArray[np.uint8]


class Durability(Enum):
    """How far the saving of a unit has come."""

    ACCEPTED = "accepted"  # a slot is reserved and the copy is on its way
    STAGED = "staged"  # in host memory: it can be loaded, and would be lost with the process
    DURABLE = "durable"  # in the backend, on all ranks


class CodeTable:
    """A presence code per group and key, found for many keys at once; ABSENT unless it was put.

    The groups of a model ask about the same prefixes, so a key is found once for all of them. Keys that are ABSENT in
    all groups take no room.
    """

    _NOWHERE = 0  # the row that stays ABSENT

    def __init__(self, groups: Iterable[int]) -> None:
        self._codes = {group: np.zeros(1024, np.uint8) for group in groups}
        self._row_of: dict[bytes, int] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._row_of)

    def find(self, groups: Sequence[int], keys: Sequence[bytes]) -> Codes:
        """Codes of the groups (rows) for the keys (columns)."""
        # One dict lookup a key, and no other step in Python: a prompt may have tens of thousands.
        found = map(self._row_of.get, keys, repeat(self._NOWHERE))
        rows = np.fromiter(found, dtype=np.int64, count=len(keys))
        return np.stack([self._codes[group].take(rows) for group in groups])

    def put(self, group: int, key: bytes, code: Presence) -> None:
        """Set one code."""
        row = self._row_of.get(key, self._NOWHERE)
        if row == self._NOWHERE:
            if code == Presence.ABSENT:
                return
            row = self._row_of[key] = self._free.pop() if self._free else len(self._row_of) + 1
            if row == self._codes[group].size:
                self._codes = {one: np.append(codes, np.zeros_like(codes)) for one, codes in self._codes.items()}
        self._codes[group][row] = code
        if code == Presence.ABSENT and not any(codes[row] for codes in self._codes.values()):
            del self._row_of[key]
            self._free.append(row)


class UnitStore:
    """Index of one kind of unit over the arenas that hold it.

    `seeds` maps group -> 16-byte group seed; with `namespace` it names a unit in the backend. Guaranteed by the caller:
    groups passed in are in `seeds`. Promised: only committed units are READY; a reservation is all or nothing.
    `on_full` is asked for room when the policy has none to give; true if it gave something up.
    """

    def __init__(self, plans: Sequence[ArenaPlan], seeds: Mapping[int, bytes], namespace: bytes) -> None:
        self.on_full: Callable[[], bool] = lambda: False
        self.arenas = [Arena(plan, self._policy(plan), self._evicted, lambda: self.on_full()) for plan in plans]
        self._arena_of = {group: arena for arena in self.arenas for group in arena.plan.groups}
        self._seeds = dict(seeds)
        self._group_of = self._tags(namespace)
        self._here = CodeTable(self._arena_of)  # by prefix: PENDING and READY, as the arenas have it
        self._stored = CodeTable(self._arena_of)  # by head of the prefix, which is what an id tells of it: STORED
        self._fates: OrderedDict[Owner, str] = OrderedDict()
        self.backend_answers = True  # while it does not, what only it has is as good as nowhere
        self.evicted_units = 0

    def _policy(self, plan: ArenaPlan) -> EvictionPolicy:
        raise NotImplementedError

    def presence(self, group: int, prefixes: Sequence[bytes]) -> Codes:
        """Presence code of each prefix's unit, as uint8."""
        codes: Codes = self.presences([group], prefixes)[0]
        return codes

    def presences(self, groups: Sequence[int], prefixes: Sequence[bytes]) -> Codes:
        """Presence codes of the groups' units (rows) for the prefixes (columns), as uint8; hashes nothing."""
        codes = self._here.find(groups, prefixes)
        if self._stored and self.backend_answers:
            absent = codes == Presence.ABSENT
            asked = absent.any(axis=0)
            if asked.any():
                stored = np.zeros_like(codes)
                stored[:, asked] = self._stored.find(groups, heads(list(compress(prefixes, asked.tobytes()))))
                codes = np.where(absent, stored, codes)
        return codes

    def spread(self, group: int) -> int:
        """How many ranks share the slots of a group's units."""
        return self._arena_of[group].plan.spread

    def slot(self, key: UnitKey) -> int | None:
        """Host slot of a READY unit, or None."""
        return self._arena_of[key.group].slot(key.group, key.prefix)

    def reserve(self, keys: Sequence[UnitKey]) -> list[int] | None:
        """A host slot for each key, or None with nothing reserved. Guaranteed by the caller: no key has one yet."""
        shares = [(arena, [i for i, key in enumerate(keys) if key.group in arena.plan.groups]) for arena in self.arenas]
        slots: dict[int, int] = {}
        room = all(arena.has_room(len(mine)) for arena, mine in shares)
        for arena, mine in shares if room else ():
            got = arena.reserve([Owner(keys[i].group, keys[i].prefix) for i in mine])
            if got is None:
                room = False
                break
            slots.update(zip(mine, got, strict=True))
        if not room:
            for i, slot in slots.items():
                self._arena_of[keys[i].group].abort(slot)
            for key in keys:
                self.note(key, "refused")
            return None
        for key in keys:
            self._here.put(key.group, key.prefix, Presence.PENDING)
        return [slots[i] for i in range(len(keys))]

    def commit(self, group: int, slot: int) -> None:
        """A reserved slot's bytes are in host memory and verified."""
        owner = self._arena_of[group].owner(slot)
        self._arena_of[group].commit(slot)
        if owner is not None:
            self._here.put(owner.group, owner.prefix, Presence.READY)

    def abort(self, key: UnitKey, slot: int, cause: str) -> None:
        """A reservation is given up for `cause`; the slot is free again."""
        owner = self._arena_of[key.group].owner(slot)
        self._arena_of[key.group].abort(slot)
        if owner is not None:
            self._here.put(owner.group, owner.prefix, Presence.ABSENT)
        self.note(key, cause)

    def pin(self, group: int, slot: int) -> None:
        """Keep a slot's content until `unpin`."""
        self._arena_of[group].pin(slot)

    def unpin(self, group: int, slot: int) -> None:
        """Release one pin."""
        self._arena_of[group].unpin(slot)

    def hold(self, group: int, prefixes: Iterable[bytes]) -> list[int]:
        """Pin those of these prefixes' units that are READY; their slots."""
        arena = self._arena_of[group]
        slots = [slot for slot in map(partial(arena.slot, group), prefixes) if slot is not None]
        for slot in slots:
            arena.pin(slot)
        return slots

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
        for id in ids:
            head, tag = split_id(id)
            if tag in self._group_of:
                self._stored.put(self._group_of[tag], head, Presence.STORED)

    def set_stored(self, key: UnitKey, stored: bool) -> None:
        """The backend now holds the unit, or turned out not to."""
        (head,) = heads([key.prefix])
        self._stored.put(key.group, head, Presence.STORED if stored else Presence.ABSENT)

    def is_stored(self, key: UnitKey) -> bool:
        """Whether the backend holds the unit, as far as is known."""
        return bool(self._stored.find([key.group], heads([key.prefix]))[0, 0])

    def slot_bytes(self, group: int) -> int:
        """Bytes that a unit of a group takes in a slot."""
        return self._arena_of[group].plan.slot_bytes

    def durability(self, key: UnitKey) -> Durability | None:
        """How far the saving of a unit has come; None if it is nowhere."""
        if self.is_stored(key):
            return Durability.DURABLE
        arena = self._arena_of[key.group]
        if arena.slot(key.group, key.prefix) is not None:
            return Durability.STAGED
        return None if arena.held(key.group, key.prefix) is None else Durability.ACCEPTED

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
        self._group_of = self._tags(namespace)
        for arena in self.arenas:
            arena.forget()
        self._here, self._stored = CodeTable(self._arena_of), CodeTable(self._arena_of)
        self._fates.clear()

    def _tags(self, namespace: bytes) -> dict[bytes, int]:
        return {group_tag(namespace, self._seeds[group]): group for group in self._arena_of}

    def _evicted(self, owner: Owner) -> None:
        self.evicted_units += 1
        self._here.put(owner.group, owner.prefix, Presence.ABSENT)
        self._remember(owner, "evicted")

    def _remember(self, owner: Owner, fate: str) -> None:
        self._fates[owner] = fate
        self._fates.move_to_end(owner)
        if len(self._fates) > _FATES:
            self._fates.popitem(last=False)
