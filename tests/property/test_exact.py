"""Positions off the grid: the coordinator against the oracle, for p from the cap down, if every row accepts p, p."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from math import lcm

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.property.test_resolve_hit import FULL, LATENT, SIZES, STATE, WINDOW
from ucmcache.coordinator.binding import BoundRow
from ucmcache.coordinator.coordinator import Coordinator
from ucmcache.coordinator.directory import CheckpointDirectory
from ucmcache.coordinator.hit import Prompt
from ucmcache.coordinator.spec import Kind
from ucmcache.keys import BlockKey, UnitKey, exact_group, exact_parts, exact_seed, parent_head, physical_id
from ucmcache.store.arena import ArenaPlan, Presence
from ucmcache.store.block import BlockStore
from ucmcache.store.snapshot import SnapshotStore

NAMESPACE = b"a name of 16 b.."
HERE = {Presence.PENDING, Presence.READY}


def prompt_of(tokens: str, unit: int, local: int = 0, only_last: bool = False, salt: str = "") -> Prompt:
    """A prompt of one-letter tokens; all that is hashed of it is the text up to where the hash ends."""
    hashes = [sha256((salt + tokens[: i + unit]).encode()).digest() for i in range(0, len(tokens) - unit + 1, unit)]
    return Prompt(
        len(tokens),
        hashes,
        unit,
        local,
        only_last,
        tail=lambda start, end: (salt * (start == 0) + "|" + tokens[start:end]).encode(),
    )


def coordinator_of(rows: Sequence[BoundRow]) -> Coordinator:
    chains = [row for row in rows if row.kind is Kind.CHAIN]
    seeds = {row.group: row.seed for row in rows} | {exact_group(row.group): exact_seed(row.seed) for row in rows}
    states = tuple(row.group for row in rows if row.kind is Kind.SNAPSHOT)
    exact = tuple(exact_group(row.group) for row in rows)
    blocks = BlockStore([ArenaPlan(1, 4096, tuple(row.group for row in chains))] if chains else [], seeds, NAMESPACE)
    return Coordinator(rows, blocks, SnapshotStore([ArenaPlan(1, 4096, (*states, *exact))], seeds, NAMESPACE), None)


def put(coordinator: Coordinator, key: UnitKey, presence: Presence, seeds: Mapping[int, bytes]) -> None:
    store = coordinator.store_of(key)
    if presence in HERE:
        slots = store.reserve([key])
        assert slots is not None
        if presence is Presence.READY:
            store.commit(key.group, slots[0])
    elif presence is Presence.STORED:
        store.add_stored([physical_id(NAMESPACE, seeds[key.group], key.prefix)])


def units_at(rows: Sequence[BoundRow], prompt: Prompt, p: int) -> list[tuple[str, int, int]]:
    """By the rule's words, what a resume at p takes: (what, group, where it ends)."""
    on_grid = p % lcm(*(row.block_tokens for row in rows)) == 0
    units = []
    for row in rows:
        if row.kind is Kind.SNAPSHOT:
            units.append(("state" if on_grid else "exact", row.group, p))
            continue
        size = row.block_tokens
        first = max(p - row.figures["sliding_window"] + 1, 0) if row.spec is WINDOW else 0
        ends = range(size, p + 1, size)
        units += [("block", row.group, end) for end in ends if end > first and end > prompt.local_tokens]
        if p % size:
            units.append(("exact", row.group, p))
    return units


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[BoundRow], Prompt, dict[tuple[str, int, int], Presence]]:
    unit = draw(st.sampled_from([2, 4, 16]))
    rows = []
    for group in range(draw(st.integers(1, 3))):
        spec = draw(st.sampled_from([FULL, STATE, WINDOW, LATENT]))
        figures = {name: draw(st.integers(1, 20)) * (name == "sliding_window") for name in spec.figures}
        rows.append(BoundRow(group, spec, draw(st.sampled_from(SIZES[unit])), figures, bytes([group]) * 16))
    tokens = "".join(draw(st.lists(st.sampled_from("ab"), min_size=2, max_size=100)))
    grid = lcm(*(row.block_tokens for row in rows))
    local = draw(st.integers(0, (len(tokens) - 1) // grid)) * grid
    prompt = prompt_of(tokens, unit, local, draw(st.sampled_from([False] * 5 + [True])))
    presences = st.sampled_from([Presence.READY] * 6 + [Presence.PENDING, Presence.STORED, Presence.ABSENT])
    at = {}
    for p in draw(st.sets(st.integers(1, len(tokens)), max_size=6)):
        for what in units_at(rows, replace(prompt, local_tokens=0), p):
            at[what] = draw(presences)
    return rows, prompt, at


@settings(max_examples=600, deadline=None)
@given(cases())
def test_a_hit_is_the_deepest_position_that_every_row_accepts(
    case: tuple[list[BoundRow], Prompt, dict[tuple[str, int, int], Presence]],
) -> None:
    rows, prompt, at = case
    coordinator = coordinator_of(rows)
    seeds = {row.group: row.seed for row in rows} | {exact_group(row.group): exact_seed(row.seed) for row in rows}
    whole = replace(prompt, local_tokens=0)
    grid = coordinator.grid_tokens
    keys: dict[tuple[str, int, int], UnitKey] = {}
    for what in at:
        kind, group, end = what
        if kind == "block":
            keys[what] = BlockKey(group, whole.prefix(end), end)
        else:
            wanted = exact_group(group) if kind == "exact" else group
            keys[what] = next(unit.key for unit in coordinator.needed(whole, end) if unit.key.group == wanted)
        if kind != "state" or end % prompt.hash_block_tokens == 0:
            put(coordinator, keys[what], at[what], seeds)

    def deepest(least: Presence) -> int:
        for p in range(prompt.num_tokens - 1, prompt.local_tokens, -1):
            hashed = p % grid or p <= prompt.hashed_tokens
            if not hashed or (prompt.only_last and p != prompt.num_tokens - 1):
                continue
            if all(at.get(unit, Presence.ABSENT) >= least for unit in units_at(rows, prompt, p)):
                return p
        return prompt.local_tokens

    hit = coordinator.lookup(prompt)
    assert hit.resume_tokens == deepest(Presence.READY)
    assert hit.reachable_tokens == deepest(Presence.PENDING)
    assert hit.chain_tokens >= hit.reachable_tokens >= hit.resume_tokens
    assert sum(hit.lost.values()) == hit.chain_tokens - hit.resume_tokens
    assert all(tokens > 0 for tokens in hit.lost.values())
    assert (hit.limited_by is None) <= (set(hit.lost) <= {"late"})
    if hit.resume_tokens > prompt.local_tokens:
        listed = {(unit.key, unit.column) for unit in coordinator.needed(prompt, hit.resume_tokens)}
        expected = {
            (keys[what], (what[2] - 1) // rows[what[1]].block_tokens)
            for what in units_at(rows, prompt, hit.resume_tokens)
        }
        assert {(key.group, key.prefix, column) for key, column in listed} == {
            (key.group, key.prefix, column) for key, column in expected
        }


TEXT = st.text("ab", min_size=2, max_size=12)


@settings(max_examples=300, deadline=None)
@given(st.sets(st.tuples(TEXT, st.sampled_from(["", "x"])), max_size=12), TEXT, st.sampled_from(["", "x"]))
def test_the_directory_finds_what_a_prompt_continues_and_nothing_else(
    kept: set[tuple[str, str]], text: str, salt: str
) -> None:
    directory = CheckpointDirectory()
    prefixes = {one: prompt_of(one[0], 4, salt=one[1]).exact_prefix(len(one[0])) for one in kept}
    for number, prefix in enumerate(prefixes.values()):
        directory.add(prefix if number % 2 else prefix[:10].rstrip(b"\0"))
    prompt = prompt_of(text + "c", 4, salt=salt)
    expected = sorted((len(one), prefixes[one, its]) for one, its in kept if text.startswith(one) and its == salt)
    assert list(directory.positions(prompt, 0)) == expected[::-1]
    for prefix in prefixes.values():
        directory.discard(prefix)
    assert not len(directory) and not list(directory.positions(prompt, 0))


@given(st.binary(max_size=32), st.binary(max_size=20), st.integers(1, 1024))
def test_an_exact_prefix_tells_its_parent_and_its_length(parent: bytes, tail: bytes, tail_tokens: int) -> None:
    prefix = Prompt(tail_tokens, [], tail_tokens, tail=lambda start, end: tail).exact_prefix(tail_tokens)
    assert len(prefix) == 32 and exact_parts(prefix) == (parent_head(b""), tail_tokens)


def test_what_the_tail_is_made_of_cannot_be_mistaken_for_its_parent() -> None:
    from ucmcache.keys import exact_prefix

    assert exact_prefix(b"ab", b"cd", 4) != exact_prefix(b"abc", b"d", 4)
    assert exact_prefix(b"ab", b"cd", 4) != exact_prefix(b"ab", b"cd", 5)
