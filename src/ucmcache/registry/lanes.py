"""Where the states of lanes and of detached sessions lie: two ranges of slots that never meet (requirements G2).

With C lanes, a lane's current is rewritten at each step and its checkpoint at each end of a turn. Behind the lanes'
slots come those of the entries, which no lane writes to, so whoever takes a lane treads on no detached session.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ucmcache.errors import ContractError

Mode = Literal["keep-current", "drop-current"]


@dataclass(frozen=True, slots=True)
class LaneLayout:
    """Slot numbers for `lanes` lanes and `entries` detached sessions. Raises ContractError for what does not exist."""

    lanes: int
    entries: int
    mode: Mode

    def __post_init__(self) -> None:
        if self.lanes < 1 or self.entries < 0:
            raise ContractError(f"a layout has at least one lane and no negative entries: {self}")

    @property
    def keeps_current(self) -> bool:
        """Whether an entry keeps the state at the frontier, beside the one at the end of a turn."""
        return self.mode == "keep-current"

    @property
    def slots(self) -> int:
        """All slots together."""
        return 2 * self.lanes + self.entries * (2 if self.keeps_current else 1)

    def current(self, lane: int) -> int:
        """Slot of a lane's state at the frontier."""
        return self._lane(lane)

    def checkpoint(self, lane: int) -> int:
        """Slot of a lane's state at the end of its last turn."""
        return self.lanes + self._lane(lane)

    def entry_current(self, entry: int) -> int:
        """Slot of an entry's state at the frontier; an entry that dropped it has none, and no other is given for it."""
        if not self.keeps_current:
            raise ContractError(f"entry {entry} has no current: sessions.mode is drop-current; ask for its checkpoint")
        return 2 * self.lanes + 2 * self._entry(entry)

    def entry_checkpoint(self, entry: int) -> int:
        """Slot of an entry's state at the end of a turn."""
        if self.keeps_current:
            return 2 * self.lanes + 2 * self._entry(entry) + 1
        return 2 * self.lanes + self._entry(entry)

    def _lane(self, lane: int) -> int:
        if not 0 <= lane < self.lanes:
            raise ContractError(f"there are {self.lanes} lanes, numbered from 0; asked for {lane}")
        return lane

    def _entry(self, entry: int) -> int:
        if not 0 <= entry < self.entries:
            raise ContractError(f"there are {self.entries} entries, numbered from 0; asked for {entry}")
        return entry
