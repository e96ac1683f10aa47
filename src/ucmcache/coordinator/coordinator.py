"""Coordinator: spec rows + stores + retention -> where to resume, what to load, what to keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ucmcache.coordinator.binding import BoundRow
from ucmcache.coordinator.directory import CheckpointDirectory
from ucmcache.coordinator.hit import Hit, Prompt, grid_tokens, resolve_hit
from ucmcache.coordinator.joint import Claims, JointEviction
from ucmcache.coordinator.positions import Positions
from ucmcache.coordinator.retention import Retention, Trigger
from ucmcache.coordinator.spec import Kind
from ucmcache.keys import BlockKey, SnapshotKey, UnitKey, engine_group, exact_group
from ucmcache.store.arena import ArenaPlan, Presence
from ucmcache.store.block import BlockStore
from ucmcache.store.snapshot import SnapshotStore

_HERE = (Presence.PENDING, Presence.READY)


class Placed(NamedTuple):
    """One unit of a plan: its key, and the column of its group's block table where the engine has or wants it."""

    key: UnitKey
    column: int

    @property
    def group(self) -> int:
        """The engine's KV cache group."""
        return engine_group(self.key.group)


class Coordinator:
    """Decides for one engine. Single-threaded; never touches bytes.

    Guaranteed by the caller: prompts carry the engine's own hashes. Promised: a resume position is served by every
    voting row; what `needed` lists is everything that the resume position requires beyond what is local, and nothing
    else.
    """

    def __init__(
        self, rows: Sequence[BoundRow], blocks: BlockStore, states: SnapshotStore, interval_tokens: int | None
    ) -> None:
        self.all_rows = tuple(rows)
        self.rows = tuple(row for row in rows if row.spec.votes)
        self.grid_tokens: int = grid_tokens(self.rows) if self.rows else 0
        self.blocks = blocks
        self.states = states
        self.directory = CheckpointDirectory()
        self.positions = Positions(self.rows, blocks, states, self.directory, self.grid_tokens)
        states.on_exact, states.on_exact_gone = self.directory.add, self.directory.discard
        self.retention = Retention(interval_tokens, max(self.grid_tokens, 1))
        self.joint = JointEviction(self.rows, blocks, states, self.grid_tokens)
        self._snapshots = [row.group for row in self.rows if row.kind is Kind.SNAPSHOT]

    def junction(self, hit: Hit) -> int:
        """Where a prompt leaves the path that others went before it, if no state is kept there; else 0."""
        behind = hit.chain_tokens > hit.resume_tokens and "late" not in hit.lost
        return hit.chain_tokens if behind and self._snapshots else 0

    def keep(self, prompt: Prompt, position_tokens: int, trigger: Trigger) -> None:
        """If the states at a position are in host memory, or on their way there, know what they are kept for."""
        prefix = prompt.prefix(position_tokens)
        if not self._snapshots or any(
            self.states.presence(group, [prefix])[0] not in _HERE for group in self._snapshots
        ):
            return
        self.joint.keep(prompt, position_tokens, trigger)

    def claim(self, claims: Claims, prompt: Prompt, computed_tokens: int) -> None:
        """The blocks that a state at `computed_tokens` would be resumed with are needed until the request settles."""
        self.joint.claim(claims, prompt, computed_tokens)

    def settle(self, claims: Claims) -> None:
        """A request is over, or starts over: what it claimed is needed by others, or not."""
        self.joint.settle(claims)

    def resumed(self, prefix: bytes) -> tuple[Trigger, bool] | None:
        """A request resumes from a state: why it was kept, and whether it was never read before. None if not kept."""
        return self.joint.used(prefix)

    def pass_over(self, prompt: Prompt, position_tokens: int, cause: str) -> None:
        """The states at a position could be kept and are not: remembered, to name the cause of a later loss."""
        for key, _ in self.missing_states(prompt, position_tokens):
            self.states.note(key, cause)

    def demote(self, prefix: bytes) -> None:
        """The states of a prefix are no end any more: a later one of the same request took their place."""
        self.joint.demote(prefix)

    def clear(self, namespace: bytes) -> None:
        """Forget everything and go on under another namespace."""
        self.blocks.clear(namespace)
        self.states.clear(namespace)
        self.directory.clear()
        self.joint.clear()

    def store_of(self, key: UnitKey) -> BlockStore | SnapshotStore:
        """The store that indexes a key's kind."""
        return self.states if isinstance(key, SnapshotKey) else self.blocks

    def lookup(self, prompt: Prompt) -> Hit:
        """Where the prompt can be resumed; takes no pins and changes nothing."""
        return self.positions.deepen(prompt, resolve_hit(prompt, self.rows, self.blocks, self.states))

    def missing_at(self, prompt: Prompt, position_tokens: int, prefix: bytes, with_blocks: bool) -> list[Placed]:
        """What a resume at a position takes that is neither in host memory nor on its way there.

        Of whole blocks, and only if they are asked for, those that are nowhere.
        """
        own = self.positions.keys(prompt, position_tokens, prefix)
        missing = [Placed(*one) for one in own if self.states.presence(one[0].group, [prefix])[0] not in _HERE]
        for row in self.rows if with_blocks else ():
            if row.kind is Kind.CHAIN:
                first = int(row.first_needed(np.array([position_tokens]))[0]) // row.block_tokens
                missing += self.missing_blocks(prompt, row, first, position_tokens)[0]
        return missing

    def deepest(self, prompt: Prompt) -> int:
        """The deepest position at which a prompt could be resumed at all; 0 if there is none."""
        top = min(prompt.num_tokens - 1, prompt.hashed_tokens)
        return top // self.grid_tokens * self.grid_tokens if self.grid_tokens else 0

    def needed(self, prompt: Prompt, resume_tokens: int) -> list[Placed]:
        """Every unit that a resume at `resume_tokens` needs beyond `prompt.local_tokens`."""
        units: list[Placed] = []
        for row in self.rows:
            if row.kind is not Kind.CHAIN:
                continue
            size = row.block_tokens
            start = int(row.first_needed(np.array([resume_tokens]))[0]) // size
            columns = range(max(start, prompt.local_tokens // size), resume_tokens // size)
            units += [Placed(self._block_key(prompt, row, column), column) for column in columns]
        prefix = self.positions.prefix(prompt, resume_tokens)
        return units + [Placed(*one) for one in self.positions.keys(prompt, resume_tokens, prefix)]

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
        placed = [Placed(*one) for one in self.positions.keys(prompt, position_tokens, prompt.prefix(position_tokens))]
        return [one for one in placed if self.states.presence(one.key.group, [one.key.prefix])[0] == Presence.ABSENT]

    def on_grid(self, position_tokens: int) -> bool:
        """Whether every chain has a block that ends at the position, so that states alone are kept for it."""
        return self.positions.on_grid(position_tokens)

    def state_columns(self, position_tokens: int) -> list[tuple[int, int]]:
        """(group, column) of every snapshot row's running state at a position."""
        return [
            (row.group, (position_tokens - 1) // row.block_tokens) for row in self.rows if row.kind is Kind.SNAPSHOT
        ]

    def _block_key(self, prompt: Prompt, row: BoundRow, column: int) -> BlockKey:
        end = (column + 1) * row.block_tokens
        return BlockKey(row.group, prompt.prefix(end), end, prompt.prefix(end - row.block_tokens))

    def describe(self) -> str:
        """The bound table, for the log at start; then what a token and a state take, and how many of each fit.

        Bytes are those of one rank.
        """
        heads = ("group", "class", "kind", "votes", "block tokens", "unit bytes", "access unit", "keeps", "rank rule")
        arenas = (*self.blocks.arenas, *self.states.arenas)
        plans = {group: arena.plan for arena in arenas for group in arena.plan.groups}
        table = [heads, *(self._described(row, plans) for row in self.all_rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in table]
        exact = [exact_group(row.group) for row in self.rows if exact_group(row.group) in plans]
        for what, each in (
            ("token", {row.group: row.block_tokens for row in self.rows if row.kind is Kind.CHAIN}),
            ("state", {row.group: 1 for row in self.rows if row.kind is Kind.SNAPSHOT}),
            ("checkpoint", dict.fromkeys(exact, 1)),
        ):
            if each:
                size = sum(plans[group].slot_bytes / plans[group].spread / each[group] for group in each)
                shares = ((arena.plan, [each[one] for one in arena.plan.groups if one in each]) for arena in arenas)
                fit = min(plan.slots / sum(1 / one for one in share) for plan, share in shares if share)
                taken = f"a {what} takes {size:,.0f} bytes of each rank's host memory over all groups"
                lines.append(f"{taken}; {int(fit):,} {what}s fit")
        off_grid = ", and where a session has a checkpoint" if exact else ""
        return "\n".join([*lines, f"resume positions are multiples of {self.grid_tokens:,} tokens{off_grid}"])

    @staticmethod
    def _described(row: BoundRow, plans: Mapping[int, ArenaPlan]) -> tuple[str, ...]:
        spec, votes = row.spec, "yes" if row.spec.votes else "no"
        start = (str(row.group), spec.spec_class, row.kind.value, votes)
        if not spec.votes:
            return (*start, "", "", spec.access_unit.value, spec.retention.value, "")
        plan, rule = plans[row.group], row.rank_rule.value
        sizes = (f"{row.block_tokens:,}", f"{plan.slot_bytes:,}")
        ranks = f"{rule}, once for {plan.spread} ranks" if plan.spread > 1 else rule
        return (*start, *sizes, spec.access_unit.value, spec.retention.value, ranks)
