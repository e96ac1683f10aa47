"""Which ranks do a job on a slot, and who stands in when one fails.

Source: requirements K3. What each rank of a stage holds a piece of needs all of them (intersection). What they all hold
alike is kept once: the slots go round the ranks of a stage, and any of them can do another's work (union), since they
share the memory and compute the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

Holders = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of one engine: pipeline stages of `per_stage` ranks, numbered stage by stage as vLLM does."""

    count: int
    per_stage: int

    def stage(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same layers as `rank`, itself among them."""
        first = rank // self.per_stage * self.per_stage
        return tuple(range(first, min(first + self.per_stage, self.count)))

    def holders(self, spread: int, slot: int) -> Holders:
        """Who must have done a job on a slot for it to be done: of each tuple one rank, the first unless it fails."""
        if spread == 1:
            return tuple((rank,) for rank in range(self.count))
        turn = slot % spread
        stages = [self.stage(first) for first in range(0, self.count, self.per_stage)]
        return tuple((*stage[turn:], *stage[:turn]) for stage in stages)

    def doing(self, holders: Holders) -> tuple[int, ...] | None:
        """Who of the holders is to begin; None if it is all ranks."""
        return None if len(holders) == self.count else tuple(ranks[0] for ranks in holders)

    def bucket(self, spread: int, rank: int) -> int:
        """The number under which `rank` finds a unit in a backend: its own, or its stage's if they share one copy."""
        return rank if spread == 1 else self.stage(rank)[0]
