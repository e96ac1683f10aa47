"""Which ranks do a job on a slot, and who stands in when one fails.

Source: requirements K3. What each rank of a stage holds a piece of needs all of them (intersection). What several hold
alike is kept once: the slots go round those ranks, and any of them can do another's work (union), since they share the
memory and compute the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

Holders = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of one engine: pipeline stages of `per_stage` ranks, numbered stage by stage as vLLM does.

    `spread` below is how many neighbouring ranks of a stage hold the same bytes of a unit.
    """

    count: int
    per_stage: int

    def alike(self, spread: int, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same bytes as `rank`, itself among them."""
        first = rank // spread * spread
        return tuple(range(first, first + spread))

    def holders(self, spread: int, slot: int) -> Holders:
        """Who must have done a job on a slot for it to be done: of each tuple one rank, the first unless it fails."""
        turn = slot % spread
        shares = [self.alike(spread, first) for first in range(0, self.count, spread)]
        return tuple((*share[turn:], *share[:turn]) for share in shares)

    def doing(self, holders: Holders) -> tuple[int, ...] | None:
        """Who of the holders is to begin; None if it is all ranks."""
        return None if len(holders) == self.count else tuple(ranks[0] for ranks in holders)

    def bucket(self, spread: int, rank: int) -> int:
        """The number under which `rank` finds a unit in a backend: that of the first rank with the same bytes."""
        return self.alike(spread, rank)[0]
