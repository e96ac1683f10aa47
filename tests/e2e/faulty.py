"""Backends that misbehave, by URL: `flaky+file:///…` fails 20 % of its calls, `slow+…` takes 200 ms, `hung+…` hangs.

Imported by an engine's processes as one of its `spec_modules`, which are imported before any backend is opened.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from ucmcache.store import backend
from ucmcache.store.backend import Backend
from ucmcache.store.testing import FlakyBackend, HungBackend, SlowBackend

_chance = random.Random(20)


def _fails(operation: str) -> bool:
    return operation not in ("bucket", "close") and _chance.random() < 0.2


_WRAPPERS: dict[str, Callable[[Backend], Backend]] = {
    "flaky": lambda inner: FlakyBackend(inner, _fails),
    "slow": lambda inner: SlowBackend(inner, 0.2),
    "hung": lambda inner: HungBackend(inner, lambda operation: operation not in ("bucket", "close")),
}


class _Point(NamedTuple):
    name: str
    make: Callable[[str, int | None], Backend]

    def load(self) -> Callable[[str, int | None], Backend]:
        return self.make


def _point(name: str) -> _Point:
    def make(url: str, capacity_bytes: int | None) -> Backend:
        return _WRAPPERS[name](backend.open_backend(url.partition("+")[2], capacity_bytes))

    return _Point(f"{name}+file", make)


def _entry_points(group: str) -> Any:
    assert group == backend.ENTRY_POINTS
    return [_point(name) for name in _WRAPPERS]


setattr(backend, "entry_points", _entry_points)
