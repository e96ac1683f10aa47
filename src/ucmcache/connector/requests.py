"""What the scheduler side knows of one request, from its arrival to its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ucmcache.connector.identity import RequestIdentity
from ucmcache.coordinator.hit import Hit
from ucmcache.coordinator.joint import Claims
from ucmcache.coordinator.retention import Trigger
from ucmcache.keys import UnitKey
from ucmcache.registry.registry import Lease


@dataclass(slots=True)
class Unnamed:
    """States at a position whose hash the engine does not have yet.

    Under asynchronous scheduling a step is planned before the last token that it computes on is known, so the states
    that it leaves get their name one step later.
    """

    position_tokens: int
    trigger: Trigger
    table: Mapping[int, Sequence[int]]  # group -> its block
    overwritten: bool = False  # the engine gave a block to somebody else


@dataclass(slots=True)
class Tracked:
    """One request."""

    request: Any
    identity: RequestIdentity
    epoch: int  # resets before its present computation began: what it computed before a later one is not kept
    local_tokens: int = 0
    asked_s: float | None = None  # since when its lookups answer "ask again"
    impatient: bool = False  # the deadline passed: no more waiting for this request
    staged: bool = False  # it waited for the backend, so its hit came from there
    staging: int = 0  # units on their way for it
    discovering: bool = False  # the backend is being asked what it has of it
    discovered: bool = False  # it was, or nothing could be found
    failed: bool = False  # a load failed: no more promises for this request
    loaded_tokens: int = 0  # loaded, not yet run
    open_tokens: int = 0  # promised; whether they are adopted or lost is still open
    junction_tokens: int = 0  # where it left the path that others went before it, by its last lookup
    hit: Hit | None = None  # its last lookup; counted when it is admitted
    columns: dict[int, int] = field(default_factory=dict)  # group -> first block not yet considered for saving
    refused: dict[int, int] = field(default_factory=dict)  # group -> first block that found no room
    state_tokens: int = 0  # position of the last state kept of it
    output_end: bytes = b""  # prefix of the last state kept in its output
    seen_tokens: int = 0  # where the last step ended
    due_tokens: int = 0  # a step that ends before this position fills no block
    unnamed: list[Unnamed] = field(default_factory=list)
    lease: dict[UnitKey, int] = field(default_factory=dict)  # units, by slot, that stay while it waits for others
    claims: Claims = field(default_factory=dict)  # blocks that are kept for its sake until it ends
    lane: Lease | None = None  # of the session that it is a request of
    is_laneless: bool = False  # it runs without one
    turn: Any = None  # the checkpoint at the end of its prompt

    def passes(self, scheduled: int) -> bool:
        """Whether a step of `scheduled` tokens, none of them to be taken back, leaves nothing to save.

        So it is for nearly every step of a decode: this is all that such a step costs a request.
        """
        start = self.request.num_computed_tokens
        # Rejected drafts and streamed input can take a request back behind what was looked at.
        if start < self.seen_tokens or start + scheduled >= self.due_tokens or self.unnamed:
            return False
        self.seen_tokens = start + scheduled
        return True

    def start_over(self, epoch: int) -> None:
        """Nothing of the request is computed yet, or no longer (preemption)."""
        self.columns.clear()
        self.refused.clear()
        self.unnamed.clear()
        self.output_end = b""
        self.state_tokens = self.seen_tokens = self.due_tokens = 0
        self.epoch = epoch
