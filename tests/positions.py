"""Where a prompt has states, asked of the store itself."""

from __future__ import annotations

import numpy as np

from ucmcache.coordinator.coordinator import Coordinator
from ucmcache.coordinator.hit import Prompt
from ucmcache.coordinator.spec import Kind
from ucmcache.store.arena import Presence


def state_positions(coordinator: Coordinator, prompt: Prompt, step_tokens: int) -> list[int]:
    """Ascending multiples of `step_tokens` where all snapshot groups have this prefix's state."""
    groups = [row.group for row in coordinator.rows if row.kind is Kind.SNAPSHOT]
    if not groups:
        return []
    prefixes = prompt.prefixes(0, prompt.hashed_tokens // step_tokens * step_tokens, step_tokens)
    present = (coordinator.states.presences(groups, prefixes) != Presence.ABSENT).all(axis=0)
    return [int(i + 1) * step_tokens for i in np.flatnonzero(present)]
