"""Both stores' index against a plain model: a dict of what was committed, and sets of what is held."""

from __future__ import annotations

import mmap
import resource

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ucmcache.errors import ConfigError, ContractError
from ucmcache.keys import BlockKey, SnapshotKey, UnitKey
from ucmcache.store.arena import Arena, ArenaPlan, Owner, Presence, plan_arenas
from ucmcache.store.block import BlockStore
from ucmcache.store.eviction import LeafClock
from ucmcache.store.memory import take_memory
from ucmcache.store.snapshot import SnapshotStore
from ucmcache.store.units import UnitStore

PREFIXES = [bytes([i]) * 4 for i in range(12)]


class StoreMachine(RuleBasedStateMachine):
    """Reserve, commit, abort, pin, evict, store, forget, in any order."""

    store: UnitStore
    key_class: type[BlockKey] | type[SnapshotKey]

    @initialize(kind=st.sampled_from([BlockStore, SnapshotStore]), slots=st.integers(1, 6))
    def start(self, kind: type[UnitStore], slots: int) -> None:
        self.key_class = BlockKey if kind is BlockStore else SnapshotKey
        plans = [ArenaPlan(64, slots, (0, 2)), ArenaPlan(32, slots, (1,))]
        self.store = kind(plans, {0: b"a" * 16, 1: b"b" * 16, 2: b"c" * 16}, b"n" * 16)
        self.capacity = {0: slots, 1: slots, 2: slots}
        self.loading: dict[UnitKey, int] = {}
        self.ready: dict[UnitKey, int] = {}  # may have been evicted since, unless pinned
        self.pins: dict[UnitKey, int] = {}
        self.stored: set[UnitKey] = set()
        self.ghosts: list[tuple[UnitKey, int, int, bool]] = []  # forgotten while in use: key, slot, pins, loading

    def _key(self, group: int, prefix: bytes) -> UnitKey:
        return self.key_class(group, prefix, 16)

    def _presence(self, key: UnitKey) -> int:
        return int(self.store.presence(key.group, [key.prefix])[0])

    @rule(wanted=st.lists(st.tuples(st.integers(0, 2), st.sampled_from(PREFIXES)), min_size=1, max_size=4, unique=True))
    def reserve(self, wanted: list[tuple[int, bytes]]) -> None:
        keys = [self._key(*one) for one in wanted]
        keys = [key for key in keys if self._presence(key) in (Presence.ABSENT, Presence.STORED)]
        if not keys:
            return
        slots = self.store.reserve(keys)
        for arena_groups in ((0, 2), (1,)):
            held = {k for k in self.loading if k.group in arena_groups}
            held |= {k for k, n in self.pins.items() if n and k.group in arena_groups}
            ghosts = sum(1 for key, *_ in self.ghosts if key.group in arena_groups)
            new = sum(1 for key in keys if key.group in arena_groups)
            if len(held) + ghosts + new > self.capacity[arena_groups[0]]:
                assert slots is None  # and nothing is evicted either: the invariant below still holds
                return
        assert slots is not None
        self.loading.update(zip(keys, slots, strict=True))
        for key in keys:
            self.ready.pop(key, None)
        # Evicted units are out of the model once the store says so; pinned ones never are.
        for key in list(self.ready):
            if self.store.slot(key) is None:
                assert not self.pins.get(key)
                del self.ready[key]

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), good=st.booleans())
    def finish(self, data: st.DataObject, good: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.loading)))
        slot = self.loading.pop(key)
        if good:
            self.store.commit(key.group, slot)
            self.ready[key] = slot
        else:
            self.store.abort(key, slot, "failed")
            assert self.store.fate(key.group, key.prefix) == "failed"

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.ready)))
        self.store.pin(key.group, self.ready[key])
        self.store.touch(key.group, self.ready[key])
        self.pins[key] = self.pins.get(key, 0) + 1

    @precondition(lambda self: any(self.pins.values()))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(k for k, n in self.pins.items() if n)))
        self.store.unpin(key.group, self.ready[key])
        self.pins[key] -= 1

    @rule(group=st.integers(0, 2), prefix=st.sampled_from(PREFIXES), stored=st.booleans())
    def backend(self, group: int, prefix: bytes, stored: bool) -> None:
        key = self._key(group, prefix)
        self.store.set_stored(key, stored)
        (self.stored.add if stored else self.stored.discard)(key)

    @rule()
    def forget(self) -> None:
        self.store.clear(b"m" * 16)
        self.ghosts += [(key, slot, 0, True) for key, slot in self.loading.items()]
        self.ghosts += [(key, self.ready[key], n, False) for key, n in self.pins.items() if n]
        self.loading, self.ready, self.pins, self.stored = {}, {}, {}, set()

    @precondition(lambda self: self.ghosts)
    @rule(good=st.booleans())
    def end_of_a_ghost(self, good: bool) -> None:
        key, slot, pins, loading = self.ghosts.pop()
        if loading and good:
            self.store.commit(key.group, slot)
        elif loading:
            self.store.abort(key, slot, "failed")
        for _ in range(pins):
            self.store.unpin(key.group, slot)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "store"):
            return
        for group in range(3):
            for prefix in PREFIXES:
                key = self._key(group, prefix)
                if key in self.loading:
                    expected = Presence.PENDING
                elif key in self.ready:
                    expected = Presence.READY
                else:
                    expected = Presence.STORED if key in self.stored else Presence.ABSENT
                assert self._presence(key) == expected
                assert self.store.slot(key) == self.ready.get(key)
        slots = [*self.loading.values(), *self.ready.values()]
        in_use = [(key.group == 1, slot) for key, slot in [*self.loading.items(), *self.ready.items()]]
        in_use += [(key.group == 1, slot) for key, slot, *_ in self.ghosts]
        assert len(set(in_use)) == len(in_use), f"one slot, two owners: {slots}"
        total = self.capacity[0] + self.capacity[1]
        assert self.store.free_slots == total - len(in_use)
        pinned = sum(1 for n in self.pins.values() if n) + sum(1 for _, _, n, _ in self.ghosts if n)
        assert self.store.pinned_slots == pinned


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def arena(slots: int) -> Arena:
    return Arena(ArenaPlan(8, slots, (0,)), LeafClock(slots), on_evict=lambda owner: None, on_full=lambda: False)


