"""What may become of a session, as a table; whatever is not in it is a broken contract."""

from __future__ import annotations

from enum import Enum

from ucmcache.errors import ContractError


class State(Enum):
    """Where a session is."""

    RUNNING = "running"  # a request of it is on a lane
    RETAINED = "retained"  # its last request finished, and nobody has needed the lane since
    DETACHED = "detached"  # in an entry, for any lane
    CLOSED = "closed"


class Event(Enum):
    """What happens to a session."""

    FINISH = "finish"  # its request left the lane, and there is something to continue from
    END = "end"  # its request left the lane, and nothing is kept of it
    DISPLACE = "displace"  # another session needs its lane, and an entry is free
    ATTACH = "attach"  # a prompt continues it
    CLOSE = "close"  # by a client, for want of room, or past its time


_TABLE: dict[tuple[State, Event], State] = {
    (State.RUNNING, Event.FINISH): State.RETAINED,
    (State.RUNNING, Event.END): State.CLOSED,
    (State.RUNNING, Event.CLOSE): State.CLOSED,
    (State.RETAINED, Event.DISPLACE): State.DETACHED,
    (State.RETAINED, Event.ATTACH): State.RUNNING,
    (State.RETAINED, Event.CLOSE): State.CLOSED,
    (State.DETACHED, Event.ATTACH): State.RUNNING,
    (State.DETACHED, Event.CLOSE): State.CLOSED,
}


def after(state: State, event: Event) -> State:
    """The state that follows. Raises ContractError for an event that cannot happen to a session in this state."""
    try:
        return _TABLE[state, event]
    except KeyError:
        raise ContractError(f'"{event.value}" cannot happen to a session that is {state.value}') from None
