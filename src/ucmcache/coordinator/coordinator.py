"""Coordinator: spec rows + stores + retention -> where to resume, what to load, what to keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ucmcache.coordinator.directory import CheckpointDirectory
from ucmcache.coordinator.hit import Hit, Prompt, grid_tokens, resolve_hit
from ucmcache.coordinator.lineage import Lineage
from ucmcache.coordinator.retention import Retention, Trigger
from ucmcache.coordinator.spec import BoundRow, Kind
from ucmcache.keys import BlockKey, SnapshotKey, UnitKey
from ucmcache.store.arena import Presence
from ucmcache.store.block import BlockStore
from ucmcache.store.snapshot import SnapshotStore

_HERE = (Presence.PENDING, Presence.READY)


class Placed(NamedTuple):
    """One unit of a plan: its key, and the column of its group's block table where the engine has or wants it."""

    key: UnitKey
    column: int


class Coordinator:
    """Decides for one engine. Single-threaded; never touches bytes.

    Guaranteed by the caller: prompts carry the engine's own hashes. Promised: a resume position is served by every
    voting row; what `needed` lists is everything that the resume position requires beyond what is local, and nothing
    else.
    """

    def __init__(
        self, rows: Sequence[BoundRow], blocks: BlockStore, states: SnapshotStore, interval_tokens: int | None
    ) -> None:
        self.rows = tuple(row for row in rows if row.kind is not Kind.NONE)
        self.blocks = blocks
        self.states = states
        self.directory = CheckpointDirectory(self.rows, states)
        self.grid_tokens = grid_tokens(self.rows) if self.rows else 0
        self.retention = Retention(interval_tokens, max(self.grid_tokens, 1))
        self.lineage = Lineage(self.grid_tokens)
        states.on_gone = lambda prefix: self._revalue(self.lineage.remove(prefix))

    def junction(self, hit: Hit) -> int:
        """Where a prompt leaves the path that others went before it, if no state is kept there; else 0."""
        behind = hit.chain_tokens > hit.resume_tokens and "late" not in hit.lost
        return hit.chain_tokens if behind and any(row.kind is Kind.SNAPSHOT for row in self.rows) else 0

    def keep(self, prompt: Prompt, position_tokens: int, trigger: Trigger) -> None:
        """If the states at a position are in host memory, or on their way there, know what they are kept for."""
        prefix = prompt.prefix(position_tokens)
        groups = [row.group for row in self.rows if row.kind is Kind.SNAPSHOT]
        if not groups or any(self.states.presence(group, [prefix])[0] not in _HERE for group in groups):
            return
        self._revalue(self.lineage.add(prompt, position_tokens, trigger))

    def pass_over(self, prompt: Prompt, position_tokens: int) -> None:
        """The states at a position could be kept and are not: remembered, to name the cause of a later loss."""
        for key, _ in self.missing_states(prompt, position_tokens):
            self.states.note(key, "never_saved")

    def demote(self, prefix: bytes) -> None:
        """The states of a prefix are no end any more: a later one of the same request took their place."""
        self._revalue(self.lineage.demote(prefix))

    def clear(self, namespace: bytes) -> None:
        """Forget everything and go on under another namespace."""
        self.blocks.clear(namespace)
        self.states.clear(namespace)
        self.lineage.clear()

    def _revalue(self, worths: Mapping[bytes, float]) -> None:
        for prefix, worth in worths.items():
            self.states.revalue(prefix, worth)

    def store_of(self, key: UnitKey) -> BlockStore | SnapshotStore:
        """The store that indexes a key's kind."""
        return self.states if isinstance(key, SnapshotKey) else self.blocks

    def lookup(self, prompt: Prompt) -> Hit:
        """Where the prompt can be resumed; takes no pins and changes nothing."""
        return resolve_hit(prompt, self.rows, self.blocks, self.directory)

    def needed(self, prompt: Prompt, resume_tokens: int) -> list[Placed]:
        """Every unit that a resume at `resume_tokens` needs beyond `prompt.local_tokens`."""
        units: list[Placed] = []
        for row in self.rows:
            if row.kind is Kind.SNAPSHOT:
                column = (resume_tokens - 1) // row.block_tokens
                units.append(Placed(self._state_key(prompt, row, resume_tokens), column))
                continue
            size = row.block_tokens
            start = int(row.first_needed(np.array([resume_tokens]))[0]) // size
            columns = range(max(start, prompt.local_tokens // size), resume_tokens // size)
            units += [Placed(self._block_key(prompt, row, column), column) for column in columns]
        return units

    def missing_blocks(
        self, prompt: Prompt, row: BoundRow, first_column: int, computed_tokens: int
    ) -> tuple[list[Placed], int]:
        """Full blocks of a chain row from `first_column` on that are computed, hashed and kept nowhere yet.

        Also returns the column to look from next time: a block that is still on its way may turn out not to arrive.
        """
        size = row.block_tokens
        last = min(computed_tokens, prompt.hashed_tokens) // size
        if last <= first_column:
            return [], first_column
        codes = self.blocks.presence(row.group, prompt.prefixes(first_column * size, last * size, size))
        columns = (np.flatnonzero(codes == Presence.ABSENT) + first_column).tolist()
        pending = np.flatnonzero(codes == Presence.PENDING)
        onward = first_column + int(pending[0]) if pending.size else last
        return [Placed(self._block_key(prompt, row, column), column) for column in columns], onward

    def missing_states(self, prompt: Prompt, position_tokens: int) -> list[Placed]:
        """The states of all snapshot rows at a grid position that are kept nowhere yet, in the running column."""
        if not self.on_grid(position_tokens) or position_tokens > prompt.hashed_tokens:
            return []
        placed = [
            Placed(self._state_key(prompt, row, position_tokens), (position_tokens - 1) // row.block_tokens)
            for row in self.rows
            if row.kind is Kind.SNAPSHOT
        ]
        return [one for one in placed if self.states.presence(one.key.group, [one.key.prefix])[0] == Presence.ABSENT]

    def on_grid(self, position_tokens: int) -> bool:
        """Whether every chain has a block that ends at the position, so that a resume there is possible at all."""
        return position_tokens > 0 and self.grid_tokens > 0 and position_tokens % self.grid_tokens == 0

    def state_columns(self, position_tokens: int) -> list[tuple[int, int]]:
        """(group, column) of every snapshot row's running state at a position."""
        return [
            (row.group, (position_tokens - 1) // row.block_tokens) for row in self.rows if row.kind is Kind.SNAPSHOT
        ]

    def _block_key(self, prompt: Prompt, row: BoundRow, column: int) -> BlockKey:
        end = (column + 1) * row.block_tokens
        return BlockKey(row.group, prompt.prefix(end), end, prompt.prefix(end - row.block_tokens))

    def _state_key(self, prompt: Prompt, row: BoundRow, position_tokens: int) -> SnapshotKey:
        parent = max(position_tokens - row.block_tokens, 0)
        return SnapshotKey(row.group, prompt.prefix(position_tokens), position_tokens, prompt.prefix(parent))

    def describe(self) -> str:
        """The bound table, for the log at start."""
        lines = [f"resume positions are multiples of {self.grid_tokens} tokens"]
        for row in self.rows:
            store = self.states if row.kind is Kind.SNAPSHOT else self.blocks
            arena = next(arena for arena in store.arenas if row.group in arena.plan.groups)
            lines.append(
                f"  group {row.group}: {row.spec.spec_class} as {row.kind.value}, {row.block_tokens} tokens a block, "
                f"{arena.plan.slot_bytes:,} bytes a unit, {arena.plan.slots:,} slots for groups {arena.plan.groups}"
            )
        return "\n".join(lines)