def test_misuse_is_refused() -> None:
    one = arena(2)
    (slot,) = one.reserve([Owner(0, b"x")]) or []
    with pytest.raises(ContractError, match="already has a slot"):
        one.reserve([Owner(0, b"x")])
    with pytest.raises(ContractError, match="unpinned more often"):
        one.unpin(slot)
    one.commit(slot)
    with pytest.raises(ContractError, match="is READY, not LOADING"):
        one.commit(slot)
    with pytest.raises(ContractError, match="is READY, not LOADING"):
        one.abort(slot)


def test_a_leaf_that_was_used_gets_a_second_chance() -> None:
    clock = LeafClock(3)
    for slot in range(3):
        clock.add(slot)
    clock.touch(0)
    clock.touch(1)
    assert clock.victims(1, lambda slot: True) == [2]
    clock.remove(2)
    assert clock.victims(1, lambda slot: slot != 0) == [1]  # its chance is spent, and 0 is in use


SLOTS = 8
CLOCK_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "touch", "remove", "need", "victims", "victims"]),
        st.integers(0, SLOTS - 1),
        st.integers(0, SLOTS - 1),
        st.sets(st.integers(0, SLOTS - 1), max_size=3),
    ),
    max_size=60,
)


@settings(max_examples=2000, deadline=None)
@given(CLOCK_STEPS)
def test_chains_go_from_their_ends_and_nothing_that_is_needed(
    steps: list[tuple[str, int, int, set[int]]],
) -> None:
    clock = LeafClock(SLOTS)
    parents: dict[int, int | None] = {}  # slots that hold something -> what it continues
    needed: set[int] = set()
    touched: set[int] = set()  # since it was added
    just_touched: set[int] = set()  # since the last victim
    for action, slot, other, pinned in steps:
        if action == "add" and slot not in parents:
            parent = other if other in parents else None
            if parent is not None:
                clock.link(slot, parent)
            clock.add(slot)
            parents[slot] = parent
            touched.discard(slot)
            just_touched.discard(slot)
        elif action == "touch" and slot in parents:
            clock.touch(slot)
            touched.add(slot)
            just_touched.add(slot)
        elif action == "need" and slot in parents:
            needed ^= {slot}
            clock.need(slot, slot in needed)
        elif action == "remove" and slot in parents:
            clock.remove(slot)  # in any order: some are forgotten, not evicted
            forget(parents, needed, slot)
        elif action == "victims":
            leaves = set(parents) - needed - {one for one in parents.values() if one is not None}
            got = clock.victims(1, lambda one, pinned=pinned: one not in pinned)  # type: ignore[misc]
            for one in pinned:  # in use for this time only
                clock.idle(one)
            assert (got is None) == (not leaves - pinned)
            if got is not None:
                assert set(got) <= leaves - pinned
                # One that was used just now goes only where all others were used, too, at some time.
                assert not set(got) & just_touched or leaves - pinned <= touched
                just_touched.clear()
                for one in got:
                    clock.remove(one)
                    forget(parents, needed, one)


def forget(parents: dict[int, int | None], needed: set[int], slot: int) -> None:
    """A slot holds nothing: what continued it continues nothing."""
    del parents[slot]
    needed.discard(slot)
    for one, parent in parents.items():
        if parent == slot:
            parents[one] = None


def test_budget_is_divided_by_what_is_of_use_together() -> None:
    # Chains: the same number of tokens for every group. States: the same number of states.
    chains = plan_arenas("host.blocks", 12_000, {0: (100, 16), 1: (100, 16), 2: (400, 64)}, True)
    assert [(plan.slot_bytes, plan.groups) for plan in chains] == [(100, (0, 1)), (400, (2,))]
    assert [plan.slots for plan in chains] == [80, 10]
    states = plan_arenas("host.snapshots", 1_000, {0: (100, 16), 1: (300, 16)}, False)
    assert [plan.slots for plan in states] == [2, 2]
    assert sum(plan.slots * plan.slot_bytes for plan in chains) <= 12_000


def test_a_budget_too_small_for_one_of_each_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"host\.blocks is 100 bytes.*take 600 bytes.*raise host\.blocks"):
        plan_arenas("host.blocks", 100, {0: (300, 16), 1: (300, 16)}, True)


@pytest.mark.parametrize("old_kernel", [False, True])
def test_memory_has_all_its_pages_before_their_first_touch(old_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = (96 << 20) + 5
    if old_kernel:
        monkeypatch.setattr("ucmcache.store.memory._MADV_POPULATE_WRITE", 99)  # no advice of any kernel
    memory = np.frombuffer(take_memory(nbytes), dtype=np.uint8)
    assert memory.nbytes == nbytes
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    memory[:: mmap.PAGESIZE] = 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < nbytes // mmap.PAGESIZE // 100


def test_memory_that_the_kernel_does_not_give_is_refused() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (resource.getpagesize() * 1000, before[1]))
    try:
        with pytest.raises((MemoryError, OSError)):
            take_memory(1 << 30)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
