"""CheckpointDirectory: at which positions of a prompt there are states, by (group, position, prefix hash).

An index of what the SnapshotStore holds, never a second authority beside it: it is rebuilt by asking, so a state whose
chain is gone needs no invalidation (resolve_hit never reaches its position), and nothing is lost with the process.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ucmcache.coordinator.binding import BoundRow
from ucmcache.coordinator.hit import PresenceOf, Prompt
from ucmcache.coordinator.spec import Kind
from ucmcache.store.arena import Presence


class CheckpointDirectory:
    """What resolve_hit asks of states, group by group, and at which positions all groups have one.

    A prefix hash stands for one prefix and so for one position: a state never answers for another prefix there.
    """

    def __init__(self, rows: Sequence[BoundRow], states: PresenceOf) -> None:
        self._groups = [row.group for row in rows if row.kind is Kind.SNAPSHOT]
        self._states = states

    def presences(self, groups: Sequence[int], prefixes: Sequence[bytes]) -> NDArray[np.uint8]:
        """Presence codes of the groups' states (rows) at the prefixes (columns), as uint8."""
        return self._states.presences(groups, prefixes)

    def fate(self, group: int, prefix: bytes) -> str | None:
        """Why a state is not here, or None if there never was one."""
        return self._states.fate(group, prefix)

    def positions(self, prompt: Prompt, step_tokens: int) -> list[int]:
        """Token positions, ascending multiples of `step_tokens`, where all snapshot groups have this prefix's state."""
        if not self._groups:
            return []
        prefixes = prompt.prefixes(0, prompt.hashed_tokens // step_tokens * step_tokens, step_tokens)
        present = (self.presences(self._groups, prefixes) != Presence.ABSENT).all(axis=0)
        return [int(i + 1) * step_tokens for i in np.flatnonzero(present)]
