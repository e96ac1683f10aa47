"""How the tests share two cores: engines (tests/e2e) one after the other on one of them, all else on the other."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, so that nothing is left over at the end; engines of several ranks when all else is done."""
    items.sort(key=lambda item: (item.get_closest_marker("e2e") is None, item.get_closest_marker("ranks") is not None))
