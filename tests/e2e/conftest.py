"""What every end-to-end test needs: a checkpoint to start an engine on."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ucmcache.demo.checkpoints import write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(pytestconfig: pytest.Config) -> Callable[[str], Path]:
    """A function from a shape's name to its checkpoint, made once and kept in pytest's cache folder."""
    folder = pytestconfig.rootpath / ".pytest_cache" / "ucmcache-checkpoints"

    def make(shape: str) -> Path:
        path = folder / shape
        write_checkpoint(shape, path)
        return path

    return make
