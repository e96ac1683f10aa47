"""Configuration folders for simulated engines."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.sim.engine import config_folder


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid model's configuration: recurrent states in vLLM's "align" mode."""
    logging.getLogger("vllm").setLevel(logging.ERROR)
    return config_folder("qwen3-next", tmp_path_factory.mktemp("config"))


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An attention-only model's configuration."""
    logging.getLogger("vllm").setLevel(logging.ERROR)
    return config_folder("llama", tmp_path_factory.mktemp("config"))
