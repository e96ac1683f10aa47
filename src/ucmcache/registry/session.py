"""What may become of a session, as a table; whatever is not in it is a broken contract."""

from __future__ import annotations

from enum import Enum

from ucmcache.errors import ContractError


class State(Enum):
    """Where a session is."""

    RUNNING = "running"  # on a lane
    DETACHED = "detached"  # in an entry, for any lane
    ATTACHING = "attaching"  # in an entry, from which a lane is being filled
    CLOSING = "closing"  # as before, and closed meanwhile: what is read must stay until it is read
    CLOSED = "closed"


class Event(Enum):
    """What happens to a session."""

    DETACH = "detach"  # its request finished, and an entry took what it leaves
    ATTACH = "attach"  # a prompt continues it
    ATTACHED = "attached"  # the lane has it all
    GIVEN_BACK = "given back"  # the prompt was aborted before the lane had it
    FAILED = "failed"  # what the entry holds could not be read
    EVICT = "evict"  # for another, or past its time
    CLOSE = "close"


_TABLE: dict[tuple[State, Event], State] = {
    (State.RUNNING, Event.DETACH): State.DETACHED,
    (State.RUNNING, Event.CLOSE): State.CLOSED,
    (State.DETACHED, Event.ATTACH): State.ATTACHING,
    (State.DETACHED, Event.EVICT): State.CLOSED,
    (State.DETACHED, Event.CLOSE): State.CLOSED,
    (State.ATTACHING, Event.ATTACHED): State.RUNNING,
    (State.ATTACHING, Event.GIVEN_BACK): State.DETACHED,
    (State.ATTACHING, Event.FAILED): State.CLOSED,
    (State.ATTACHING, Event.CLOSE): State.CLOSING,
    (State.CLOSING, Event.ATTACHED): State.CLOSED,
    (State.CLOSING, Event.GIVEN_BACK): State.CLOSED,
    (State.CLOSING, Event.FAILED): State.CLOSED,
    (State.CLOSING, Event.CLOSE): State.CLOSING,
}


def after(state: State, event: Event) -> State:
    """The state that follows. Raises ContractError for an event that cannot happen to a session in this state."""
    try:
        return _TABLE[state, event]
    except KeyError:
        raise ContractError(f'"{event.value}" cannot happen to a session that is {state.value}') from None
