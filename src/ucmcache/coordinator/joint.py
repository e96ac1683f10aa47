"""Joint eviction: what keeps blocks and states to one another (docs/adr/0010).

A state without the blocks before it cannot be resumed from, and a block behind the last kept state is of use to nobody.
So blocks know what they are needed for; where only needed ones are left, a state is given up with what only it needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd

import numpy as np

from ucmcache.coordinator.binding import BoundRow
from ucmcache.coordinator.hit import Prompt
from ucmcache.coordinator.lineage import Lineage
from ucmcache.coordinator.pressure import Pressure
from ucmcache.coordinator.retention import Trigger
from ucmcache.coordinator.spec import Kind
from ucmcache.store.block import BlockStore
from ucmcache.store.snapshot import SnapshotStore


@dataclass(slots=True)
class Claim:
    """The blocks of one group that a request at work needs to stay: from column `first` on, by prefix."""

    first: int
    prefixes: list[bytes] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The column behind the last."""
        return self.first + len(self.prefixes)


Claims = dict[int, Claim]  # by group


def unit_bytes(row: BoundRow, blocks: BlockStore, states: SnapshotStore) -> int:
    """Bytes of a slot for one unit of a row."""
    store = states if row.kind is Kind.SNAPSHOT else blocks
    return next(arena.plan.slot_bytes for arena in store.arenas if row.group in arena.plan.groups)


class JointEviction:
    """Which blocks are needed, what each kept state is worth, and which goes when blocks want room. Single-threaded.

    In a model without states nothing is needed: blocks go by their own order.
    """

    def __init__(self, rows: Sequence[BoundRow], blocks: BlockStore, states: SnapshotStore, grid_tokens: int) -> None:
        self._blocks = blocks
        self._states = states
        chains = [row for row in rows if row.kind is Kind.CHAIN]
        snapshots = [row for row in rows if row.kind is Kind.SNAPSHOT]
        whole = [row for row in chains if row.is_whole]
        self._claimed_rows = chains if snapshots else []
        self.whole = [row.group for row in whole] if snapshots else []
        self._windows = [row for row in chains if not row.is_whole] if snapshots else []
        self.windows_of: dict[bytes, list[tuple[int, Sequence[bytes]]]] = {}  # by prefix of a kept state
        step = gcd(*(row.block_tokens for row in whole), grid_tokens)
        self.lineage = Lineage(step, self._on_path)
        self._pressure = Pressure()
        self._bytes_a_step = sum(unit_bytes(row, blocks, states) * step / row.block_tokens for row in whole)
        self._state_bytes = sum(unit_bytes(row, blocks, states) for row in snapshots)
        blocks.whole_chains = frozenset(row.group for row in whole)
        blocks.on_full = self.relieve
        states.on_gone = self._gone
        states.on_idle = self._pressure.idle

    def keep(self, prompt: Prompt, position_tokens: int, trigger: Trigger) -> None:
        """The states at a position are kept, or on their way: their blocks are needed."""
        prefix = prompt.prefix(position_tokens)
        if prefix not in self.lineage and self._windows:
            held = self.windows_of[prefix] = [
                (row.group, self._window_prefixes(prompt, row, position_tokens)) for row in self._windows
            ]
            for group, prefixes in held:
                self._blocks.need([group], prefixes)
        self._revalue(self.lineage.add(prompt, position_tokens, trigger))

    def demote(self, prefix: bytes) -> None:
        """A kept state turned out to be a guess like others."""
        self._revalue(self.lineage.demote(prefix))

    def used(self, prefix: bytes) -> tuple[Trigger, bool] | None:
        """A request resumes from a state: why it was kept, and whether it was never read before. None if not kept."""
        self._pressure.touch(prefix)
        return self.lineage.read(prefix)

    def claim(self, claims: Claims, prompt: Prompt, computed_tokens: int) -> None:
        """The blocks that a state at `computed_tokens` would be resumed with are needed until the request settles.

        So neither its own later blocks nor others push them out before that state is there.
        """
        for row in self._claimed_rows:
            size = row.block_tokens
            first = 0 if row.is_whole else self._window_start(row, computed_tokens)
            last = min(computed_tokens, prompt.hashed_tokens) // size
            claim = claims.setdefault(row.group, Claim(first))
            end = max(claim.end, first)
            if claim.end < first <= last:
                self._release([row.group], claim.prefixes)
                claim.first, claim.prefixes = first, []
            if last > end:
                fresh = prompt.prefixes(end * size, last * size, size)
                self._blocks.need([row.group], fresh)
                claim.prefixes += fresh
            if claim.first < first:
                behind = first - claim.first
                self._release([row.group], claim.prefixes[:behind])
                claim.first, claim.prefixes = first, claim.prefixes[behind:]

    def settle(self, claims: Claims) -> None:
        """A request is over, or starts over: what it claimed is needed by others, or not."""
        for group, claim in claims.items():
            self._release([group], claim.prefixes)
        claims.clear()

    def relieve(self) -> bool:
        """Give up the state of least value per byte among those whose blocks nothing else needs; False if none can."""
        return self._pressure.relieve(self._frees_blocks, self._states.give_up)

    def clear(self) -> None:
        """Nothing is kept any more; the stores forget their part themselves."""
        self.lineage.clear()
        self._pressure.clear()
        self.windows_of.clear()

    def _revalue(self, worths: Mapping[bytes, float]) -> None:
        for prefix, worth in worths.items():
            self._states.revalue(prefix, worth)
            self._offer(prefix)

    def _gone(self, prefix: bytes) -> None:
        if prefix not in self.lineage:
            return
        anchor = self.lineage.anchor(prefix)
        self._pressure.remove(prefix)
        self._revalue(self.lineage.remove(prefix))
        for group, prefixes in self.windows_of.pop(prefix, ()):
            self._release([group], prefixes)
        if anchor in self.lineage:
            self._offer(anchor)  # perhaps nothing builds on it any more

    def _on_path(self, prefixes: Sequence[bytes], more: int) -> None:
        if more > 0:
            self._blocks.need(self.whole, prefixes, more)
        elif more < 0:
            self._release(self.whole, prefixes, -more)

    def _release(self, groups: Sequence[int], prefixes: Sequence[bytes], times: int = 1) -> None:
        self._blocks.release(groups, prefixes, times)
        for prefix in prefixes:
            if prefix in self.lineage:
                self._offer(prefix)  # perhaps its blocks are needed by nothing else any more

    def _offer(self, prefix: bytes) -> None:
        size = self._bytes_a_step * self.lineage.steps(prefix) + self._state_bytes
        # Neither the exponent nor the weights of a state's own worth: with blocks to pay for, they cost hits.
        self._pressure.offer(prefix, self.lineage.saved_tokens(prefix) / size)

    def _frees_blocks(self, prefix: bytes) -> bool:
        return self.lineage.is_leaf(prefix) and all(self._blocks.needs(group, prefix) <= 1 for group in self.whole)

    def _window_prefixes(self, prompt: Prompt, row: BoundRow, position_tokens: int) -> Sequence[bytes]:
        size = row.block_tokens
        return prompt.prefixes(self._window_start(row, position_tokens) * size, position_tokens, size)

    @staticmethod
    def _window_start(row: BoundRow, position_tokens: int) -> int:
        return int(row.first_needed(np.array([position_tokens]))[0]) // row.block_tokens
