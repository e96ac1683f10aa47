"""Sessions that have left their lane, each with its states and its KV, until a prompt continues them.

An index only: it decides and accounts, and holds what an entry keeps by a handle that it gives back exactly once. Time
and the handles' owner are passed in; single-threaded, in the scheduler's process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ucmcache.errors import ContractError
from ucmcache.registry.lanes import LaneLayout
from ucmcache.registry.session import Event, State, after

Tokens = NDArray[np.int64]


class Lease(NamedTuple):
    """The right to write for a session: no other lease of the session has this epoch, in any engine."""

    session: str
    lane: int
    engine: bytes
    epoch: int


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """What a session leaves behind. Guaranteed by the caller: 0 <= turn_tokens <= len(tokens)."""

    tokens: Tokens  # all of which the state at the frontier has seen
    turn_tokens: int  # of these, up to the end of the last turn
    isolation: bytes  # whatever else must be equal: LoRA, salt, multimodal content
    tenant: str
    kv_bytes: int
    state_bytes: int
    hold: object  # what keeps the bytes, given back to `release`


class Match(NamedTuple):
    """An entry that a prompt continues, and how far."""

    session: str
    entry: int
    resume_tokens: int
    at_frontier: bool


@dataclass(slots=True, eq=False)
class _Entry:
    number: int
    session: str
    kept: Kept
    state: State
    used_s: float  # last detached or attached
    pinned_until_s: float
    filling: Lease | None = None  # of the lane that is being filled from it

    @property
    def nbytes(self) -> int:
        return self.kept.kv_bytes + self.kept.state_bytes


@dataclass(frozen=True, slots=True)
class Limits:
    """How long and how much: `ttl_s` since the last use; `quota_bytes` of one tenant, None is no limit."""

    ttl_s: float
    quota_bytes: int | None = None


@dataclass(slots=True)
class Held:
    """Bytes that detached sessions keep now."""

    kv_bytes: int = 0
    state_bytes: int = 0
    by_tenant: Counter[str] = field(default_factory=Counter)


class SessionRegistry:
    """Detach, attach, expiry and fencing.

    Promised: `release` gets every `Kept` that was taken exactly once, and none that a lane is still being filled from;
    at most one lease of a session is valid at a time. `counts` says what happened. `engine` is unlike any other's.
    """

    def __init__(
        self,
        layout: LaneLayout,
        limits: Limits,
        engine: bytes,
        release: Callable[[Kept], None],
        clock: Callable[[], float],
    ) -> None:
        self.layout = layout
        self.held = Held()
        self.counts: Counter[str] = Counter()
        self._limits = limits
        self._engine = engine
        self._release = release
        self._clock = clock
        self._entries: list[_Entry | None] = [None] * layout.entries
        self._leases: dict[str, Lease] = {}  # of sessions on a lane
        self._pins: dict[str, float] = {}  # of sessions on a lane: seconds that they asked for
        self._epochs = 0

    # -- lanes ------------------------------------------------------------------------------------------------------

    def begin(self, session: str, lane: int, pin_s: float = 0.0) -> Lease:
        """A session is on a lane from now on; what held a lease of it before holds none. An entry of it is closed."""
        self.layout.current(lane)  # refuses a lane that there is not
        self.close(session)
        return self._give_lease(session, lane, pin_s)

    def admits(self, lease: Lease) -> bool:
        """Whether what carries this lease may still write; refusals are counted."""
        valid = self._leases.get(lease.session) == lease
        self.counts["fenced"] += not valid
        return valid

    def detach(self, lease: Lease, kept: Kept) -> bool:
        """The session leaves its lane; whether an entry keeps what it had. If not, `kept` is released."""
        if not self.admits(lease):
            self._release(kept)
            return False
        if not 0 <= kept.turn_tokens <= len(kept.tokens):
            raise ContractError(f"a turn of {kept.turn_tokens} tokens in a session of {len(kept.tokens)}")
        pin_s = self._pins.pop(lease.session, 0.0)
        del self._leases[lease.session]
        number = self._room(kept)
        if number is None:
            self.counts["refused"] += 1
            self._release(kept)
            return False
        now_s = self._clock()
        state = after(State.RUNNING, Event.DETACH)
        self._entries[number] = _Entry(number, lease.session, kept, state, now_s, now_s + pin_s)
        self._account(kept, 1)
        self.counts["detaches"] += 1
        return True

    def end(self, lease: Lease) -> None:
        """The session leaves its lane and keeps nothing."""
        if self.admits(lease):
            del self._leases[lease.session]
            self._pins.pop(lease.session, None)

    # -- entries ----------------------------------------------------------------------------------------------------

    def match(self, prompt: Tokens, isolation: bytes, most_tokens: int) -> Match | None:
        """The entry that a prompt continues, resuming at most at `most_tokens`; None if there is none.

        In two passes (requirements G4): entries whose every token the prompt continues come first, the longest of them;
        only then those that it continues from the end of their last turn.
        """
        found = None
        if self.layout.keeps_current:
            found = self._longest(prompt, isolation, most_tokens, at_frontier=True)
        return found or self._longest(prompt, isolation, most_tokens, at_frontier=False)

    def attach(self, match: Match, lane: int, pin_s: float = 0.0) -> Lease:
        """A lane is going to be filled from a matching entry, which stays until `settle`; the session's new lease.

        Raises ContractError if the entry is not there any more: a match is good until anything else is called.
        """
        self.layout.current(lane)
        entry = self._entries[match.entry]
        if entry is None or entry.session != match.session:
            raise ContractError(f"entry {match.entry} does not hold session {match.session} any more")
        self._happen(entry, Event.ATTACH)
        entry.used_s = self._clock()
        entry.filling = self._give_lease(match.session, lane, pin_s)
        self.counts["attaches"] += 1
        self.counts["frontier_appends" if match.at_frontier else "turn_restores"] += 1
        return entry.filling

    def settle(self, lease: Lease, event: Event) -> None:
        """The filling of a lane ended: ATTACHED, GIVEN_BACK or FAILED.

        Given back, the session is detached again, and this lease ends. Afterwards the entry is free, or keeps it.
        """
        if event not in (Event.ATTACHED, Event.GIVEN_BACK, Event.FAILED):
            raise ContractError(f'filling a lane does not end by "{event.value}"')
        # By the lease: the session may have gone on elsewhere since, and even be detached again.
        entry = next((one for one in self._live() if one.filling == lease), None)
        if entry is None:
            raise ContractError(f"no lane is being filled under {lease}")
        if event is not Event.ATTACHED and self._leases.get(lease.session) == lease:
            del self._leases[lease.session]
            self._pins.pop(lease.session, None)
        entry.filling = None
        self._happen(entry, event)

    def close(self, session: str) -> None:
        """Forget a session: whoever has a lease of it has none, and an entry of it is freed."""
        self._leases.pop(session, None)
        self._pins.pop(session, None)
        for entry in [one for one in self._live() if one.session == session]:
            self._happen(entry, Event.CLOSE)

    def expire(self) -> int:
        """Free the entries that nobody came for in time; how many."""
        now_s = self._clock()
        late = [
            entry
            for entry in self._live(State.DETACHED)
            if now_s >= max(entry.used_s + self._limits.ttl_s, entry.pinned_until_s)
        ]
        for entry in late:
            self._happen(entry, Event.EVICT)
        self.counts["expirations"] += len(late)
        return len(late)

    def reset(self) -> None:
        """Close all sessions, as when the weights have changed: nothing that is under way may write any more."""
        for session in [*self._leases, *(entry.session for entry in self._live())]:
            self.close(session)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _longest(self, prompt: Tokens, isolation: bytes, most_tokens: int, at_frontier: bool) -> Match | None:
        best: Match | None = None
        for entry in self._live(State.DETACHED):
            kept = entry.kept
            length = len(kept.tokens) if at_frontier else kept.turn_tokens
            # Strictly longer wins; what is as long as the best needs no look at its tokens.
            if kept.isolation != isolation or not (best.resume_tokens if best else 0) < length <= most_tokens:
                continue
            if np.array_equal(prompt[:length], kept.tokens[:length]):
                best = Match(entry.session, entry.number, length, at_frontier)
        return best

    def _room(self, kept: Kept) -> int | None:
        """A free entry for `kept`, for which others may have gone; None, and nothing is evicted, if none can be."""
        nbytes, quota = kept.kv_bytes + kept.state_bytes, self._limits.quota_bytes
        over = 0 if quota is None else self.held.by_tenant[kept.tenant] + nbytes - quota
        free = next((number for number, entry in enumerate(self._entries) if entry is None), None)
        now_s, going = self._clock(), []
        for entry in sorted(self._live(State.DETACHED), key=lambda one: one.used_s):
            needed = (over > 0 and entry.kept.tenant == kept.tenant) or (over <= 0 and free is None)
            if not needed or entry.pinned_until_s > now_s:
                continue
            going.append(entry)
            free = entry.number if free is None else free
            over -= entry.nbytes if entry.kept.tenant == kept.tenant else 0
        if over > 0 or free is None:
            return None
        for entry in going:
            self._happen(entry, Event.EVICT)
        self.counts["evictions"] += len(going)
        return free

    def _happen(self, entry: _Entry, event: Event) -> None:
        entry.state = after(entry.state, event)
        if event is Event.ATTACHED or entry.state is State.CLOSED:
            self._entries[entry.number] = None
            self._account(entry.kept, -1)
            self._release(entry.kept)

    def _account(self, kept: Kept, sign: int) -> None:
        self.held.kv_bytes += sign * kept.kv_bytes
        self.held.state_bytes += sign * kept.state_bytes
        self.held.by_tenant[kept.tenant] += sign * (kept.kv_bytes + kept.state_bytes)
        if not self.held.by_tenant[kept.tenant]:
            del self.held.by_tenant[kept.tenant]

    def _give_lease(self, session: str, lane: int, pin_s: float) -> Lease:
        self._epochs += 1
        lease = self._leases[session] = Lease(session, lane, self._engine, self._epochs)
        self._pins[session] = pin_s
        return lease

    def _live(self, state: State | None = None) -> Iterator[_Entry]:
        return (entry for entry in self._entries if entry is not None and state in (None, entry.state))
