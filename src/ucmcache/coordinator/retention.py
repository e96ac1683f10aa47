"""Which states are worth keeping beyond those that the engine itself offers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Retention:
    """Spacing of the states taken from steps that end on a block boundary.

    `interval_tokens` None keeps every one of them; N keeps one per N tokens. States that the engine offers are kept
    whatever the interval.
    """

    interval_tokens: int | None = None

    def wants(self, position_tokens: int, last_kept_tokens: int) -> bool:
        """Whether to keep the state at a boundary, the last one kept of this request being at `last_kept_tokens`."""
        if self.interval_tokens is None:
            return True
        return position_tokens // self.interval_tokens > last_kept_tokens // self.interval_tokens
