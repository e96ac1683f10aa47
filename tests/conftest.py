"""How the tests share two cores: engines one after the other on one of them, all else on the other."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start engines stay together: two engines at once would wait for each other's cores."""
    for item in items:
        if item.get_closest_marker("e2e") is not None:
            item.add_marker(pytest.mark.xdist_group("engines"))
    # The longest first, so that nothing is left over at the end; but engines of several ranks when all else is done.
    items.sort(key=lambda item: (item.get_closest_marker("e2e") is None, item.get_closest_marker("ranks") is not None))
