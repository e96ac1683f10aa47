"""Fixed-size slots of one geometry: who is in which slot, what may be found, what may be evicted.

The index half lives in the scheduler process and hands slot numbers out; every worker uses the same numbers in memory
of its own (`store.memory`). Reserve, write, commit: nothing can be found before commit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from ucmcache.errors import ConfigError, ContractError
from ucmcache.store.eviction import EvictionPolicy, GreedyDual


class Presence(IntEnum):
    """Where the bytes of a key are."""

    ABSENT = 0
    PENDING = 1  # a reservation is being filled
    STORED = 2  # in the backend only
    READY = 3  # verified and in host memory


class Owner(NamedTuple):
    """What a slot holds: a group's unit, named by the engine's prefix hash."""

    group: int
    prefix: bytes


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """The slots of one geometry, as the scheduler decided them and every worker lays them out."""

    slot_bytes: int  # the widest rank's unit
    slots: int
    groups: tuple[int, ...]  # KV cache groups whose units live here
    spread: int = 1  # ranks that share the slots: slot s is row s // spread in the memory of the s % spread-th of them

    @property
    def rows(self) -> int:
        """Slots in one rank's memory."""
        return -(-self.slots // self.spread)


def plan_arenas(
    setting: str,
    budget_bytes: int,
    units: Mapping[int, tuple[int, int]],
    weight_by_tokens: bool,
    spread: Mapping[int, int] | None = None,
) -> list[ArenaPlan]:
    """Divide one rank's `budget_bytes` into arenas, one per unit size and spread.

    `units` maps group -> (unit bytes, tokens per unit), `spread` group -> ranks that share its slots (1 if absent).
    With `weight_by_tokens` every group gets slots for the same number of tokens, since a chain is of use only where all
    groups have it; otherwise every group gets the same number of slots, since a state is of use only where all groups
    have one. Raises ConfigError (naming `setting`) when not even one unit of each group fits.
    """
    if not units:
        return []
    ranks = {group: (spread or {}).get(group, 1) for group in units}
    density = {
        group: unit / (tokens if weight_by_tokens else 1) / ranks[group] for group, (unit, tokens) in units.items()
    }
    share = budget_bytes / sum(density.values())
    by_shape: dict[tuple[int, int], list[int]] = {}
    for group, (unit_bytes, _) in sorted(units.items()):
        by_shape.setdefault((unit_bytes, ranks[group]), []).append(group)
    plans = []
    for (unit_bytes, sharing), groups in by_shape.items():
        # Rounded down to whole rows: every rank of a spread has as much memory as the others.
        rows = int(sum(share / (units[group][1] if weight_by_tokens else 1) for group in groups) / sharing)
        if rows * sharing < len(groups):
            needed = sum(unit for unit, _ in units.values())
            raise ConfigError(
                f"{setting} is {budget_bytes} bytes; this model's units take {needed} bytes for one of each of its "
                f"{len(units)} groups, and at least one of each must fit — raise {setting}"
            )
        plans.append(ArenaPlan(unit_bytes, rows * sharing, tuple(groups), sharing))
    return plans


class Arena:
    """Index of one arena's slots.

    Single-threaded. Guaranteed by the caller: every reserved slot is committed or aborted exactly once, every pin is
    released exactly once (ContractError otherwise). Promised: a pinned or uncommitted slot is never evicted.
    """

    _FREE, _LOADING, _READY = 0, 1, 2

    def __init__(
        self, plan: ArenaPlan, policy: EvictionPolicy, on_evict: Callable[[Owner], None], on_full: Callable[[], bool]
    ) -> None:
        self.plan = plan
        self._policy = policy
        self._on_evict = on_evict
        self._on_full = on_full
        self._free = list(range(plan.slots - 1, -1, -1))
        self._state = bytearray(plan.slots)
        self._pins = [0] * plan.slots
        self._owner: list[Owner | None] = [None] * plan.slots
        self._index: dict[int, dict[bytes, int]] = {group: {} for group in plan.groups}
        # Forgotten while somebody still reads or writes them: out of the index, freed when that ends.
        self._doomed: set[int] = set()
        self._evictable_slots = 0  # committed and unpinned

    @property
    def free_slots(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    @property
    def pinned_slots(self) -> int:
        """Slots that at least one owner holds a pin on."""
        return sum(1 for pins in self._pins if pins)

    def slot(self, group: int, prefix: bytes) -> int | None:
        """Slot of a committed unit, or None."""
        slot = self._index[group].get(prefix)
        return slot if slot is not None and self._state[slot] == self._READY else None

    def held(self, group: int, prefix: bytes) -> int | None:
        """Slot of a unit that is here or on its way, or None."""
        return self._index[group].get(prefix)

    def has_room(self, count: int) -> bool:
        """Whether `count` slots can be reserved now, by evicting if needed."""
        return count <= len(self._free) + self._evictable_slots

    def reserve(self, owners: Sequence[Owner]) -> list[int] | None:
        """One slot for each owner, evicting if needed; None, with nothing reserved, if so many cannot be had.

        Guaranteed by the caller: no owner has a slot here already.
        """
        if not self.has_room(len(owners)):
            return None
        while len(self._free) < len(owners):
            victims = self._policy.victims(len(owners) - len(self._free), self.evictable)
            for slot in victims or ():
                self.evict(slot)  # some have gone with a sibling already
            # What is left is in use or needed by something that `on_full` may give up.
            if not victims and not self._on_full():
                return None
        slots = []
        for owner in owners:
            if owner.prefix in self._index[owner.group]:
                raise ContractError(f"group {owner.group} already has a slot for prefix {owner.prefix.hex()[:16]}")
            slot = self._free.pop()
            self._state[slot] = self._LOADING
            self._owner[slot] = owner
            self._index[owner.group][owner.prefix] = slot
            slots.append(slot)
        return slots

    def commit(self, slot: int) -> None:
        """The slot's bytes are written and verified: it can be found from now on."""
        self._expect(slot, self._LOADING, "commit")
        self._state[slot] = self._READY
        self._policy.add(slot)
        self._evictable_slots += not self._pins[slot]
        self._free_if_doomed(slot)

    def abort(self, slot: int) -> None:
        """The reservation is given up; the slot is free again."""
        self._expect(slot, self._LOADING, "abort")
        self._drop(slot, evicted=False)

    def touch(self, slot: int) -> None:
        """The slot's content was used."""
        self._policy.touch(slot)

    def revalue(self, slot: int, worth: float) -> None:
        """What the slot's content saves; only for a policy that goes by it."""
        if isinstance(self._policy, GreedyDual):
            self._policy.revalue(slot, worth)

    def owner(self, slot: int) -> Owner | None:
        """What a slot holds or is reserved for; None if it is free, or its content was forgotten."""
        return None if slot in self._doomed else self._owner[slot]

    def evict(self, slot: int) -> bool:
        """Give up a slot's content; False if it is in use."""
        if not self.evictable(slot):
            return False
        self._drop(slot, evicted=True)
        return True

    def pin(self, slot: int) -> None:
        """Keep the slot's content until `unpin`; pins count."""
        if self._state[slot] == self._FREE:
            raise ContractError(f"slot {slot} is pinned but holds nothing")
        self._evictable_slots -= self.evictable(slot)
        self._pins[slot] += 1

    def unpin(self, slot: int) -> None:
        """Release one pin."""
        if not self._pins[slot]:
            raise ContractError(f"slot {slot} is unpinned more often than it was pinned")
        self._pins[slot] -= 1
        if self.evictable(slot):
            self._evictable_slots += 1
            self._policy.idle(slot)
        self._free_if_doomed(slot)

    def forget(self) -> None:
        """Nothing that is here now can be found any more; slots in use are freed when their users are done."""
        for slot, owner in enumerate(self._owner):
            if owner is None or slot in self._doomed:
                continue
            if self.evictable(slot):
                self._drop(slot, evicted=False)
            else:
                self._doomed.add(slot)
                del self._index[owner.group][owner.prefix]

    def evictable(self, slot: int) -> bool:
        """Whether the slot's content could be given up now: it is committed, and nobody has a pin on it."""
        return self._state[slot] == self._READY and not self._pins[slot]

    def _free_if_doomed(self, slot: int) -> None:
        if slot in self._doomed and self.evictable(slot):
            self._drop(slot, evicted=False)

    def _expect(self, slot: int, state: int, action: str) -> None:
        if self._state[slot] != state:
            names = ("FREE", "LOADING", "READY")
            raise ContractError(f"{action} of slot {slot}, which is {names[self._state[slot]]}, not {names[state]}")

    def _drop(self, slot: int, *, evicted: bool) -> None:
        owner = self._owner[slot]
        if owner is None:
            raise ContractError(f"slot {slot} is dropped but holds nothing")
        if self._state[slot] == self._READY:
            self._policy.remove(slot)
            self._evictable_slots -= not self._pins[slot]
        if slot in self._doomed:
            self._doomed.discard(slot)
        else:
            del self._index[owner.group][owner.prefix]
        self._owner[slot] = None
        self._state[slot] = self._FREE
        self._free.append(slot)
        if evicted:
            self._on_evict(owner)
