"""resolve_hit against the four-line oracle: for p from the cap down, if every row accepts p, return p."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import lcm

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ucmcache.coordinator.binding import BoundRow
from ucmcache.coordinator.coordinator import Coordinator
from ucmcache.coordinator.hit import Hit, Prompt, resolve_hit
from ucmcache.coordinator.spec import SPEC_TABLE, Kind, RankRule
from ucmcache.store.arena import ArenaPlan, Presence
from ucmcache.store.block import BlockStore
from ucmcache.store.snapshot import SnapshotStore

FULL, LATENT, WINDOW, LATENT_WINDOW, CHUNK, STATE, SCRATCH = (
    SPEC_TABLE[name]
    for name in (
        "FullAttentionSpec",
        "MLAAttentionSpec",
        "SlidingWindowSpec",
        "SlidingWindowMLASpec",
        "ChunkedLocalAttentionSpec",
        "MambaSpec",
        "CircularBufferSpec",
    )
)
# Tokens of a hash -> block sizes that it divides; their common grid is up to 240 tokens.
SIZES = {1: (1, 2, 3, 5), 2: (2, 4, 6, 10), 4: (12, 16, 20), 16: (16, 32, 48)}
FATES = (None, "evicted", "refused", "failed", "never_saved")


@dataclass
class Given:
    """Presence by group and position of the unit's end, for one prompt whose prefix hash is its length."""

    at: dict[tuple[int, int], Presence] = field(default_factory=dict)
    fates: dict[tuple[int, int], str | None] = field(default_factory=dict)

    def presences(self, groups: Sequence[int], prefixes: Sequence[bytes]) -> NDArray[np.uint8]:
        codes = [[self.at.get((group, int(prefix)), 0) for prefix in prefixes] for group in groups]
        return np.array(codes, dtype=np.uint8).reshape(len(groups), len(prefixes))

    def fate(self, group: int, prefix: bytes) -> str | None:
        return self.fates.get((group, int(prefix)))


def row(group: int, spec_name: str, block_tokens: int, lookahead: int = 0, **figures: int) -> BoundRow:
    return BoundRow(group, SPEC_TABLE[spec_name], block_tokens, figures, bytes([group]) * 16, lookahead)


