"""Any position: what is kept for one alone, how near it is, and where a prompt has one off the grid.

Off the grid the states of all snapshot rows, and of every chain row the partial last block, are kept together in the
SnapshotStore under an exact prefix (architecture section 3). On it there are states only. The whole blocks before are
ordinary ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np

from ucmcache.coordinator.binding import BoundRow
from ucmcache.coordinator.directory import CheckpointDirectory
from ucmcache.coordinator.hit import Hit, Prompt
from ucmcache.coordinator.spec import Kind
from ucmcache.keys import SnapshotKey, exact_group
from ucmcache.store.arena import Presence
from ucmcache.store.block import BlockStore
from ucmcache.store.snapshot import SnapshotStore


class Positions:
    """What of a model is kept at a position. Single-threaded; changes nothing but the directory.

    Guaranteed by the caller: positions are above 0, and off the grid only where no row has lookahead.
    """

    def __init__(
        self,
        rows: Sequence[BoundRow],
        blocks: BlockStore,
        states: SnapshotStore,
        directory: CheckpointDirectory,
        grid_tokens: int,
    ) -> None:
        self._grid_tokens = grid_tokens
        self._chains = [row for row in rows if row.kind is Kind.CHAIN]
        self._snapshots = [row for row in rows if row.kind is Kind.SNAPSHOT]
        self._blocks = blocks
        self._states = states
        self._directory = directory

    def on_grid(self, position_tokens: int) -> bool:
        """Whether every chain has a block that ends at the position, so that only states are kept for it."""
        return position_tokens > 0 and self._grid_tokens > 0 and position_tokens % self._grid_tokens == 0

    def prefix(self, prompt: Prompt, position_tokens: int) -> bytes:
        """What stands for a prompt up to a position; b"" if nothing can, or not yet."""
        on_grid, unit = self.on_grid(position_tokens), prompt.hash_block_tokens
        hashed = position_tokens if on_grid else (position_tokens - 1) // unit * unit
        if position_tokens > prompt.num_tokens or hashed > prompt.hashed_tokens:
            return b""
        return prompt.prefix(position_tokens) if on_grid else prompt.exact_prefix(position_tokens)

    def keys(self, prompt: Prompt, position_tokens: int, prefix: bytes) -> list[tuple[SnapshotKey, int]]:
        """Every unit that is kept for the position alone, and its column in its group's block table."""
        if self.on_grid(position_tokens):
            return [
                (
                    SnapshotKey(
                        row.group,
                        prefix,
                        position_tokens,
                        prompt.prefix(max(position_tokens - row.block_tokens, 0)),
                    ),
                    (position_tokens - 1) // row.block_tokens,
                )
                for row in self._snapshots
            ]
        unit = prompt.hash_block_tokens
        parent = prompt.prefix((position_tokens - 1) // unit * unit)
        columns = [(row.group, (position_tokens - 1) // row.block_tokens) for row in self._snapshots]
        columns += [
            (row.group, position_tokens // row.block_tokens)
            for row in self._chains
            if position_tokens % row.block_tokens
        ]
        return [(SnapshotKey(exact_group(group), prefix, position_tokens, parent), column) for group, column in columns]

    def columns(self, position_tokens: int) -> dict[int, range]:
        """The whole blocks of every chain row that a resume at the position takes, by column."""
        at = np.array([position_tokens])
        return {
            row.group: range(int(row.first_needed(at)[0]) // row.block_tokens, position_tokens // row.block_tokens)
            for row in self._chains
        }

    def whole_blocks(self, prompt: Prompt, position_tokens: int) -> dict[int, Sequence[bytes]]:
        """The prefixes of these blocks."""
        size = {row.group: row.block_tokens for row in self._chains}
        return {
            group: prompt.prefixes(columns.start * size[group], columns.stop * size[group], size[group])
            for group, columns in self.columns(position_tokens).items()
        }

    def units_at(self, positions_tokens: Sequence[int]) -> Counter[int]:
        """How many units of each group resumes at one or two positions of a prompt take together."""
        units: Counter[int] = Counter()
        for columns in map(self.columns, positions_tokens):
            for group, needed in columns.items():
                units[group] += len(needed)
        for one, other in combinations(map(self.columns, positions_tokens), 2):
            for group in one:
                shared = range(max(one[group].start, other[group].start), min(one[group].stop, other[group].stop))
                units[group] -= len(shared)
        for position in set(positions_tokens):
            on_grid = self.on_grid(position)
            for row in (*self._snapshots, *(row for row in self._chains if position % row.block_tokens)):
                units[row.group if on_grid else exact_group(row.group)] += 1
        return units

    def presence(self, prompt: Prompt, position_tokens: int, prefix: bytes) -> Presence:
        """How near everything is that a resume at the position takes beyond what is local."""
        groups = [key.group for key, _ in self.keys(prompt, position_tokens, prefix)]
        least = int(self._states.presences(groups, [prefix]).min()) if groups else int(Presence.READY)
        if least == Presence.ABSENT:
            self._directory.discard(prefix)
        for row in self._chains if least else ():
            size, last = row.block_tokens, position_tokens // row.block_tokens
            first = max(int(row.first_needed(np.array([position_tokens]))[0]), prompt.local_tokens) // size
            if first < last:
                codes = self._blocks.presence(row.group, prompt.prefixes(first * size, last * size, size))
                least = min(least, int(codes.min()))
        return Presence(least)

    def deepen(self, prompt: Prompt, hit: Hit) -> Hit:
        """The hit, with positions off the grid taken into account.

        Equal by definition to: for p from the cap down, on the grid or off it, if every row accepts p, p.
        """
        resume, reachable = hit.resume_tokens, hit.reachable_tokens
        for position, prefix in self._directory.positions(prompt, hit.resume_tokens):
            presence = self.presence(prompt, position, prefix)
            if presence != Presence.ABSENT:
                reachable = max(reachable, position)
            if presence == Presence.READY:
                resume = position
                break
        if (resume, reachable) == (hit.resume_tokens, hit.reachable_tokens):
            return hit
        deepest = max(hit.chain_tokens, reachable)
        lost = _lost(hit, deepest, resume)
        return replace(
            hit,
            resume_tokens=resume,
            chain_tokens=deepest,
            reachable_tokens=reachable,
            limited_by=hit.limited_by if lost else None,
            lost=lost,
        )


def _lost(hit: Hit, deepest_tokens: int, resume_tokens: int) -> Mapping[str, int]:
    """Tokens between the two, by cause: what the grid has not got, and beyond it what is on its way."""
    behind = max(hit.chain_tokens - resume_tokens, 0)
    lost = dict.fromkeys(hit.lost, behind) if behind else {}
    late = deepest_tokens - resume_tokens - behind
    if late:
        lost["late"] = lost.get("late", 0) + late
    return lost
