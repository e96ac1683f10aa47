"""Several ranks, each a process of its own: what they hold alike is kept once, and every rank reads it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.process import run

pytestmark = pytest.mark.e2e

Checkpoint = Callable[[str], Path]


def test_mla_is_kept_once_and_read_by_both_ranks(checkpoint: Checkpoint, tmp_path: Path) -> None:
    results: dict[tuple[int, str], Any] = {}
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        arguments: dict[str, Any] = {
            "model": str(checkpoint("deepseek-v2")),
            "extra": {"backend": {"url": folder.as_uri(), "when_slow": "load"}},
            "options": {"tensor_parallel_size": ranks},
        }
        fresh = results[ranks, "fresh"] = run("mla_ranks", arguments)
        results[ranks, "restarted"] = run("mla_ranks", {**arguments, "answers": fresh["answers"]})
        buckets = Counter(file.parents[1].name for file in folder.rglob("*.kv"))
        assert buckets == {"r0": fresh["counts"]["saved_blocks"]}
    for (ranks, _), result in results.items():
        assert len(result["rows"]) >= 4
        for row in result["rows"]:
            assert row["external"] == row["prompt"] - 1, (ranks, row["prompt"])
            assert row["tokens"][: len(row["expected"])] == row["expected"], (ranks, row["prompt"])
            assert row["expected"]
        assert result["jobs"] == 0
        assert not [name for name in result["counts"] if name.startswith("failures")]
    one, two = (results[ranks, "fresh"]["counts"] for ranks in (1, 2))
    for name in ("saved_blocks", "saved_bytes", "written_bytes"):
        assert two[name] == one[name] > 0
    assert two["loaded_bytes"] == 2 * one["loaded_bytes"] > 0
    assert results[2, "restarted"]["counts"]["read_bytes"] == results[1, "restarted"]["counts"]["read_bytes"] > 0