def prompt(num_tokens: int, unit: int = 1, local: int = 0, only_last: bool = False, unhashed: int = 0) -> Prompt:
    hashes = [b"%d" % (i * unit + unit) for i in range(num_tokens // unit - unhashed)]
    return Prompt(num_tokens, hashes, unit, local, only_last)


def accepts(row: BoundRow, p: int, given: Given, local: int, hashed: int, level: Presence) -> bool:
    """By the rule's words: what a resume at p needs of this row, one unit at a time."""
    size = row.block_tokens
    if row.kind is Kind.SNAPSHOT:
        return given.at.get((row.group, p), 0) >= level
    if row.spec in (WINDOW, LATENT_WINDOW):
        first = max(p - row.figures["sliding_window"] + 1 - row.figures["extra_retained_tokens"], 0)
    elif row.spec is CHUNK:
        first = p - p % row.figures["attention_chunk_size"]
    else:
        first = 0
    needed = [end for end in range(size, p + size, size) if end > first and end > local and end <= p]
    needed += [p + size * (i + 1) for i in range(row.lookahead_blocks)]
    return all(end <= hashed and given.at.get((row.group, end), 0) >= level for end in needed)


def oracle(p: Prompt, rows: Sequence[BoundRow], given: Given, level: Presence, kinds: Sequence[Kind]) -> int:
    voting = [r for r in rows if r.kind is not Kind.NONE]
    grid = lcm(*(r.block_tokens for r in voting))
    cap = min(p.num_tokens - 1, p.hashed_tokens)
    for position in range(cap // grid * grid if voting else 0, p.local_tokens, -grid):
        if p.only_last and position != p.num_tokens - 1:
            continue
        if all(accepts(r, position, given, p.local_tokens, p.hashed_tokens, level) for r in voting if r.kind in kinds):
            return position
    return p.local_tokens


def loss(
    p: Prompt, rows: Sequence[BoundRow], given: Given, chain_tokens: int, fate: Callable[[int, int], str | None]
) -> tuple[str, str]:
    """Who keeps a prompt from the position that its chains agree on, and why, by the rule's words."""
    absent = [r for r in rows if r.kind is Kind.SNAPSHOT and not given.at.get((r.group, chain_tokens), 0)]
    if absent:
        return absent[0].name, fate(absent[0].group, chain_tokens) or "not_offered"
    late = [
        r
        for kind in (Kind.CHAIN, Kind.SNAPSHOT)
        for r in rows
        if r.kind is kind and not accepts(r, chain_tokens, given, p.local_tokens, p.hashed_tokens, Presence.READY)
    ]
    return late[0].name, "late"


def check(p: Prompt, rows: Sequence[BoundRow], given: Given, hit: Hit, fate: Callable[[int, int], str | None]) -> None:
    """A hit is what the oracle says, in all its parts."""
    everything = (Kind.CHAIN, Kind.SNAPSHOT)
    assert hit.resume_tokens == oracle(p, rows, given, Presence.READY, everything)
    assert hit.reachable_tokens == oracle(p, rows, given, Presence.PENDING, everything)
    assert hit.chain_tokens == oracle(p, rows, given, Presence.PENDING, (Kind.CHAIN,))
    assert p.local_tokens <= hit.resume_tokens <= hit.reachable_tokens <= hit.chain_tokens
    assert hit.resume_tokens <= max(p.num_tokens - 1, p.local_tokens)
    assert hit.pending == (hit.reachable_tokens > hit.resume_tokens)
    if hit.chain_tokens == hit.resume_tokens:
        assert (hit.limited_by, dict(hit.lost)) == (None, {})
    else:
        limited_by, cause = loss(p, rows, given, hit.chain_tokens, fate)
        assert (hit.limited_by, dict(hit.lost)) == (limited_by, {cause: hit.chain_tokens - hit.resume_tokens})


@st.composite
def bound_rows(draw: st.DrawFn, sizes: Sequence[int], most: int = 4) -> list[BoundRow]:
    """Random groups: any kind, size, window, chunk, rank rule, and a drafter's lookahead."""
    rows: list[BoundRow] = []
    for group in range(draw(st.integers(1, most))):
        spec = draw(st.sampled_from([FULL, STATE, WINDOW, STATE, CHUNK, LATENT, LATENT_WINDOW, SCRATCH]))
        figures = {name: draw(st.integers(0 if name.startswith("extra") else 1, 30)) for name in spec.figures}
        lookahead = draw(st.sampled_from([0, 0, 0, 1])) if spec.kind is Kind.CHAIN else 0
        rule, shards = draw(st.sampled_from([(spec.rank_rule, None), (RankRule.INTERSECTION, 1), (RankRule.UNION, 2)]))
        size = draw(st.sampled_from(sizes))
        rows.append(BoundRow(group, spec, size, figures, bytes([group]) * 16, lookahead, rule, shards))
    return rows


@st.composite
def cases(draw: st.DrawFn) -> tuple[Prompt, list[BoundRow], Given]:
    unit = draw(st.sampled_from(list(SIZES)))
    rows = draw(bound_rows(SIZES[unit]))
    grid = lcm(*(r.block_tokens for r in rows))
    num_tokens = max(draw(st.integers(0, 4 if grid > 100 else 6)) * grid + draw(st.integers(-1, unit + 1)), 1)
    # Where the engine's own cache ends, on the grid or not; the last hashes may not be known yet.
    local = min(draw(st.sampled_from([0, 0, 0, unit, grid, grid + unit, 2 * grid])), num_tokens - 1)
    unhashed = min(draw(st.sampled_from([0, 0, 0, 1, 2])), num_tokens // unit)
    p = prompt(num_tokens, unit, local, draw(st.sampled_from([False, False, False, True])), unhashed)
    # A byte for each unit, below the first bound in host memory, below the second somewhere; states are fewer.
    bounds = {
        Kind.CHAIN: draw(st.sampled_from([(255, 256), (252, 255), (240, 250), (200, 250), (256, 256)])),
        Kind.SNAPSHOT: draw(st.sampled_from([(40, 60), (128, 160), (230, 250)])),
        Kind.NONE: (128, 128),
    }
    ends = [(r, end) for r in rows for end in range(r.block_tokens, num_tokens + 1, r.block_tokens)]
    given_ = Given()
    for (r, end), drawn in zip(ends, draw(st.binary(min_size=len(ends), max_size=len(ends))), strict=True):
        ready_below, somewhere_below = bounds[r.kind]
        # Zeros are drawn often, and are not to mean a state everywhere.
        byte = (drawn + 89 * end // r.block_tokens) % 256 if r.kind is Kind.SNAPSHOT else drawn
        if byte < somewhere_below:
            here = byte < ready_below
            given_.at[r.group, end] = Presence.READY if here else (Presence.PENDING, Presence.STORED)[byte % 2]
        else:
            given_.fates[r.group, end] = FATES[byte % len(FATES)]
    return p, rows, given_


@settings(max_examples=8_000, deadline=None)
@given(cases())
def test_equals_the_oracle(case: tuple[Prompt, list[BoundRow], Given]) -> None:
    p, rows, given_ = case
    check(p, rows, given_, resolve_hit(p, rows, given_, given_), lambda group, end: given_.fates.get((group, end)))


@settings(max_examples=1500, deadline=None)
@given(cases())
def test_needed_is_all_and_only_what_a_promise_needs(case: tuple[Prompt, list[BoundRow], Given]) -> None:
    p, rows, given_ = case
    hit = resolve_hit(p, rows, given_, given_)
    if hit.resume_tokens == p.local_tokens:
        return
    seeds = {r.group: r.seed for r in rows}
    plans = [ArenaPlan(1, 1, (r.group,)) for r in rows]
    coordinator = Coordinator(rows, BlockStore(plans, seeds, b"n" * 16), SnapshotStore(plans, seeds, b"n" * 16), None)
    units = coordinator.needed(p, hit.resume_tokens)
    assert all(given_.at[key.group, key.depth_tokens] == Presence.READY for key, _ in units)
    assert all(key.depth_tokens == int(key.prefix) for key, _ in units)
    # Taking any one needed unit away makes the promise wrong.
    for key, _ in units:
        less = Given({at: code for at, code in given_.at.items() if at != (key.group, key.depth_tokens)})
        assert resolve_hit(p, rows, less, less).resume_tokens < hit.resume_tokens


def test_the_minimum_of_each_groups_deepest_is_unsound() -> None:
    """Requirements C2: states {1024, 3072} and {1024, 2048} under a chain of 4096 resume at 1024, not 2048."""
    rows = [row(0, "FullAttentionSpec", 1024), row(1, "MambaSpec", 1024), row(2, "MambaSpec", 1024)]
    given_ = Given({(0, end): Presence.READY for end in range(1024, 4097, 1024)})
    given_.at |= dict.fromkeys([(1, 1024), (1, 3072), (2, 1024), (2, 2048)], Presence.READY)
    hit = resolve_hit(prompt(5000, 1024), rows, given_, given_)
    assert (hit.resume_tokens, hit.chain_tokens) == (1024, 4096)
    assert hit.limited_by == "1:MambaSpec"
    assert hit.lost == {"not_offered": 3072}


def test_a_state_that_consumed_the_last_token_is_never_promised() -> None:
    """Field case A4: the promise for N tokens ends at floor((N-1)/16)*16."""
    rows = [row(0, "FullAttentionSpec", 16), row(1, "MambaSpec", 16)]
    for n in (15, 16, 17, 31, 32, 33):
        given_ = Given({(group, end): Presence.READY for group in (0, 1) for end in range(16, 65, 16)})
        assert resolve_hit(prompt(n, 16), rows, given_, given_).resume_tokens == (n - 1) // 16 * 16


def test_field_case_a2() -> None:
    rows = [row(0, "FullAttentionSpec", 16), row(1, "MambaSpec", 16)]
    for chain, states, expected in ((64, (16, 32), 32), (16, (48,), 0), (64, (), 0), (0, (64,), 0)):
        given_ = Given({(0, end): Presence.READY for end in range(16, chain + 1, 16)})
        given_.at |= {(1, end): Presence.READY for end in states}
        assert resolve_hit(prompt(100, 16), rows, given_, given_).resume_tokens == expected


def test_without_chunked_prefill_all_but_the_last_token_or_nothing() -> None:
    rows = [row(0, "MLAAttentionSpec", 16)]
    given_ = Given({(0, end): Presence.READY for end in range(16, 257, 16)})
    hits = {n: resolve_hit(prompt(n, 16, only_last=True), rows, given_, given_).resume_tokens for n in range(1, 200)}
    assert {n: tokens for n, tokens in hits.items() if tokens} == {n: n - 1 for n in range(17, 200, 16)}
