"""BlockStore: the units of chain groups, content-addressed and immutable."""

from __future__ import annotations

from ucmcache.store.units import UnitStore


class BlockStore(UnitStore):
    """Blocks of attention-like groups: one copy per content, found by the engine's hash of the prefix they end.

    Evicts by CLOCK. A block is of use together with every block before it that its group still needs.
    """
