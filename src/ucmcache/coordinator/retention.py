"""Which states are worth keeping, and why: the triggers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Trigger(StrEnum):
    """Why a state is kept."""

    PROMPT_END = "prompt_end"  # the next turn, and the same prompt again, resume here
    OUTPUT_END = "output_end"  # the next turn resumes here if its template repeats the answer as it was
    JUNCTION = "junction"  # two requests went the same way up to here
    INTERVAL = "interval"  # nobody has asked for it yet

    @property
    def is_guess(self) -> bool:
        """Whether it is kept without evidence, and so is the first to go."""
        return self is Trigger.INTERVAL


@dataclass(frozen=True, slots=True)
class Retention:
    """The triggers of one engine, which has resume positions at multiples of `grid_tokens`.

    `interval_tokens` N keeps a state per N tokens besides; None keeps every one that a step leaves on the grid.
    Source: requirements K5; replayed in benchmarks/policies.py.
    """

    interval_tokens: int | None
    grid_tokens: int

    def trigger(
        self, position_tokens: int, prompt_tokens: int, junction_tokens: int, last_kept_tokens: int
    ) -> Trigger | None:
        """Why to keep the state at a grid position of a request; None not to.

        `junction_tokens` is where its prefix left the path that others went before (0: nowhere), `last_kept_tokens` the
        position of the last state kept of it.
        """
        grid = self.grid_tokens
        if position_tokens == junction_tokens:
            return Trigger.JUNCTION
        # For the prompt with something after it, and for the prompt itself, whose last token must be left to compute.
        if position_tokens in (prompt_tokens // grid * grid, (prompt_tokens - 1) // grid * grid):
            return Trigger.PROMPT_END
        if position_tokens > prompt_tokens:
            return Trigger.OUTPUT_END  # until the next one takes its place
        if self.interval_tokens is None or (
            position_tokens // self.interval_tokens > last_kept_tokens // self.interval_tokens
        ):
            return Trigger.INTERVAL
        return None
