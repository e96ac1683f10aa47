"""Positions off the grid: what is kept for one, where a prompt has one, and what a resume there takes.

The states of all snapshot rows, and of every chain row the partial last block, are kept together in the SnapshotStore
under an exact prefix (architecture section 3). The whole blocks before are ordinary ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ucmcache.coordinator.binding import BoundRow
from ucmcache.coordinator.directory import CheckpointDirectory
from ucmcache.coordinator.hit import Hit, Prompt
from ucmcache.coordinator.spec import Kind
from ucmcache.keys import SnapshotKey, exact_group
from ucmcache.store.arena import Presence
from ucmcache.store.block import BlockStore
from ucmcache.store.snapshot import SnapshotStore


class ExactPositions:
    """What of a model is kept at a position off the grid. Single-threaded; changes nothing but the directory.

    Guaranteed by the caller: no row has lookahead, and positions are off the grid and above 0.
    """

    def __init__(
        self, rows: Sequence[BoundRow], blocks: BlockStore, states: SnapshotStore, directory: CheckpointDirectory
    ) -> None:
        self._chains = [row for row in rows if row.kind is Kind.CHAIN]
        self._snapshots = [row for row in rows if row.kind is Kind.SNAPSHOT]
        self._blocks = blocks
        self._states = states
        self._directory = directory

    def keys(self, prompt: Prompt, position_tokens: int, prefix: bytes) -> list[tuple[SnapshotKey, int]]:
        """Every unit that is kept for the position, and its column in its group's block table."""
        unit = prompt.hash_block_tokens
        parent = prompt.prefix((position_tokens - 1) // unit * unit)
        columns = [(row.group, (position_tokens - 1) // row.block_tokens) for row in self._snapshots]
        columns += [
            (row.group, position_tokens // row.block_tokens)
            for row in self._chains
            if position_tokens % row.block_tokens
        ]
        return [(SnapshotKey(exact_group(group), prefix, position_tokens, parent), column) for group, column in columns]

    def presence(self, prompt: Prompt, position_tokens: int, prefix: bytes) -> Presence:
        """How near everything is that a resume at the position takes beyond what is local."""
        groups = [key.group for key, _ in self.keys(prompt, position_tokens, prefix)]
        least = int(self._states.presences(groups, [prefix]).min())
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
