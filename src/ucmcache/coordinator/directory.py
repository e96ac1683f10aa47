"""CheckpointDirectory: which states there are for a prompt, by position.

An index of what the SnapshotStore holds, never a second authority: it is asked, not told. A state whose chain is gone
is simply out of reach, since resolve_hit never reaches its position.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ucmcache.coordinator.hit import PresenceOf, Prompt
from ucmcache.coordinator.spec import BoundRow, Kind
from ucmcache.store.arena import Presence


class CheckpointDirectory:
    """Positions at which a prompt's recurrent state is kept, in every snapshot group at once."""

    def __init__(self, rows: Sequence[BoundRow], states: PresenceOf) -> None:
        self._rows = [row for row in rows if row.kind is Kind.SNAPSHOT]
        self._states = states

    def positions(self, prompt: Prompt, step_tokens: int) -> list[int]:
        """Token positions, ascending multiples of `step_tokens`, where all snapshot groups have this prefix's state."""
        prefixes = prompt.prefixes(0, prompt.hashed_tokens // step_tokens * step_tokens, step_tokens)
        present = np.ones(len(prefixes), dtype=np.bool_)
        for row in self._rows:
            present &= self._states.presence(row.group, prefixes) != Presence.ABSENT
        return [int(i + 1) * step_tokens for i in np.flatnonzero(present)] if self._rows else []
