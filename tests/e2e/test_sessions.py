"""Conversations on real vLLM resume at the very token where they stopped, and say what they would have said."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.process import run
from tests.e2e.talks import ANSWER, CUTS

pytestmark = pytest.mark.e2e

COUNT = int(os.environ.get("UCMCACHE_TALKS", "3"))  # of each model; 17 make it fifty
BLOCKS = {"llama": 128, "gemma3": 128, "lfm2": 128, "qwen3-next": 384}
# To vLLM itself a prefill is not the same when it is split elsewhere: in GDN's scan, and in its CPU kernel of rotary
# embeddings, which is wrong for queries of three dimensions, as LFM2's are.
SPLIT_DEPENDENT = {"lfm2", "qwen3-next"}


@pytest.mark.parametrize("shape", list(BLOCKS))
def test_conversations_go_on_at_the_very_token(shape: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """By the continuation control: what was generated at once, cut into turns, must go on as it did."""
    arguments: dict[str, Any] = {
        "model": str(checkpoint(shape)),
        "count": COUNT,
        "block": BLOCKS[shape],
        "extra": {
            "backend": {"url": (tmp_path / "store").as_uri(), "when_slow": "load"},
            "sessions": {"entries": 3 * COUNT},  # aborted requests are kept, too
        },
        "options": {"max_num_batched_tokens": 1024, "max_num_seqs": 2},
    }
    control = run("talks.reference", arguments)
    answers = control["answers"]
    told = run("talks.talks", {**arguments, "answers": answers})
    assert told["block"] == BLOCKS[shape]
    for row in told["rows"]:
        begin = row["begin"]
        assert row["tokens"] == answers[row["talk"]][begin : begin + len(row["tokens"])], row
        # The last token of what was said has not been computed yet: the rest is resumed.
        assert (row["external"], row["local"]) == ((row["text"] - 1, 0) if begin else (0, 0)), row
    for row, expected in zip(told["restores"], control["others"], strict=True):
        assert row["external"] == row["at"], row
        if shape not in SPLIT_DEPENDENT:
            assert row["tokens"] == expected
    again = run("talks.after_a_restart", {**arguments, "answers": answers})
    for row, answer in zip(again["rows"], answers, strict=True):
        assert row["external"] == row["text"] - 1
        assert row["tokens"] == answer[CUTS[-1] : ANSWER]
    counts = told["counts"]
    assert counts["frontier_appends"] == (len(CUTS) - 1) * COUNT
    assert counts["turn_restores"] == COUNT
    assert counts["detaches"] > 0 and told["held"] > 0
    assert told["pinned"] == told["lost_blocks"] == 0
    assert not [name for name in counts if name.startswith("failures")]


def test_both_modes_say_the_same(checkpoint: Callable[[str], Path]) -> None:
    """On a model whose numbers do not depend on how a prompt is split; what was dropped is computed again."""
    arguments: dict[str, Any] = {
        "model": str(checkpoint("gemma3")),
        "count": COUNT,
        "block": BLOCKS["gemma3"],
        "options": {"max_num_batched_tokens": 1024, "max_num_seqs": 1},
    }
    arguments["answers"] = run("talks.reference", arguments)["answers"]
    told = {
        mode: run("talks.talks", {**arguments, "extra": {"sessions": {"entries": 3 * COUNT, "mode": mode}}})
        for mode in ("keep-current", "drop-current")
    }
    for keep, drop in zip(told["keep-current"]["rows"], told["drop-current"]["rows"], strict=True):
        assert (
            keep["tokens"]
            == drop["tokens"]
            == arguments["answers"][keep["talk"]][keep["begin"] :][: len(keep["tokens"])]
        )
        if not keep["begin"]:
            continue
        frontier = keep["text"] - 1
        boundary = keep["text"] - keep["begin"] + max(cut for cut in (0, *CUTS) if cut < keep["begin"])
        block = frontier // BLOCKS["gemma3"] * BLOCKS["gemma3"]
        assert keep["external"] == frontier
        # The lane that was used last has both still; a whole block beyond the boundary is had, too.
        assert drop["external"] in (frontier, max(boundary, block))
    assert any(row["external"] < row["text"] - 1 for row in told["drop-current"]["rows"] if row["begin"])
    restores = [[row["tokens"] for row in one["restores"]] for one in told.values()]
    assert restores[0] == restores[1]
