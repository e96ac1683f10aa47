"""Whatever a backend does, every output is that of an engine without a cache, and nobody waits for it in vain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.process import run

pytestmark = pytest.mark.e2e

Checkpoint = Callable[[str], Path]


def _arguments(model: Path, store: Path, fault: str) -> dict[str, Any]:
    return {
        "model": str(model),
        "extra": {
            "backend": {
                "url": f"{fault}+{store.as_uri()}",
                "when_slow": "load",
                "deadline": "500ms" if fault == "hung" else "2s",
            },
            "promise_deadline": "500ms" if fault == "hung" else "60s",
            "spec_modules": ["tests.e2e.faulty"],
        },
        "options": {"max_num_batched_tokens": 1024},
        "keeps_states_sparsely": True,
    }


@pytest.mark.parametrize("fault", ["flaky", "slow", "hung"])
def test_a_backend_that_misbehaves_changes_no_output(fault: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    arguments = _arguments(checkpoint("qwen3-next"), tmp_path / "store", fault)
    first = run("legs", arguments)
    arguments |= {key: first[key] for key in ("block", "first", "answer")}
    plain = run("reference", arguments)
    second = run("again", {**arguments, "options": {**arguments["options"], "disable_log_stats": False}})
    block = first["block"]
    from_disk = 0
    for cold, warm, expected in zip(first["rows"], second["rows"], plain["rows"], strict=True):
        legs = {**{name: cold[name] for name in ("cold", "external", "local")}, "disk": warm["disk"]}
        assert {name: leg["tokens"] for name, leg in legs.items()} == dict.fromkeys(legs, expected["tokens"])
        # What is in host memory does not need the backend.
        deepest = (cold["prompt"] - 1) // block * block
        assert cold["external"]["external"] == deepest
        assert warm["disk"]["external"] == deepest if fault == "slow" else warm["disk"]["external"] <= deepest
        from_disk += warm["disk"]["external"]
    for turn in (first["turn"], second["turn"]):
        # The numbers depend on where a prefill is split: only resumes at the same token compare.
        assert turn["tokens"] == plain["turn"]["tokens"] or turn["external"] != plain["turn"]["local"]
    assert [one["tokens"] for one in first["crowd"]] == [one["tokens"] for one in plain["crowd"]]
    failures = sum(n for one in (first, second) for name, n in one["counts"].items() if name.startswith("failures/"))
    retried = sum(one["counts"].get("retried_calls", 0) for one in (first, second))
    if fault == "hung":
        assert failures > 0
        assert first["counts"]["breaker_openings"] >= 1
        assert second["counts"].get("read_bytes", 0) == 0
    else:
        assert from_disk > 0 and second["counts"]["read_bytes"] > 0
        assert first["jobs"] == first["lost_blocks"] == 0
        assert (retried > 0) == (fault == "flaky")
    for one in (first, second):
        assert one["shutdown_s"] < 5.0
        assert one["storage_threads"] <= 6  # three for the worker's calls, two that ask, one that makes room
