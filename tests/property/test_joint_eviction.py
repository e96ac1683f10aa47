"""Blocks and states evicted together: random trees of prompts through the real coordinator and small real stores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucmcache.coordinator.binding import GroupFacts, bind
from ucmcache.coordinator.coordinator import Coordinator
from ucmcache.coordinator.hit import Prompt
from ucmcache.coordinator.joint import Claims
from ucmcache.coordinator.pressure import Pressure
from ucmcache.coordinator.retention import Trigger
from ucmcache.store.arena import ArenaPlan
from ucmcache.store.block import BlockStore
from ucmcache.store.eviction import LeafClock
from ucmcache.store.snapshot import SnapshotStore

FULL, FINE, WINDOW, STATE, OTHER_STATE = range(5)
UNIT = 8
# (spec class, tokens a block): two sizes of whole chains, a window of two and a half blocks, two kinds of state.
GROUPS = {
    FULL: ("FullAttentionSpec", 16),
    FINE: ("FullAttentionSpec", 8),
    WINDOW: ("SlidingWindowSpec", 8),
    STATE: ("MambaSpec", 16),
    OTHER_STATE: ("MambaSpec", 16),
}
SEEDS = {group: bytes([group]) * 16 for group in GROUPS}
PATHS = st.text("ab", min_size=1, max_size=9)  # a letter for 16 tokens: many prompts share a beginning


def prompt_of(path: str) -> Prompt:
    hashes = [(path[: i // 2 + 1] + "." * (i % 2 == 0)).encode() for i in range(2 * len(path))]
    return Prompt(16 * len(path) + 1, hashes, UNIT)


@dataclass
class Cache:
    """A coordinator over stores of few slots, as the connector uses it, with every copy done at once."""

    blocks_slots: int
    state_slots: int
    claims: Claims = field(default_factory=dict)
    relieved: int = 0

    def __post_init__(self) -> None:
        self.rows = bind(
            GroupFacts(group, name, size, SimpleNamespace(sliding_window=20, extra_retained_tokens=0), "")
            for group, (name, size) in GROUPS.items()
        )
        n = self.blocks_slots
        plans = [ArenaPlan(2, n, (FULL,)), ArenaPlan(1, 4 * n, (FINE, WINDOW))]
        self.blocks = BlockStore(plans, SEEDS, b"n" * 16)
        state_plans = [ArenaPlan(4, self.state_slots, (STATE,)), ArenaPlan(3, self.state_slots, (OTHER_STATE,))]
        self.states = SnapshotStore(state_plans, SEEDS, b"n" * 16)
        self.coordinator = Coordinator(self.rows, self.blocks, self.states, None)
        relieve = self.blocks.on_full

        def watched() -> bool:
            self.nothing_useless_is_left()
            done = relieve()
            self.relieved += done
            return done

        self.blocks.on_full = watched

    # -- what the connector does --------------------------------------------------------------------------------------

    def request(self, path: str, trigger: Trigger) -> int:
        """Look up, use, compute, keep what was computed and the state at the end; returns where it resumed."""
        coordinator, prompt = self.coordinator, prompt_of(path)
        resume = coordinator.lookup(prompt).resume_tokens
        pinned: list[tuple[Any, int, int]] = []
        if resume:
            coordinator.resumed(prompt.prefix(resume))
            for key, _ in coordinator.needed(prompt, resume):
                store = coordinator.store_of(key)
                slot = store.slot(key)
                assert slot is not None, "promised and not there"
                store.touch(key.group, slot)
                store.pin(key.group, slot)
                pinned.append((store, key.group, slot))
        coordinator.claim(self.claims, prompt, 16 * len(path))
        room = [self._keep_blocks(prompt, row) for row in self.rows if row.group in (FULL, FINE, WINDOW)]
        if all(room):
            units = [placed.key for placed in coordinator.missing_states(prompt, 16 * len(path))]
            slots = self.states.reserve(units)
            if slots is not None:
                coordinator.keep(prompt, 16 * len(path), trigger)
                for key, slot in zip(units, slots, strict=True):
                    self.states.commit(key.group, slot)
        for store, group, slot in pinned:
            assert store.arenas
            store.unpin(group, slot)
        coordinator.settle(self.claims)
        return resume

    def _keep_blocks(self, prompt: Prompt, row: Any) -> bool:
        for key, _ in self.coordinator.missing_blocks(prompt, row, 0, prompt.num_tokens)[0]:
            slots = self.blocks.reserve([key])
            if slots is None:
                return False
            self.blocks.commit(key.group, slots[0])
        return True

    # -- what holds ---------------------------------------------------------------------------------------------------

    def held(self, store: Any, group: int) -> set[bytes]:
        """Prefixes of a group's units that are here."""
        (arena,) = (arena for arena in store.arenas if group in arena.plan.groups)
        return {prefix for prefix, slot in arena._index[group].items() if arena._owner[slot] is not None}

    def kept(self) -> dict[bytes, str]:
        """Prefix -> path of every position whose states are all here."""
        both = self.held(self.states, STATE) & self.held(self.states, OTHER_STATE)
        return {prefix: prefix.decode() for prefix in both}

    def wanted(self) -> dict[int, Counter[bytes]]:
        """By group, the blocks that kept states are resumed with, by plain search."""
        found: dict[int, Counter[bytes]] = {FULL: Counter(), FINE: Counter(), WINDOW: Counter()}
        for path in self.kept().values():
            prompt = prompt_of(path)
            for key, _ in self.coordinator.needed(prompt, 16 * len(path)):
                if key.group in found:
                    found[key.group][key.prefix] += 1
        return found

    def nothing_useless_is_left(self) -> None:
        """Before a state is given up for blocks, one of the arenas holds nothing but what is needed, or in use."""
        wanted = self.wanted()
        for group, claim in self.claims.items():
            wanted[group].update(claim.prefixes)
        full = []
        for arena in self.blocks.arenas:
            slots = [
                (group, prefix, slot) for group in arena.plan.groups for prefix, slot in arena._index[group].items()
            ]
            useless = [prefix for group, prefix, slot in slots if not wanted[group][prefix] and arena.evictable(slot)]
            full.append(not useless and not arena.free_slots)
        assert any(full)

    def check(self) -> None:
        """Nothing kept is stranded, chains are whole from their beginning, and needs are true."""
        for path in self.kept().values():
            prompt = prompt_of(path)
            assert self.coordinator.lookup(prompt).resume_tokens == 16 * len(path), path
        for group, size in ((FULL, 16), (FINE, 8)):
            held = self.held(self.blocks, group)
            for prefix in held:
                letters = prefix.decode()
                # What a fine block continues is the half of its letter, or the letter before.
                before = letters[:-2] if "." in letters else letters + "." if size == 8 else letters[:-1]
                assert not before or before.encode() in held, prefix
        wanted = self.wanted()
        for group, prefixes in wanted.items():
            for prefix in self.held(self.blocks, group) | set(prefixes):
                assert (self.blocks.needs(group, prefix) > 0) == (prefixes[prefix] > 0), (group, prefix)
        assert self.blocks.pinned_slots == self.states.pinned_slots == 0


