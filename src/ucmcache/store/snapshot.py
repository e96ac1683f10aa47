"""SnapshotStore: the states of recurrent groups, keyed by position and prefix."""

from __future__ import annotations

from ucmcache.store.units import UnitStore


class SnapshotStore(UnitStore):
    """States of recurrent groups: each stands for exactly one prefix and one position, and serves no other.

    A load copies the state into the request's own block, so a request never writes into a stored state.
    """
