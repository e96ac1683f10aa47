"""The tables of docs/sessions.md and the README, as the benchmark's rows make them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Rows = Sequence[Mapping[str, Any]]
# What the article measured: turn 2 and the side request again, by entries; what a turn resumed at, by shape; by mode.
S2_CAPACITY = [("0", "0"), ("961", "0"), ("957", "0"), ("957", "311"), ("957", "311")]
S2_SHAPES = {"D1": "1,035", "D2": "1,032", "D2'": "1,037", "T1": "980", "T5": "979"}
MODELS = {"demo": "Qwen3-Next", "gemma3": "Gemma-3"}
S2_MODES = {"G1": "979 / 979", "G2": "1,035 / 979", "G3": "1,030 / 979", "G4": "1,035 / 1,035"}


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), *lines))


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _of(rows: Rows, measured: str) -> Rows:
    return [row for row in rows if row["measured"] == measured]


def capacity_table(rows: Rows) -> str:
    """What the third and fourth request resumed at, by entries."""
    return _table(
        ("entries", "conversation's turn 2", "side request again", "article: turn 2", "article: side request"),
        [
            (str(row["entries"]), str(row["cached"][2]), str(row["cached"][3]), *S2_CAPACITY[row["entries"]])
            for row in _of(rows, "capacity")
        ],
    )


def shapes_table(rows: Rows) -> str:
    """What a next turn resumed at, by its shape."""
    return _table(
        ("shape", "prompt", "resumed", "computed", "text equals its control's", "article: resumed"),
        [
            (
                row["shape"],
                *(f"{row[name]:,}" for name in ("prompt", "cached", "computed")),
                _yes(row["equal"]),
                S2_SHAPES[row["shape"]],
            )
            for row in _of(rows, "shape")
        ],
    )


def modes_table(rows: Rows) -> str:
    """Keep-current beside drop-current."""
    heads = ("shape", "model", "prompt", "resumed, keep / drop", "TTFT, keep / drop")
    return _table(
        (*heads, "text equals its control's, keep / drop", "same text", "article: keep / drop"),
        [
            (
                row["shape"],
                MODELS[row["model"]],
                f"{row['prompt']:,}",
                f"{row['keep']:,} / {row['drop']:,}",
                f"{row['keep_ttft_s'] * 1000:.0f} / {row['drop_ttft_s'] * 1000:.0f} ms",
                f"{_yes(row['keep_equal'])} / {_yes(row['drop_equal'])}",
                _yes(row["equal"]),
                S2_MODES[row["shape"]],
            )
            for row in _of(rows, "mode")
        ],
    )


def agent_table(rows: Rows) -> str:
    """Turns of agents, from the second on."""
    agents = [row for row in _of(rows, "agent") if row["turn"] > 1]
    vllm = [row["ttft_s"] for row in agents if row["engine"] == "vLLM"]
    lines = []
    for name in dict.fromkeys(row["engine"] for row in agents):
        own = [row for row in agents if row["engine"] == name]
        ratio = statistics.median(row["ttft_s"] / other for row, other in zip(own, vllm, strict=True))
        at = next(row["cached"] for row in _of(rows, "turn 2") if row["engine"] == name)
        lines.append(
            (
                name,
                f"{statistics.fmean(row['new'] for row in own):.0f}",
                f"{statistics.fmean(row['computed'] for row in own):.0f}",
                f"{max(row['computed'] - row['new'] for row in own):,}",
                f"{statistics.median(row['ttft_s'] for row in own) * 1000:.0f} ms",
                f"{ratio:.2f}",
                f"{at:,}",
            )
        )
    heads = ("engine", "new tokens a turn", "computed", "at most beyond the new", "TTFT", "over vLLM")
    return _table((*heads, "turn of 1,750 tokens resumes at"), lines)