@settings(max_examples=400, deadline=None)
@given(
    blocks_slots=st.integers(9, 30),
    state_slots=st.integers(1, 8),
    requests=st.lists(st.tuples(PATHS, st.sampled_from(Trigger)), max_size=25),
)
def test_no_state_is_stranded_and_what_is_useless_goes_first(
    blocks_slots: int, state_slots: int, requests: Sequence[tuple[str, Trigger]]
) -> None:
    cache = Cache(blocks_slots, state_slots)
    for path, trigger in requests:
        cache.request(path, trigger)
        cache.check()
    cache.coordinator.clear(b"m" * 16)
    for path, trigger in requests[:3]:
        cache.request(path, trigger)
        cache.check()


def test_a_long_path_gives_way_from_its_end_and_only_as_far_as_needed() -> None:
    cache = Cache(9, 8)
    cache.request("a" * 9, Trigger.PROMPT_END)
    cache.request("bbb", Trigger.PROMPT_END)
    assert cache.relieved == 1
    assert set(cache.kept()) == {b"bbb"}
    # Three blocks were wanted: the first six of the long path are still there.
    assert {b"a" * n for n in range(1, 7)} <= cache.held(cache.blocks, FULL)
    assert b"a" * 7 not in cache.held(cache.blocks, FULL)


def test_a_request_at_work_keeps_its_own_blocks() -> None:
    """Too long for the memory: the rest is refused, rather than that it evicts its own beginning."""
    cache = Cache(4, 2)
    cache.request("abababab", Trigger.PROMPT_END)
    assert not cache.kept()
    assert {b"a", b"ab", b"aba", b"abab"} == cache.held(cache.blocks, FULL)
    assert cache.blocks.fate(FULL, b"ababa") == "refused"
    assert cache.request("bb", Trigger.PROMPT_END) == 0
    assert set(cache.kept()) == {b"bb"}


def test_what_is_in_use_is_not_given_up() -> None:
    cache = Cache(3, 4)
    cache.request("aaa", Trigger.PROMPT_END)
    slot = cache.states.arenas[0].slot(STATE, b"aaa")
    assert slot is not None
    cache.states.pin(STATE, slot)
    cache.request("bb", Trigger.PROMPT_END)
    assert set(cache.kept()) == {b"aaa"}
    cache.states.unpin(STATE, slot)
    cache.request("bb", Trigger.PROMPT_END)
    assert set(cache.kept()) == {b"bb"}


def test_the_work_of_an_eviction_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of both orders over 40,000 evictions: a few each, whatever was evicted before."""
    steps: Counter[str] = Counter()
    looks, is_current = LeafClock._is_free_leaf, Pressure._push

    def look(clock: LeafClock, slot: int) -> bool:
        steps["looks"] += 1
        return looks(clock, slot)

    def push(pressure: Pressure, prefix: bytes, entry: Any) -> None:
        steps["pushes"] += 1
        is_current(pressure, prefix, entry)

    monkeypatch.setattr(LeafClock, "_is_free_leaf", look)
    monkeypatch.setattr(Pressure, "_push", push)
    cache = Cache(60, 400)
    cache.blocks.on_full = cache.coordinator.joint.relieve
    counts = []
    for half in range(2):
        steps.clear()
        before = cache.blocks.evicted_units
        for i in range(2000):
            cache.request(f"{half}{i % 50}-{i}", Trigger.PROMPT_END)
        evicted = cache.blocks.evicted_units - before
        assert evicted > 15_000
        counts.append(steps.total() / evicted)
    assert counts[1] < 12
    assert counts[1] < 1.2 * counts[0]
