"""Random interleavings of save, abort, evict, fail, store, stage, resume, clear and lookup, on the real stores.

After each step the coordinator's answers are compared with the four-line oracle over a dict of what was done. Which
unit an eviction chooses is asked of the stores; all else the model knows by itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.positions import state_positions
from tests.property.test_resolve_hit import Given, check
from ucmcache.coordinator.binding import BoundRow, GroupFacts, bind
from ucmcache.coordinator.coordinator import Coordinator
from ucmcache.coordinator.hit import Prompt
from ucmcache.coordinator.joint import Claims
from ucmcache.coordinator.retention import Trigger
from ucmcache.coordinator.spec import Kind
from ucmcache.keys import SnapshotKey, UnitKey, physical_id
from ucmcache.store.arena import ArenaPlan, Presence
from ucmcache.store.block import BlockStore
from ucmcache.store.snapshot import SnapshotStore

UNIT = 4  # tokens of a hash, and of a letter of the texts below
CHAINS = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec")
SIZES = ((4,), (4, 8), (12,), (8, 12), (12, 16), (12, 16, 20), (16,), (20, 4))
NAMESPACES = [bytes([i]) * 16 for i in range(64)]


def prompt_of(
    text: Sequence[int], more_tokens: int = 1, local_tokens: int = 0, only_last: bool = False, salt: bytes = b""
) -> Prompt:
    """A prompt of four tokens a letter and some more, with hashes of the whole prefix as an engine makes them."""
    hashes, last = [], salt
    for letter in text:
        last = hashlib.blake2b(last + bytes([letter]), digest_size=16).digest()
        hashes.append(last)
    return Prompt(UNIT * len(text) + more_tokens, hashes, UNIT, local_tokens, only_last)


@dataclass(frozen=True)
class Layout:
    """Groups as drawn: (spec class, block tokens) each; span of windows and chunks; slots, ranks that share them."""

    groups: tuple[tuple[str, int], ...]
    span_tokens: int
    block_slots: int
    state_slots: int
    spread: int

    def rows(self) -> tuple[BoundRow, ...]:
        """The groups bound to the spec table."""
        spec = SimpleNamespace(
            sliding_window=self.span_tokens, extra_retained_tokens=0, attention_chunk_size=self.span_tokens
        )
        facts = [GroupFacts(i, name, size, spec, f"group {i}") for i, (name, size) in enumerate(self.groups)]
        return bind(facts)

    def stores(self, rows: Sequence[BoundRow], namespace: bytes) -> tuple[BlockStore, SnapshotStore]:
        """Small stores for the rows; groups of one block size share an arena."""
        seeds = {row.group: row.seed for row in rows}

        def plans(kind: Kind, slots: int) -> list[ArenaPlan]:
            sizes = sorted({row.block_tokens for row in rows if row.kind is kind})
            groups = [tuple(r.group for r in rows if r.kind is kind and r.block_tokens == size) for size in sizes]
            return [ArenaPlan(1, slots * len(g) * self.spread, g, self.spread) for g in groups]

        blocks = BlockStore(plans(Kind.CHAIN, self.block_slots), seeds, namespace)
        return blocks, SnapshotStore(plans(Kind.SNAPSHOT, self.state_slots), seeds, namespace)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    sizes = st.sampled_from(draw(st.sampled_from(SIZES)))
    chains = draw(st.lists(st.tuples(st.sampled_from(CHAINS), sizes), min_size=1, max_size=3))
    states = [("MambaSpec", draw(sizes)) for _ in range(draw(st.sampled_from([0, 1, 1, 2, 2])))]
    spread = draw(st.sampled_from([1, 1, 2, 4]))
    slots = draw(st.sampled_from([3, 5, 8, 12, 24])), draw(st.sampled_from([1, 2, 4, 12]))
    return Layout((*chains, *states), draw(st.integers(1, 30)), *slots, spread)


@st.composite
def forests(draw: st.DrawFn, letters: int) -> list[tuple[int, ...]]:
    """Texts of which each goes another's way up to somewhere, and then its own."""
    texts = [tuple(draw(st.binary(min_size=letters // 2, max_size=letters)))]
    for _ in range(draw(st.integers(1, 3))):
        other = draw(st.sampled_from(texts))
        cut = draw(st.integers(0, len(other)))
        texts.append((*other[:cut], *draw(st.binary(min_size=1, max_size=max(letters - cut, 1)))))
    return texts


class Interleavings(RuleBasedStateMachine):
    """One coordinator over small stores, and a dict of what was done to them."""

    @initialize(layout=layouts(), data=st.data())
    def start(self, layout: Layout, data: st.DataObject) -> None:
        self.rows = layout.rows()
        self.grid = lcm(*(row.block_tokens for row in self.rows))
        self.namespaces = iter(NAMESPACES)
        self.namespace = next(self.namespaces)
        self.blocks, self.states = layout.stores(self.rows, self.namespace)
        self.coordinator = Coordinator(self.rows, self.blocks, self.states, None)
        letters = min(max(3 * self.grid // UNIT, 8), 130)
        self.texts = data.draw(forests(letters))
        self.prompts = [prompt_of(text, more_tokens=i % 3) for i, text in enumerate(self.texts, 1)]
        # Nothing behind the last block; all in one go or not at all; some of it in the engine already.
        on_grid = self.texts[0][: len(self.texts[0]) * UNIT // self.grid * self.grid // UNIT]
        self.prompts += [prompt_of(on_grid, more_tokens=0), prompt_of(on_grid, only_last=True)]
        self.prompts.append(prompt_of(self.texts[0], local_tokens=self.grid))
        self.snapshots = [row for row in self.rows if row.kind is Kind.SNAPSHOT]
        self.loading: dict[UnitKey, int] = {}
        self.ready: dict[UnitKey, int] = {}  # as far as it was not evicted
        self.stored: set[tuple[int, bytes]] = set()
        self.fates: dict[tuple[int, bytes], str] = {}
        self.pins: list[UnitKey] = []  # of requests at work
        self.claims: list[Claims] = []
        self.strangers = 0
        self.ghosts: list[tuple[UnitKey, int]] = []  # in flight when all was forgotten
        self.ghost_pins: list[tuple[UnitKey, int]] = []
        for _ in range(data.draw(st.integers(0, 4))):  # where little is kept, there is little to lose
            self._prefill(data)

    # -- what a connector does ------------------------------------------------------------------------------------

    def _reserve(self, keys: Sequence[UnitKey]) -> bool:
        store = self.coordinator.store_of(keys[0])
        slots = store.reserve(keys)
        self._notice_evictions()
        if slots is None:
            self.fates.update({(key.group, key.prefix): "refused" for key in keys})
            return False
        for key, slot in zip(keys, slots, strict=True):
            self.loading[key] = slot
            store.pin(key.group, slot)
        return True

    def _notice_evictions(self) -> None:
        for key, slot in list(self.ready.items()):
            now = self.coordinator.store_of(key).slot(key)
            if now is None:
                assert key not in self.pins, f"{key} was evicted while in use"
                del self.ready[key]
                self.fates[key.group, key.prefix] = "evicted"
            else:
                assert now == slot, f"{key} went from slot {slot} to {now}"

    def _prefill(self, data: st.DataObject) -> None:
        """A request at work, copies and all: its blocks up to a grid position, then the states there."""
        prompt = self._prompt(data)
        computed = self.grid * data.draw(st.integers(1, max(prompt.hashed_tokens // self.grid, 1)))
        if computed > prompt.hashed_tokens:
            return
        claims: Claims = {}
        self.coordinator.claim(claims, prompt, computed)
        units = [
            [key]
            for row in self.rows
            if row.kind is Kind.CHAIN
            for key, _ in self.coordinator.missing_blocks(prompt, row, 0, computed)[0]
        ]
        room = all(self._reserve(keys) and self._copied(keys) for keys in units)
        states = [key for key, _ in self.coordinator.missing_states(prompt, computed)]
        if room and (not states or self._reserve(states)):
            self.coordinator.keep(prompt, computed, data.draw(st.sampled_from(Trigger)))
            self._copied(states)
        self.coordinator.settle(claims)

    prefill = rule(data=st.data())(_prefill)

    def _copied(self, keys: Sequence[UnitKey], written: bool = True) -> bool:
        for key in keys:
            store, slot = self.coordinator.store_of(key), self.loading.pop(key)
            store.commit(key.group, slot)
            self.ready[key] = slot
            if written:
                store.unpin(key.group, slot)
            else:
                self.pins.append(key)  # somebody still writes it to a backend
        return True

    @rule(data=st.data())
    def save_blocks(self, data: st.DataObject) -> None:
        prompt = self._prompt(data)
        row = data.draw(st.sampled_from([row for row in self.rows if row.kind is Kind.CHAIN]))
        computed = data.draw(st.integers(0, prompt.num_tokens))
        first = data.draw(st.sampled_from([0, 0, 0, 1, 3]))
        missing, onward = self.coordinator.missing_blocks(prompt, row, first, computed)
        codes = self._given(prompt).at
        ends = [(column + 1) * row.block_tokens for column in range(first, computed // row.block_tokens)]
        absent = [end for end in ends if codes.get((row.group, end), 0) == Presence.ABSENT]
        assert [key.depth_tokens for key, _ in missing] == absent
        assert first <= onward <= max(first, computed // row.block_tokens)
        for key, _ in missing[: data.draw(st.sampled_from([1, 3, 50]))]:
            if not self._reserve([key]):
                break

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data(), trigger=st.sampled_from(Trigger))
    def save_states(self, data: st.DataObject, trigger: Trigger) -> None:
        prompt = self._prompt(data)
        grid = data.draw(st.integers(1, max(prompt.hashed_tokens // self.grid, 1)))
        units = [key for key, _ in self.coordinator.missing_states(prompt, self.grid * grid)]
        assert all(isinstance(key, SnapshotKey) and key.depth_tokens == self.grid * grid for key in units)
        # A state that one group has and another not is of no use, and is to be seen as such.
        if units and data.draw(st.integers(0, 3)) == 0:
            units = units[:1]
        if self.grid * grid <= prompt.hashed_tokens and (not units or self._reserve(units)):
            self.coordinator.keep(prompt, self.grid * grid, trigger)

    @precondition(lambda self: self.loading)
    @rule(
        data=st.data(),
        count=st.sampled_from([1, 2, 5, 50]),
        good=st.sampled_from([True, True, True, False]),
        written=st.booleans(),
    )
    def finish(self, data: st.DataObject, count: int, good: bool, written: bool) -> None:
        for key in data.draw(st.permutations(sorted(self.loading)))[:count]:
            if good:
                self._copied([key], written)
            else:
                store, slot = self.coordinator.store_of(key), self.loading.pop(key)
                store.unpin(key.group, slot)
                store.abort(key, slot, "failed")
                self.fates[key.group, key.prefix] = "failed"
        self._notice_evictions()

    @precondition(lambda self: self.ready)
    @rule(data=st.data(), stored=st.booleans())
    def write_to_the_backend(self, data: st.DataObject, stored: bool) -> None:
        for key in sorted(self.ready)[data.draw(st.integers(0, 5)) :: 3]:
            self.coordinator.store_of(key).set_stored(key, stored)
            (self.stored.add if stored else self.stored.discard)((key.group, key.prefix))

    @rule(data=st.data())
    def find_in_the_backend(self, data: st.DataObject) -> None:
        """Ids of a scan: of this namespace, which count, and of another, which do not."""
        row, prompt = data.draw(st.sampled_from(self.rows)), self._prompt(data)
        ends = range(row.block_tokens, prompt.hashed_tokens + 1, row.block_tokens)
        first, step = data.draw(st.tuples(st.integers(0, 3), st.integers(1, 3)))
        prefixes = [prompt.prefix(end) for end in ends][first::step][:3]
        store = self.states if row.kind is Kind.SNAPSHOT else self.blocks
        store.add_stored(physical_id(b"other namespace!", row.seed, prefix) for prefix in prefixes[::-1])
        store.add_stored(physical_id(self.namespace, row.seed, prefix) for prefix in prefixes)
        self.stored.update((row.group, prefix) for prefix in prefixes)

    @rule(data=st.data(), whole=st.booleans())
    def stage(self, data: st.DataObject, whole: bool) -> None:
        """Get what a lookup waits for, all or some of it."""
        prompt = self._prompt(data)
        hit = self.coordinator.lookup(prompt)
        if hit.pending:
            at = self._given(prompt).at
            needed = [key for key, _ in self.coordinator.needed(prompt, hit.reachable_tokens)]
            cold = [key for key in needed if at[key.group, key.depth_tokens] == Presence.STORED]
            if whole:  # all of a store at once, or none
                for store in (self.blocks, self.states):
                    mine = [key for key in cold if self.coordinator.store_of(key) is store]
                    if mine and not self._reserve(mine):
                        break
            elif cold:
                self._reserve(cold[:1])

    @rule(data=st.data())
    def crowd(self, data: st.DataObject) -> None:
        """Others take all the room that there is for a group: what is in use has to stay."""
        row = data.draw(st.sampled_from([row for row in self.rows if row.kind is not Kind.NONE]))
        store = self.states if row.kind is Kind.SNAPSHOT else self.blocks
        slots = next(arena.plan.slots for arena in store.arenas if row.group in arena.plan.groups)
        for _ in range(slots):
            self.strangers += 1
            other = prompt_of(bytes(self.grid // UNIT), salt=b"%d" % self.strangers)
            if row.kind is Kind.SNAPSHOT:
                keys = [key for key, _ in self.coordinator.missing_states(other, self.grid)]
            else:
                keys = [key for key, _ in self.coordinator.missing_blocks(other, row, 0, row.block_tokens)[0]]
            if not self._reserve(keys):
                break
            self.coordinator.keep(other, self.grid, Trigger.JUNCTION)  # worth more than most
            self._copied(keys)

    def _resume(self, data: st.DataObject) -> None:
        """A request is promised a position: it reads all that this needs, and keeps it while it does."""
        prompt = self._prompt(data)
        hit = self.coordinator.lookup(prompt)
        if hit.resume_tokens > prompt.local_tokens:
            self.coordinator.resumed(prompt.prefix(hit.resume_tokens))
            used = data.draw(st.booleans())  # a pin alone has to keep them
            for key, _ in self.coordinator.needed(prompt, hit.resume_tokens):
                store = self.coordinator.store_of(key)
                store.pin(key.group, self.ready[key])
                self.pins.append(key)
                if used:
                    store.touch(key.group, self.ready[key])
            self.claims.append({})
            if used:
                self.coordinator.claim(self.claims[-1], prompt, hit.resume_tokens)

    resume = rule(data=st.data())(_resume)
    resume_more = rule(data=st.data())(_resume)

    @precondition(lambda self: self.claims or self.pins)
    @rule(all_of_it=st.booleans())
    def end_requests(self, all_of_it: bool) -> None:
        for key in self.pins if all_of_it else self.pins[::2]:
            self.coordinator.store_of(key).unpin(key.group, self.ready[key])
        self.pins = [] if all_of_it else self.pins[1::2]
        for claims in self.claims if all_of_it else self.claims[:1]:
            self.coordinator.settle(claims)
        self.claims = [] if all_of_it else self.claims[1:]

    @precondition(lambda self: self.ready)
    @rule(now=st.sampled_from([False, False, False, True]))
    def clear(self, now: bool) -> None:
        if not now:
            return
        self.ghosts += self.loading.items()
        self.ghost_pins += [(key, self.ready[key]) for key in self.pins]
        for claims in self.claims:
            self.coordinator.settle(claims)
        self.namespace = next(self.namespaces)
        self.coordinator.clear(self.namespace)
        for forgotten in (self.loading, self.ready, self.stored, self.fates, self.pins, self.claims):
            forgotten.clear()

    @precondition(lambda self: self.ghosts or self.ghost_pins)
    @rule(good=st.booleans())
    def end_what_was_forgotten(self, good: bool) -> None:
        for key, slot in self.ghosts:
            store = self.coordinator.store_of(key)
            if good:
                store.commit(key.group, slot)
                store.unpin(key.group, slot)
            else:
                store.unpin(key.group, slot)
                store.abort(key, slot, "failed")
                self.fates[key.group, key.prefix] = "failed"
        for key, slot in self.ghost_pins:
            self.coordinator.store_of(key).unpin(key.group, slot)
        self.ghosts, self.ghost_pins = [], []
        self._notice_evictions()

    # -- what holds -----------------------------------------------------------------------------------------------

    def _prompt(self, data: st.DataObject) -> Prompt:
        prompt: Prompt = data.draw(st.sampled_from(self.prompts))
        return prompt

    def _given(self, prompt: Prompt) -> Given:
        """What the model knows of a prompt's units."""
        known: dict[tuple[int, bytes], Presence] = dict.fromkeys(self.stored, Presence.STORED)
        known |= {(key.group, key.prefix): Presence.PENDING for key in self.loading}
        known |= {(key.group, key.prefix): Presence.READY for key in self.ready}
        return Given({at: known[named] for at, named in self._units(prompt) if named in known})

    def _fate_of(self, prompt: Prompt) -> Callable[[int, int], str | None]:
        return lambda group, end: self.fates.get((group, prompt.prefix(end)))

    def _units(self, prompt: Prompt) -> Iterator[tuple[tuple[int, int], tuple[int, bytes]]]:
        for row in self.rows:
            for end in range(row.block_tokens, prompt.hashed_tokens + 1, row.block_tokens):
                yield (row.group, end), (row.group, prompt.prefix(end))

    @invariant()
    def every_answer_is_the_oracles(self) -> None:
        for prompt in self.prompts:
            given = self._given(prompt)
            hit = self.coordinator.lookup(prompt)
            assert self.coordinator.lookup(prompt) == hit  # and changed nothing
            check(prompt, self.rows, given, hit, self._fate_of(prompt))
            if hit.resume_tokens > prompt.local_tokens:
                for key, column in self.coordinator.needed(prompt, hit.resume_tokens):
                    assert self.coordinator.store_of(key).slot(key) == self.ready[key], (key, column)
            together = [
                end
                for end in range(self.grid, prompt.hashed_tokens + 1, self.grid)
                if self.snapshots and all(given.at.get((row.group, end), 0) for row in self.snapshots)
            ]
            assert state_positions(self.coordinator, prompt, self.grid) == together
            junction = hit.chain_tokens if self.snapshots and hit.lost and "late" not in hit.lost else 0
            assert self.coordinator.junction(hit) == junction

    @invariant()
    def pins_are_those_of_requests_and_copies(self) -> None:
        in_use = [(key, self.ready[key]) for key in self.pins] + [*self.loading.items()]
        in_use += self.ghosts + self.ghost_pins  # a slot stays its user's until the user is done
        for store in (self.blocks, self.states):
            arenas = {group: i for i, arena in enumerate(store.arenas) for group in arena.plan.groups}
            held = {(arenas[key.group], slot) for key, slot in in_use if self.coordinator.store_of(key) is store}
            assert store.pinned_slots == len(held)

    def teardown(self) -> None:
        if not hasattr(self, "coordinator"):
            return
        self.end_what_was_forgotten(good=True)
        self.end_requests(all_of_it=True)
        for key, slot in self.loading.items():
            self.coordinator.store_of(key).unpin(key.group, slot)
            self.coordinator.store_of(key).abort(key, slot, "failed")
        assert self.blocks.pinned_slots == self.states.pinned_slots == 0
        self.coordinator.clear(next(self.namespaces))
        for store in (self.blocks, self.states):
            assert store.free_slots == sum(arena.plan.slots for arena in store.arenas)


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@settings(max_examples=2250, deadline=None)
@given(st.sampled_from(SIZES), st.integers(1, 3), st.data())
def test_no_state_answers_for_another_prefix(sizes: tuple[int, ...], kinds: int, data: st.DataObject) -> None:
    """Position right, content wrong (S1 4.3): whose state it is, is told here by the texts themselves, by no hash."""
    groups = [("FullAttentionSpec", sizes[0]), *(("MambaSpec", sizes[-1 - i % len(sizes)]) for i in range(kinds))]
    layout = Layout(tuple(groups), 1, block_slots=200, state_slots=200, spread=1)
    rows = layout.rows()
    blocks, states = layout.stores(rows, NAMESPACES[0])
    coordinator = Coordinator(rows, blocks, states, None)
    grid = coordinator.grid_tokens
    texts = data.draw(forests(min(3 * grid // UNIT, 130)))
    kept: set[tuple[int, tuple[int, ...]]] = set()  # (group, text up to the state)
    for text in texts:
        prompt = prompt_of(text)
        keys: list[UnitKey] = [key for key, _ in coordinator.missing_blocks(prompt, rows[0], 0, prompt.num_tokens)[0]]
        for position, mask in enumerate(data.draw(st.binary(min_size=3, max_size=3)), 1):
            for key, _ in coordinator.missing_states(prompt, position * grid):
                if mask >> key.group & 1:  # of some groups, of none, of all
                    keys.append(key)
                    kept.add((key.group, text[: position * grid // UNIT]))
        for key in keys:
            store = coordinator.store_of(key)
            slots = store.reserve([key])
            assert slots is not None
            store.commit(key.group, slots[0])
    for text in texts:
        served = [
            end
            for end in range(grid, UNIT * len(text) + 1, grid)
            if all((row.group, text[: end // UNIT]) in kept for row in rows[1:])
        ]
        assert state_positions(coordinator, prompt_of(text), grid) == served
        assert coordinator.lookup(prompt_of(text)).resume_tokens == max(served, default=0)


def test_a_state_in_use_outlives_its_siblings() -> None:
    """The states of a prefix leave together, but not one that is still read: what it is a part of is not promised."""
    layout = Layout((("FullAttentionSpec", 4), ("MambaSpec", 4), ("MambaSpec", 4)), 1, 8, 2, spread=1)
    rows = layout.rows()
    blocks, states = layout.stores(rows, NAMESPACES[0])
    coordinator = Coordinator(rows, blocks, states, None)
    prompt = prompt_of([1, 2])
    units = [*coordinator.missing_blocks(prompt, rows[0], 0, 8)[0], *coordinator.missing_states(prompt, 8)]
    for key, _ in units:
        store = coordinator.store_of(key)
        (reserved,) = store.reserve([key]) or [-1]
        store.commit(key.group, reserved)
    coordinator.keep(prompt, 8, Trigger.PROMPT_END)
    assert coordinator.lookup(prompt).resume_tokens == 8
    (read, slot), (other, _) = [(key, states.slot(key)) for key, _ in units[-2:]]
    assert slot is not None
    states.pin(read.group, slot)
    # More states of others than there is room for.
    assert states.free_slots == 2
    for i in range(8):
        more = [key for key, _ in coordinator.missing_states(prompt_of([i], salt=b"other"), 4)][:1]
        (at,) = states.reserve(more) or [-1]
        states.commit(more[0].group, at)
        states.revalue(more[0].prefix, 1e9)
    assert (states.slot(read), states.slot(other)) == (slot, None)
    assert coordinator.lookup(prompt).resume_tokens == 0
    states.unpin(read.group, slot)
