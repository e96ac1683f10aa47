"""Coordinator: spec rows + stores + retention -> where to resume, what to load, what to keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import NamedTuple

import numpy as np

from ucmcache.coordinator.binding import BoundRow
from ucmcache.coordinator.directory import CheckpointDirectory
from ucmcache.coordinator.hit import Hit, Prompt, grid_tokens, resolve_hit
from ucmcache.coordinator.lineage import Lineage
from ucmcache.coordinator.pressure import Pressure
from ucmcache.coordinator.retention import Retention, Trigger
from ucmcache.coordinator.spec import Kind
from ucmcache.keys import BlockKey, SnapshotKey, UnitKey
from ucmcache.store.arena import ArenaPlan, Presence
from ucmcache.store.block import BlockStore
from ucmcache.store.snapshot import SnapshotStore

_HERE = (Presence.PENDING, Presence.READY)


class Placed(NamedTuple):
    """One unit of a plan: its key, and the column of its group's block table where the engine has or wants it."""

    key: UnitKey
    column: int


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
        self.blocks = blocks
        self.states = states
        self.directory = CheckpointDirectory(self.rows, states)
        self.grid_tokens = grid_tokens(self.rows) if self.rows else 0
        self.retention = Retention(interval_tokens, max(self.grid_tokens, 1))
        chains = [row for row in self.rows if row.kind is Kind.CHAIN]
        whole = [row for row in chains if row.is_whole]
        self._snapshots = [row.group for row in self.rows if row.kind is Kind.SNAPSHOT]
        self._whole_rows = whole
        self._whole = [row.group for row in whole] if self._snapshots else []
        self._windows = [row for row in chains if not row.is_whole] if self._snapshots else []
        self._windows_of: dict[bytes, list[tuple[int, Sequence[bytes]]]] = {}  # by prefix of a kept state
        step = gcd(*(row.block_tokens for row in whole), self.grid_tokens)
        self.lineage = Lineage(step, self._on_path)
        self._pressure = Pressure()
        self._bytes_a_step = sum(self._unit_bytes(row) * step / row.block_tokens for row in whole)
        self._state_bytes = sum(self._unit_bytes(row) for row in self.rows if row.kind is Kind.SNAPSHOT)
        blocks.whole_chains = frozenset(row.group for row in whole)
        blocks.on_full = lambda: self._pressure.relieve(self._frees_blocks, states.give_up)
        states.on_gone = self._gone

    def junction(self, hit: Hit) -> int:
        """Where a prompt leaves the path that others went before it, if no state is kept there; else 0."""
        behind = hit.chain_tokens > hit.resume_tokens and "late" not in hit.lost
        return hit.chain_tokens if behind and any(row.kind is Kind.SNAPSHOT for row in self.rows) else 0

    def keep(self, prompt: Prompt, position_tokens: int, trigger: Trigger) -> None:
        """If the states at a position are in host memory, or on their way there, know what they are kept for."""
        prefix = prompt.prefix(position_tokens)
        if not self._snapshots or any(
            self.states.presence(group, [prefix])[0] not in _HERE for group in self._snapshots
        ):
            return
        if prefix not in self.lineage and self._windows:
            held = self._windows_of[prefix] = [
                (row.group, self._window_prefixes(prompt, row, position_tokens)) for row in self._windows
            ]
            for group, prefixes in held:
                self.blocks.need([group], prefixes)
        self._revalue(self.lineage.add(prompt, position_tokens, trigger))

    def claim(self, claims: Claims, prompt: Prompt, computed_tokens: int) -> None:
        """The blocks that a state at `computed_tokens` would be resumed with are needed until the request settles.

        So neither its own later blocks nor others push them out before that state is there.
        """
        for row in self._whole_rows + self._windows if self._snapshots else ():
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
                self.blocks.need([row.group], fresh)
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

    def resumed(self, prefix: bytes) -> tuple[Trigger, bool] | None:
        """A request resumes from a state: why it was kept, and whether it was never read before. None if not kept."""
        self._pressure.touch(prefix)
        return self.lineage.read(prefix)

    def pass_over(self, prompt: Prompt, position_tokens: int, cause: str) -> None:
        """The states at a position could be kept and are not: remembered, to name the cause of a later loss."""
        for key, _ in self.missing_states(prompt, position_tokens):
            self.states.note(key, cause)

    def demote(self, prefix: bytes) -> None:
        """The states of a prefix are no end any more: a later one of the same request took their place."""
        self._revalue(self.lineage.demote(prefix))

    def clear(self, namespace: bytes) -> None:
        """Forget everything and go on under another namespace."""
        self.blocks.clear(namespace)
        self.states.clear(namespace)
        self.lineage.clear()
        self._pressure.clear()
        self._windows_of.clear()

    def _revalue(self, worths: Mapping[bytes, float]) -> None:
        for prefix, worth in worths.items():
            self.states.revalue(prefix, worth)
            self._offer(prefix)

    def _gone(self, prefix: bytes) -> None:
        if prefix not in self.lineage:
            return
        anchor = self.lineage.anchor(prefix)
        self._pressure.remove(prefix)
        self._revalue(self.lineage.remove(prefix))
        for group, prefixes in self._windows_of.pop(prefix, ()):
            self._release([group], prefixes)
        if anchor in self.lineage:
            self._offer(anchor)  # perhaps nothing builds on it any more

    def _on_path(self, prefixes: Sequence[bytes], held: bool) -> None:
        if held:
            self.blocks.need(self._whole, prefixes)
        else:
            self._release(self._whole, prefixes)

    def _release(self, groups: Sequence[int], prefixes: Sequence[bytes]) -> None:
        self.blocks.release(groups, prefixes)
        for prefix in prefixes:
            if prefix in self.lineage:
                self._offer(prefix)  # perhaps its blocks are needed by nothing else any more

    def _offer(self, prefix: bytes) -> None:
        size = self._bytes_a_step * self.lineage.steps(prefix) + self._state_bytes
        # Neither the exponent nor the weights of a state's own worth: with blocks to pay for, they cost hits.
        self._pressure.offer(prefix, self.lineage.saved_tokens(prefix) / size)

    def _frees_blocks(self, prefix: bytes) -> bool:
        return self.lineage.is_leaf(prefix) and all(self.blocks.needs(group, prefix) <= 1 for group in self._whole)

    def _window_prefixes(self, prompt: Prompt, row: BoundRow, position_tokens: int) -> Sequence[bytes]:
        size = row.block_tokens
        return prompt.prefixes(self._window_start(row, position_tokens) * size, position_tokens, size)

    @staticmethod
    def _window_start(row: BoundRow, position_tokens: int) -> int:
        return int(row.first_needed(np.array([position_tokens]))[0]) // row.block_tokens

    def _unit_bytes(self, row: BoundRow) -> int:
        store = self.states if row.kind is Kind.SNAPSHOT else self.blocks
        return next(arena.plan.slot_bytes for arena in store.arenas if row.group in arena.plan.groups)

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
        """The bound table, for the log at start; then what a token and a state take, and how many of each fit.

        Bytes are those of one rank.
        """
        heads = ("group", "class", "kind", "votes", "block tokens", "unit bytes", "access unit", "keeps", "rank rule")
        arenas = (*self.blocks.arenas, *self.states.arenas)
        plans = {group: arena.plan for arena in arenas for group in arena.plan.groups}
        table = [heads, *(self._described(row, plans) for row in self.all_rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in table]
        for kind, store, what in ((Kind.CHAIN, self.blocks, "token"), (Kind.SNAPSHOT, self.states, "state")):
            each = {row.group: row.block_tokens if kind is Kind.CHAIN else 1 for row in self.rows if row.kind is kind}
            if each:
                size = sum(plans[group].slot_bytes / plans[group].spread / each[group] for group in each)
                fit = min(
                    arena.plan.slots / sum(1 / each[group] for group in arena.plan.groups) for arena in store.arenas
                )
                taken = f"a {what} takes {size:,.0f} bytes of each rank's host memory over all groups"
                lines.append(f"{taken}; {int(fit):,} {what}s fit")
        return "\n".join([*lines, f"resume positions are multiples of {self.grid_tokens:,} tokens"])

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
