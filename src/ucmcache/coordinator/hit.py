"""resolve_hit: the deepest token at which every kind of state is present."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ucmcache.coordinator.binding import BoundRow
from ucmcache.coordinator.spec import Kind, Tokens
from ucmcache.keys import exact_prefix
from ucmcache.store.arena import Presence

Codes = NDArray[np.uint8]

# How much the first look takes, and how many times more each later one: most lookups end near where they began, and
# those that do not should not take many.
_FIRST_BLOCKS, _FIRST_CANDIDATES, _GROWTH = 256, 64, 4


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the engine knows of a request's tokens.

    `hashes[i]` is the engine's hash of the first (i+1) * hash_block_tokens tokens; it covers LoRA, multimodal content
    and cache salt. `tail(start, end)` covers the same for the tokens in between, or is None where nothing does.
    """

    num_tokens: int
    hashes: Sequence[bytes]
    hash_block_tokens: int
    local_tokens: int = 0  # already computed in the engine, in every group
    only_last: bool = False  # the engine cannot continue a prefill from cached context (requirements C7)
    tail: Callable[[int, int], bytes | None] = lambda start, end: None

    @property
    def hashed_tokens(self) -> int:
        """Tokens that the hashes cover."""
        return len(self.hashes) * self.hash_block_tokens

    def prefix(self, tokens: int) -> bytes:
        """Hash of the first `tokens` tokens, a positive multiple of hash_block_tokens; b"" for none."""
        return self.hashes[tokens // self.hash_block_tokens - 1] if tokens else b""

    def prefixes(self, start_tokens: int, end_tokens: int, step_tokens: int) -> Sequence[bytes]:
        """Hashes at start + step, start + 2 * step, ..., up to end; all multiples of hash_block_tokens."""
        unit = self.hash_block_tokens
        return self.hashes[(start_tokens + step_tokens) // unit - 1 : end_tokens // unit : step_tokens // unit]

    def exact_prefix(self, tokens: int) -> bytes:
        """What stands for the first `tokens` tokens (at least 1) where the grid does not reach; b"" if nothing can.

        Guaranteed by the caller: the last multiple of hash_block_tokens before is hashed.
        """
        start = (tokens - 1) // self.hash_block_tokens * self.hash_block_tokens
        tail = self.tail(start, tokens)
        return b"" if tail is None else exact_prefix(self.prefix(start), tail, tokens - start)


class PresenceOf(Protocol):
    """What a store answers: one presence code per group (rows) and prefix (columns)."""

    def presences(self, groups: Sequence[int], prefixes: Sequence[bytes]) -> Codes: ...
    def fate(self, group: int, prefix: bytes) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Hit:
    """Where a prefix can be resumed, and what was lost on the way."""

    resume_tokens: int  # p*: every voting group can resume here, from host memory; <= num_tokens - 1
    chain_tokens: int  # l: what the chain groups alone agree on, floored to the common grid
    limited_by: str | None  # the row that set resume_tokens
    reachable_tokens: int  # p* if everything that the backend holds were in host memory
    lost: Mapping[str, int] = field(default_factory=dict)  # chain_tokens - resume_tokens, by cause

    @property
    def pending(self) -> bool:
        """Needed bytes are still on their way."""
        return self.reachable_tokens > self.resume_tokens


def grid_tokens(rows: Sequence[BoundRow]) -> int:
    """Least common multiple of the voting rows' block sizes: resume positions are multiples of it."""
    return lcm(*(row.block_tokens for row in rows if row.kind is not Kind.NONE))


class _Ends(NamedTuple):
    """Up to which position a row that needs its whole chain has it."""

    reachable_tokens: int  # somewhere
    ready_tokens: int  # in host memory


def resolve_hit(prompt: Prompt, rows: Sequence[BoundRow], blocks: PresenceOf, states: PresenceOf) -> Hit:
    """The deepest position in the intersection of what all voting rows can serve.

    Pure; O(blocks), hashes nothing. Positions at or below `prompt.local_tokens` are the engine's own and never returned
    as a resume (resume_tokens is then local_tokens). Equal by definition to: for p from the cap down, if every row
    accepts p, p. Source: requirements C1-C3; S1's "minimum of each group's deepest" is unsound and not used.
    """
    voting = [row for row in rows if row.kind is not Kind.NONE]
    local = prompt.local_tokens
    candidates = _candidates(prompt, grid_tokens(voting)) if voting else range(0)
    if not candidates:
        return Hit(local, local, None, local)
    # What needs its whole chain rules out all positions beyond its first gap: nothing else is asked about those.
    ends = _whole_chains(prompt, voting, candidates, blocks)
    candidates = _up_to(candidates, min((end.reachable_tokens for end in ends.values()), default=prompt.num_tokens))
    ready_tokens = min((end.ready_tokens for end in ends.values()), default=prompt.num_tokens)
    windows = [row for row in voting if row.kind is Kind.CHAIN and row.group not in ends]
    snapshots = [row for row in voting if row.kind is Kind.SNAPSHOT]
    # From the deepest position down, until one is found that is ready; no position is 0.
    chain_tokens = reachable_tokens = resume_tokens = 0
    count = _FIRST_CANDIDATES
    while candidates and not resume_tokens:
        candidates, asked = candidates[:-count], _positions(candidates[-count:])
        count *= _GROWTH
        codes = np.where(asked <= ready_tokens, Presence.READY, Presence.PENDING).astype(np.uint8)
        for same_size in _by_size(windows):
            codes = np.minimum(codes, _window_codes(prompt, same_size, asked, blocks).min(axis=0))
        chain_tokens = chain_tokens or _deepest(asked, codes != Presence.ABSENT)
        if snapshots and codes.any():
            codes = np.minimum(codes, _state_codes(prompt, snapshots, asked, states).min(axis=0))
        reachable_tokens = reachable_tokens or _deepest(asked, codes != Presence.ABSENT)
        resume_tokens = _deepest(asked, codes == Presence.READY)
        if reachable_tokens:
            candidates = _up_to(candidates, ready_tokens)
    resume_tokens, chain_tokens = resume_tokens or local, chain_tokens or local
    if chain_tokens == resume_tokens:
        return Hit(resume_tokens, chain_tokens, None, resume_tokens)
    limited_by, cause = _limit(prompt, voting, ends, chain_tokens, blocks, states)
    lost = {cause: chain_tokens - resume_tokens}
    return Hit(resume_tokens, chain_tokens, limited_by, reachable_tokens or local, lost)


def _candidates(prompt: Prompt, grid: int) -> range:
    """Grid positions above what is local and at most num_tokens - 1, ascending."""
    top = min(prompt.num_tokens - 1, prompt.hashed_tokens)
    if prompt.only_last:
        last = prompt.num_tokens - 1
        fits = last == top and last % grid == 0 and last > prompt.local_tokens
        return range(last, last + 1) if fits else range(0)
    return range(prompt.local_tokens // grid * grid + grid, top + 1, grid)


def _up_to(candidates: range, tokens: int) -> range:
    return candidates[: bisect_right(candidates, tokens)]


def _positions(candidates: range) -> Tokens:
    return np.arange(candidates.start, candidates.stop, candidates.step, dtype=np.int64)


def _deepest(positions: Tokens, accepted: NDArray[np.bool_]) -> int:
    """The deepest accepted position, or 0."""
    hits = np.flatnonzero(accepted)
    return int(positions[hits[-1]]) if hits.size else 0


def _by_size(rows: Iterable[BoundRow]) -> list[list[BoundRow]]:
    """Rows with equal block sizes together: they are asked about the same prefixes."""
    by_size: dict[int, list[BoundRow]] = {}
    for row in rows:
        by_size.setdefault(row.block_tokens, []).append(row)
    return list(by_size.values())


def _whole_chains(
    prompt: Prompt, voting: Sequence[BoundRow], candidates: range, blocks: PresenceOf
) -> dict[int, _Ends]:
    """Group -> where its chain ends, for every chain row that needs all blocks that are not local, at any position."""
    deepest, every = _positions(candidates[-1:]), _positions(candidates)

    def needs_all(row: BoundRow) -> bool:
        local = prompt.local_tokens // row.block_tokens
        # Most that do not need all show it at the deepest position.
        return all(bool((row.first_needed(at) // row.block_tokens <= local).all()) for at in (deepest, every))

    whole = [row for row in voting if row.kind is Kind.CHAIN and needs_all(row)]
    ends: dict[int, _Ends] = {}
    for same_size in _by_size(whole):
        ends.update(_chain_ends(prompt, same_size, blocks))
    return ends


def _chain_ends(prompt: Prompt, rows: Sequence[BoundRow], blocks: PresenceOf) -> dict[int, _Ends]:
    """Group -> where its chain ends, exact up to the first of them; all rows have the same block size."""
    size = rows[0].block_tokens
    first = prompt.local_tokens // size
    total = prompt.hashed_tokens // size - first
    groups = [row.group for row in rows]
    # A row with lookahead may still end before a gap of another row that comes a little earlier than its own.
    ahead = max(row.lookahead_blocks for row in rows)
    gap, read, count = total, 0, _FIRST_BLOCKS
    reached, ready = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    while read < min(total, gap + ahead):
        upto = min(read + count, total)
        codes = blocks.presences(groups, prompt.prefixes((first + read) * size, (first + upto) * size, size))
        for lengths, here in ((reached, codes != Presence.ABSENT), (ready, codes == Presence.READY)):
            lengths[lengths == read] += _leading(here)[lengths == read]
        read, count = upto, count * _GROWTH
        if reached.min() < read:
            gap = int(reached.min())
    return {
        row.group: _Ends(*(int(first + length - row.lookahead_blocks) * size for length in lengths))
        for row, *lengths in zip(rows, reached, ready, strict=True)
    }


def _leading(here: NDArray[np.bool_]) -> Tokens:
    """How many flags of each row are set before its first that is not."""
    return np.where(here.all(axis=1), here.shape[1], here.argmin(axis=1))


def _window_codes(prompt: Prompt, rows: Sequence[BoundRow], positions: Tokens, blocks: PresenceOf) -> Codes:
    """READY, PENDING (all somewhere) or ABSENT for what each row needs at each position; rows of one block size."""
    size = rows[0].block_tokens
    local, last = prompt.local_tokens // size, prompt.hashed_tokens // size
    spans = [
        (np.maximum(row.first_needed(positions) // size, local), positions // size + row.lookahead_blocks)
        for row in rows
    ]
    first = min(int(starts.min()) for starts, _ in spans)
    upto = min(max(int(ends.max()) for _, ends in spans), last)
    present = blocks.presences([row.group for row in rows], prompt.prefixes(first * size, upto * size, size))
    needs = np.empty((len(rows), positions.size), np.uint8)
    for codes, need, (starts, ends) in zip(present, needs, spans, strict=True):
        within = np.minimum(ends, upto) - first
        need[:] = Presence.ABSENT
        for level, here in ((Presence.PENDING, codes != Presence.ABSENT), (Presence.READY, codes == Presence.READY)):
            missing = np.concatenate(([0], np.cumsum(~here)))
            need[(ends <= last) & (missing[within] == missing[np.minimum(starts - first, within)])] = level
    return needs


def _state_codes(prompt: Prompt, rows: Sequence[BoundRow], positions: Tokens, states: PresenceOf) -> Codes:
    """Presence of each row's state at each of `positions`, which are equally far apart."""
    step = int(positions[1] - positions[0]) if positions.size > 1 else int(positions[0])
    prefixes = prompt.prefixes(int(positions[0]) - step, int(positions[-1]), step)
    return states.presences([row.group for row in rows], prefixes)


def _limit(
    prompt: Prompt,
    voting: Sequence[BoundRow],
    ends: Mapping[int, _Ends],
    chain_tokens: int,
    blocks: PresenceOf,
    states: PresenceOf,
) -> tuple[str, str]:
    """The row that keeps the resume from the deepest position that the chains agree on, and why it does."""
    at = np.array([chain_tokens])
    behind: list[BoundRow] = []
    for row in (row for row in voting if row.kind is Kind.CHAIN):
        if row.group in ends:
            ready = chain_tokens <= ends[row.group].ready_tokens
        else:
            ready = _window_codes(prompt, [row], at, blocks)[0, 0] == Presence.READY
        behind += [] if ready else [row]
    prefix = prompt.prefix(chain_tokens)
    for row in (row for row in voting if row.kind is Kind.SNAPSHOT):
        code = states.presences([row.group], [prefix])[0, 0]
        # A state that is nowhere keeps it from there for good; all else is only not here in time.
        if code == Presence.ABSENT:
            return row.name, states.fate(row.group, prefix) or "not_offered"
        behind += [] if code == Presence.READY else [row]
    return behind[0].name, "late"
