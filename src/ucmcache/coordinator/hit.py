"""resolve_hit: the deepest token at which every kind of state is present."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ucmcache.coordinator.spec import BoundRow, Kind, Tokens
from ucmcache.store.arena import Presence

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the engine knows of a request's tokens.

    `hashes[i]` is the engine's hash of the first (i+1) * hash_block_tokens tokens; it covers LoRA, multimodal content
    and cache salt.
    """

    num_tokens: int
    hashes: Sequence[bytes]
    hash_block_tokens: int
    local_tokens: int = 0  # already computed in the engine, in every group
    only_last: bool = False  # the engine cannot continue a prefill from cached context (requirements C7)

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


class PresenceOf(Protocol):
    """What a store answers: one presence code per prefix."""

    def presence(self, group: int, prefixes: Sequence[bytes]) -> NDArray[np.uint8]: ...
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


def resolve_hit(prompt: Prompt, rows: Sequence[BoundRow], blocks: PresenceOf, states: PresenceOf) -> Hit:
    """The deepest position in the intersection of what all voting rows can serve.

    Pure; O(blocks). Positions at or below `prompt.local_tokens` are the engine's own and never returned as a resume
    (resume_tokens is then local_tokens). Equal by definition to: for p from the cap down, if every row accepts p, p.
    Source: requirements C1-C3; S1's "minimum of each group's deepest" is unsound and not used.
    """
    voting = [row for row in rows if row.kind is not Kind.NONE]
    local = prompt.local_tokens
    candidates = _candidates(prompt, grid_tokens(voting)) if voting else np.empty(0, np.int64)
    rejects: list[tuple[BoundRow, Flags]] = []
    reachable = ready = np.ones(candidates.size, dtype=np.bool_)
    for row in (row for row in voting if row.kind is Kind.CHAIN):
        row_reachable, row_ready = _chain_accepts(prompt, row, candidates, blocks)
        reachable, ready = reachable & row_reachable, ready & row_ready
        rejects.append((row, ~row_ready))
    chain_tokens = _deepest(candidates, reachable, local)
    # What the chains rule out need not be asked of the states.
    keep = int(np.searchsorted(candidates, chain_tokens, side="right"))
    candidates, reachable, ready = candidates[:keep], reachable[:keep], ready[:keep]
    rejects = [(row, rejected[:keep]) for row, rejected in rejects]
    for row in (row for row in voting if row.kind is Kind.SNAPSHOT):
        codes = states.presence(row.group, [prompt.prefix(int(p)) for p in candidates])
        reachable, ready = reachable & (codes != Presence.ABSENT), ready & (codes == Presence.READY)
        rejects.append((row, codes != Presence.READY))
    resume_tokens = _deepest(candidates, ready, local)
    limited_by, cause = _limit(prompt, candidates, rejects, resume_tokens, states)
    return Hit(
        resume_tokens,
        chain_tokens,
        limited_by,
        _deepest(candidates, reachable, local),
        {cause: chain_tokens - resume_tokens} if chain_tokens > resume_tokens else {},
    )


def _candidates(prompt: Prompt, grid: int) -> Tokens:
    """Grid positions above what is local and at most num_tokens - 1, ascending."""
    top = min(prompt.num_tokens - 1, prompt.hashed_tokens)
    if prompt.only_last:
        last = prompt.num_tokens - 1
        fits = last == top and last % grid == 0 and last > prompt.local_tokens
        return np.array([last] if fits else [], dtype=np.int64)
    return np.arange(prompt.local_tokens // grid * grid + grid, top + 1, grid, dtype=np.int64)


def _chain_accepts(prompt: Prompt, row: BoundRow, candidates: Tokens, blocks: PresenceOf) -> tuple[Flags, Flags]:
    """For each candidate: whether all needed blocks are somewhere, and whether all are in host memory."""
    size = row.block_tokens
    first = prompt.local_tokens // size
    last = prompt.hashed_tokens // size
    codes = blocks.presence(row.group, prompt.prefixes(first * size, last * size, size))
    # Blocks below `first` are the engine's own.
    starts = np.maximum(row.first_needed(candidates) // size, first) - first
    ends = candidates // size + row.lookahead_blocks - first
    known = ends <= codes.size
    ends = np.minimum(ends, codes.size)
    accepted = []
    for usable in (codes != Presence.ABSENT, codes == Presence.READY):
        missing = np.concatenate(([0], np.cumsum(~usable)))
        accepted.append(known & (missing[ends] == missing[np.minimum(starts, ends)]))
    return accepted[0], accepted[1]


def _deepest(candidates: Tokens, accepted: Flags, otherwise: int) -> int:
    hits = np.flatnonzero(accepted)
    return int(candidates[hits[-1]]) if hits.size else otherwise


def _limit(
    prompt: Prompt,
    candidates: Tokens,
    rejects: Sequence[tuple[BoundRow, Flags]],
    resume_tokens: int,
    states: PresenceOf,
) -> tuple[str | None, str]:
    """The row that keeps the resume from the deepest position that the chains agree on, and why it does."""
    if not candidates.size or candidates[-1] <= resume_tokens:
        return None, ""
    behind = [row for row, rejected in rejects if rejected[-1]]
    prefix = prompt.prefix(int(candidates[-1]))
    # A state that is nowhere keeps it from there for good; all else is only not here in time.
    for row in behind:
        if row.kind is Kind.SNAPSHOT and states.presence(row.group, [prefix])[0] == Presence.ABSENT:
            return row.name, states.fate(row.group, prefix) or "not_offered"
    return (behind[0].name, "late") if behind else (None, "")
