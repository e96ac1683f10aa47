"""Which session is on which lane, what those that have left theirs keep, and who may still write for them.

An index only: it decides and accounts, and holds what a session keeps by a handle that it gives back exactly once. Time
and the handles' owner are passed in; single-threaded, in the scheduler's process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ucmcache.errors import ContractError
from ucmcache.registry.lanes import LaneLayout
from ucmcache.registry.session import Event, State, after

Tokens = NDArray[np.int32]
_SAMPLE_TOKENS = 16  # compared before all are


class Lease(NamedTuple):
    """The right to write for a session: no other lease has this epoch, in any engine."""

    session: str
    lane: int
    engine: bytes
    epoch: int


class Size(NamedTuple):
    """Bytes of host memory: of whole blocks, of the blocks that are full in part, and of states."""

    blocks: int = 0
    tails: int = 0
    states: int = 0

    def plus(self, other: Size, sign: int = 1) -> Size:
        """The sum, or the difference, part by part."""
        return Size(*(one + sign * two for one, two in zip(self, other, strict=True)))

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """What a session leaves behind: the state at its frontier, and that at the end of its last turn.

    Guaranteed by the caller: 0 <= turn_tokens <= len(tokens); 0 turn tokens are none, as is a frontier that is dropped.
    """

    tokens: Tokens  # all that it stands for; without a frontier those of the turn
    turn_tokens: int
    isolation: bytes  # whatever else must be equal: LoRA, salt
    prefix: bytes  # what stands for all of it, content that tokens do not tell (images) among it
    turn_prefix: bytes  # and for it up to the end of the last turn
    tenant: str
    size: Size
    turn_size: Size  # of it, what stays without the frontier
    hold: object  # what keeps the bytes, given back to `release`
    has_current: bool = True

    def without_current(self) -> Kept:
        """What stays when the state at the frontier goes."""
        return replace(
            self,
            tokens=self.tokens[: self.turn_tokens],
            prefix=self.turn_prefix,
            size=self.turn_size,
            has_current=False,
        )


class Match(NamedTuple):
    """A session that a prompt continues, and from where."""

    session: str
    tokens: int
    at_frontier: bool


@dataclass(slots=True, eq=False)
class _Session:
    name: str
    state: State = State.RUNNING
    lane: int | None = None
    entry: int | None = None
    lease: Lease | None = None  # of its last request
    kept: Kept | None = None  # of its last request that finished
    kept_lease: Lease | None = None  # under which that is written
    used_s: float = 0.0
    pin_s: float = 0.0
    pinned_until_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """How long and how much: `ttl_s` since the last use; `quota_bytes` of one tenant; of all, by kind of memory."""

    ttl_s: float
    quota_bytes: int | None = None
    blocks_bytes: int | None = None
    snapshots_bytes: int | None = None  # tails and states


@dataclass(slots=True)
class Held:
    """Bytes that sessions keep now, those on lanes among them."""

    size: Size = field(default_factory=Size)
    by_tenant: Counter[str] = field(default_factory=Counter)


class SessionRegistry:
    """Lanes, detach, attach, expiry and fencing.

    A session that finished stays on its lane until another needs it. Then it goes to an entry, and what was there
    longest and is not pinned goes for it; one that is being continued keeps its entry until its request is over, so
    that whoever branches off meanwhile finds what it needs. Promised: `release` gets every `Kept` that was taken
    exactly once; at most one lease of a session is valid at a time. `counts` says what happened.
    """

    def __init__(
        self,
        layout: LaneLayout,
        limits: Limits,
        engine: bytes,
        release: Callable[[Kept], None],
        clock: Callable[[], float],
        release_current: Callable[[Kept], None] = lambda kept: None,
    ) -> None:
        self.layout = layout
        self.held = Held()
        self.counts: Counter[str] = Counter()
        self._limits = limits
        self._engine = engine
        self._release = release
        self._release_current = release_current
        self._clock = clock
        self._sessions: dict[str, _Session] = {}
        self._lanes: list[_Session | None] = [None] * layout.lanes
        self._entries: list[_Session | None] = [None] * layout.entries
        self._epochs = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def state(self, session: str) -> State:
        """Where a session is."""
        return self._sessions[session].state if session in self._sessions else State.CLOSED

    # -- requests ---------------------------------------------------------------------------------------------------

    def match(self, prompt: Sequence[int], isolation: bytes, prefix_at: Callable[[int], bytes]) -> Match | None:
        """The session that a prompt continues, at most up to the token before its last; None if there is none.

        `prefix_at` tells what stands for the prompt up to a position; it is asked where the tokens are equal.
        In two passes (requirements G4): sessions whose every token the prompt continues come first, the longest of
        them; only then those that it continues from the end of their last turn. A running one is none of them.
        """
        return self._longest(prompt, isolation, prefix_at, True) or self._longest(prompt, isolation, prefix_at, False)

    def begin(self, session: str, match: Match | None = None, pin_s: float = 0.0) -> Lease | None:
        """A request of a session is on a lane from now on; None if there is no lane left, or it has a request already.

        With a match, which is good until anything else is called, it continues from there.
        """
        known = self._sessions.get(session)
        if known is not None and known.state is State.RUNNING:
            return None
        if all(one is not None and one.state is State.RUNNING for one in self._lanes):
            return None
        if known is None:
            known = self._sessions[session] = _Session(session)
        else:
            was = known.state
            self._happen(known, Event.ATTACH)
            self.counts["attaches"] += was is State.DETACHED
        lane = known.lane if known.lane is not None else self._free_lane()
        known.lane, self._lanes[lane] = lane, known
        known.used_s, known.pin_s = self._clock(), pin_s
        self._epochs += 1
        known.lease = Lease(session, lane, self._engine, self._epochs)
        if match is None:
            self.counts["full_resets"] += 1
        else:
            self.counts["frontier_appends" if match.at_frontier else "turn_restores"] += 1
        return known.lease

    def admits(self, lease: Lease) -> bool:
        """Whether what carries this lease may still write: its request runs, or what it left is kept."""
        session = self._sessions.get(lease.session)
        valid = session is not None and lease in (session.lease, session.kept_lease)
        self.counts["fenced_writers"] += not valid
        return valid

    def finish(self, lease: Lease, kept: Kept | None) -> bool:
        """The request is over; whether `kept` is kept. If not it is released, and what was kept before is kept on."""
        session = self._sessions.get(lease.session)
        if session is None or session.lease != lease or session.state is not State.RUNNING:
            self.counts["fenced_writers"] += 1
            if kept is not None:
                self._release(kept)
            return False
        taken = kept is not None and self._has_room(kept, session)
        if kept is not None and taken:
            self._keep(session, kept, lease)
        elif kept is not None:
            self.counts["refused_sessions"] += 1
            self._release(kept)
        if session.kept is None:
            self._close(session, Event.END)
            return False
        self._free_entry(session)
        self._happen(session, Event.FINISH)
        session.used_s = self._clock()
        session.pinned_until_s = session.used_s + session.pin_s
        return taken

    # -- sessions ---------------------------------------------------------------------------------------------------

    def close(self, session: str) -> None:
        """Forget a session: whoever has a lease of it has none, and what it kept is released."""
        if session in self._sessions:
            self._close(self._sessions[session], Event.CLOSE)

    def expire(self) -> int:
        """Close the sessions that nobody came for in time; how many."""
        now_s = self._clock()
        late = [
            session
            for session in self._idle()
            if now_s >= max(session.used_s + self._limits.ttl_s, session.pinned_until_s)
        ]
        for session in late:
            self._close(session, Event.CLOSE)
        self.counts["expired_sessions"] += len(late)
        return len(late)

    def reset(self) -> None:
        """Close all sessions, as when the weights have changed: nothing that is under way may write any more."""
        for session in list(self._sessions):
            self.close(session)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _longest(
        self, prompt: Sequence[int], isolation: bytes, prefix_at: Callable[[int], bytes], at_frontier: bool
    ) -> Match | None:
        best: Match | None = None
        for session in self._idle():
            kept = session.kept
            if kept is None or kept.isolation != isolation or (at_frontier and not kept.has_current):
                continue
            length = len(kept.tokens) if at_frontier else kept.turn_tokens
            # Strictly longer wins; what is as long as the best needs no look at its tokens.
            longer = (best.tokens if best else 0) < length < len(prompt)
            if not longer or not _begins_with(prompt, kept.tokens[:length]):
                continue
            if prefix_at(length) == (kept.prefix if at_frontier else kept.turn_prefix):
                best = Match(session.name, length, at_frontier)
        return best

    def _idle(self) -> Iterator[_Session]:
        return (session for session in self._sessions.values() if session.state is not State.RUNNING)

    def _free_lane(self) -> int:
        """A lane that nobody is on, from which whoever was there longest has gone if need be."""
        if None not in self._lanes:
            retained = (one for one in self._lanes if one is not None and one.state is State.RETAINED)
            self._displace(min(retained, key=lambda one: one.used_s))
        return self._lanes.index(None)

    def _displace(self, session: _Session) -> None:
        """A session leaves its lane: to an entry, if there is one to be had."""
        entry = next((number for number, one in enumerate(self._entries) if one is None), None)
        if entry is None:
            oldest = min(self._unpinned(State.DETACHED), key=lambda one: one.used_s, default=None)
            if oldest is not None:
                entry = oldest.entry
                self._evict(oldest)
        drops = not self.layout.keeps_current
        if entry is None or session.kept is None or (drops and not session.kept.turn_tokens):
            self._evict(session)
            return
        if session.lane is not None:
            self._lanes[session.lane] = None
        session.lane, session.entry, self._entries[entry] = None, entry, session
        self._happen(session, Event.DISPLACE)
        self.counts["detaches"] += 1
        if drops and session.kept.has_current:
            whole = session.kept
            self._account(whole, -1)
            session.kept = whole.without_current()
            self._account(session.kept, 1)
            self._release_current(whole)

    def _unpinned(self, *states: State) -> list[_Session]:
        now_s = self._clock()
        return [one for one in self._sessions.values() if one.state in states and one.pinned_until_s <= now_s]

    def _has_room(self, kept: Kept, session: _Session) -> bool:
        """Whether `kept` can be kept in place of what the session has; others go for it, those used longest ago first.

        If it cannot, nothing goes.
        """
        going: list[_Session] = []
        before = session.kept.size if session.kept is not None else Size()
        own = kept.tenant == session.kept.tenant if session.kept is not None else True
        size = self.held.size.plus(kept.size).plus(before, -1)
        tenant = self.held.by_tenant[kept.tenant] + kept.size.total - (before.total if own else 0)
        limits = self._limits
        others = sorted(self._unpinned(State.RETAINED, State.DETACHED), key=lambda one: one.used_s)
        for other in (*others, None):
            over_quota = limits.quota_bytes is not None and tenant > limits.quota_bytes
            over = limits.blocks_bytes is not None and size.blocks > limits.blocks_bytes
            over |= limits.snapshots_bytes is not None and size.tails + size.states > limits.snapshots_bytes
            if not (over or over_quota):
                for one in going:
                    self._evict(one)
                return True
            if other is None or other.kept is None:
                continue
            same = other.kept.tenant == kept.tenant
            if over or same:
                going.append(other)
                size = size.plus(other.kept.size, -1)
                tenant -= other.kept.size.total if same else 0
        return False

    def _keep(self, session: _Session, kept: Kept, lease: Lease) -> None:
        before, session.kept, session.kept_lease = session.kept, kept, lease
        self._account(kept, 1)
        if before is not None:
            self._account(before, -1)
            self._release(before)

    def _evict(self, session: _Session) -> None:
        self.counts["evicted_sessions"] += 1
        self._close(session, Event.CLOSE)

    def _close(self, session: _Session, event: Event) -> None:
        self._happen(session, event)
        del self._sessions[session.name]
        if session.lane is not None:
            self._lanes[session.lane] = None
        self._free_entry(session)
        session.lease = None
        if session.kept is not None:
            self._account(session.kept, -1)
            self._release(session.kept)

    def _free_entry(self, session: _Session) -> None:
        if session.entry is not None:
            self._entries[session.entry] = None
            session.entry = None

    @staticmethod
    def _happen(session: _Session, event: Event) -> None:
        session.state = after(session.state, event)

    def _account(self, kept: Kept, sign: int) -> None:
        if not 0 <= kept.turn_tokens <= len(kept.tokens):
            raise ContractError(f"a turn of {kept.turn_tokens} tokens in a session of {len(kept.tokens)}")
        self.held.size = self.held.size.plus(kept.size, sign)
        self.held.by_tenant[kept.tenant] += sign * kept.size.total
        if not self.held.by_tenant[kept.tenant]:
            del self.held.by_tenant[kept.tenant]


def _begins_with(prompt: Sequence[int], tokens: Tokens) -> bool:
    """Whether a prompt begins with these tokens, every one of them equal."""
    last = slice(max(len(tokens) - _SAMPLE_TOKENS, 0), len(tokens))
    # Most that are not the same conversation differ where it ends; only what does not is compared as a whole.
    if list(prompt[last]) != tokens[last].tolist():
        return False
    return np.array_equal(np.fromiter(prompt[: len(tokens)], np.int32, len(tokens)), tokens)
