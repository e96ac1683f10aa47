"""Every kind of model that vLLM runs on CPU: all legs give the tokens of an engine without a cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.process import run

pytestmark = pytest.mark.e2e

MODELS = ["llama", "gemma3", "gpt-oss", "lfm2", "qwen3-next"]
Checkpoint = Callable[[str], Path]


@pytest.mark.parametrize(("shape", "ranks"), [*((shape, 1) for shape in MODELS), ("qwen3-next", 2)])
def test_cold_external_local_and_restarted_agree(
    shape: str, ranks: int, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    arguments: dict[str, Any] = {
        "model": str(checkpoint(shape)),
        # A model this small computes faster than any disk reads.
        "extra": {"backend": {"url": (tmp_path / "store").as_uri(), "when_slow": "load"}},
        "options": {"max_num_batched_tokens": 1024, "tensor_parallel_size": ranks},
        "keeps_states_sparsely": shape != "llama",
    }
    first = run("legs", arguments)
    arguments |= {key: first[key] for key in ("block", "first", "answer")}
    plain = run("reference", arguments)
    second = run("again", {**arguments, "options": {**arguments["options"], "disable_log_stats": False}})
    block = first["block"]
    for cold, warm, expected in zip(first["rows"], second["rows"], plain["rows"], strict=True):
        length = cold["prompt"]
        deepest = (length - 1) // block * block
        legs = {name: cold[name] for name in ("cold", "external", "local")} | {
            "disk": warm["disk"],
            "local after disk": warm["local"],
        }
        assert {name: leg["tokens"] for name, leg in legs.items()} == dict.fromkeys(legs, expected["tokens"]), length
        assert cold["external"]["external"] == warm["disk"]["external"] == deepest, length
        assert (cold["external"]["bytes"] > 0) == (deepest > 0), length
        assert cold["local"]["external"] == warm["local"]["external"] == 0, length
        assert cold["local"]["local"] == deepest, length
    # The second turn resumes past the first prompt, in what was generated; so does the engine's own cache in `plain`.
    assert first["answer"] == plain["answer"]
    for turn in (first["turn"], second["turn"]):
        assert turn["external"] == plain["turn"]["local"] == 2 * block > len(first["first"])
        assert turn["tokens"] == plain["turn"]["tokens"]
    for continued in (first["continued"], second["continued"]):
        assert continued["external"] == 2 * block
        assert continued["tokens"] == first["answer"][2 * block - len(first["first"]) + 1 :][: len(continued["tokens"])]
    for one, expected in zip(first["crowd"], plain["crowd"], strict=True):
        assert one["external"] == expected["local"]
        assert one["tokens"] == expected["tokens"]
    assert len(first["crowd"]) == 8
    assert all(one["external"] for one in first["crowd"])
    assert second["counts"]["read_bytes"] > 0
    # vLLM's own Prometheus registry tells the same.
    for name in ("promised_tokens", "loaded_tokens", "adopted_tokens", "loaded_bytes", "read_bytes"):
        assert second["metrics"][f"vllm:ucmcache_{name}"] == second["counts"][name] > 0
    assert first["jobs"] == first["lost_blocks"] == 0
    assert not [name for name in (*first["counts"], *second["counts"]) if name.startswith("failures")]
