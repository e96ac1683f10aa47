"""The tables and charts of benchmarks/policies.py, from the rows of its report."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _common import table
from rich.table import Table

from replay.plots import line_chart
from replay.run import REGRET_REQUESTS

Rows = Sequence[Mapping[str, Any]]


def count(number: int | None) -> str:
    """A capacity, as tables show it."""
    return "all" if number is None else f"{number:,}"


def by_capacity(title: str, rows: Rows, capacities: Sequence[int | None], label: str) -> Table:
    """Hit in percent: one line per value of `label`, the best of its rows; one column per capacity."""
    hits: dict[str, dict[int | None, float]] = {}
    for row in rows:
        line = hits.setdefault(row[label], {})
        line[row["states"]] = max(line.get(row["states"], 0.0), 100 * row["hit"])
    return table(
        title,
        (label, *(count(states) for states in capacities)),
        [
            (name, *(f"{line[states]:.2f}" if states in line else "" for states in capacities))
            for name, line in hits.items()
        ],
    )


def by_trigger(title: str, rows: Rows) -> Table:
    """What became of the states that each trigger wrote."""
    headings = ("triggers", "states", "trigger", "written", "read\nback", "saved tokens\nper written", "evicted")
    return table(
        title,
        (*headings, f"wanted in\n{REGRET_REQUESTS:,} requests", "all written\nper all read"),
        [
            (
                row["triggers"],
                count(row["states"]),
                trigger,
                f"{one['written']:,}",
                f"{one['read_share']:.1%}",
                f"{one['saved_tokens_per_state']:,.0f}",
                f"{one['evicted']:,}",
                f"{one['regret_share']:.1%}",
                f"{row['write_amplification']:.1f}",
            )
            for row in rows
            for trigger, one in row["by_trigger"].items()
        ],
    )


def limited_chains(title: str, rows: Rows) -> Table:
    """Hit in percent where blocks leave, too."""
    return table(
        title,
        ("policy", "blocks", "evicted", "states", "hit %", "chain alone %"),
        [
            (
                row["policy"],
                count(row["blocks"]),
                row["eviction"],
                count(row["states"]),
                f"{100 * row['hit']:.2f}",
                f"{100 * row['chain_hit']:.2f}",
            )
            for row in rows
        ],
    )


def working_sets(row: Mapping[str, Any]) -> Table:
    """Stack distances of one trace: states down, blocks across."""
    return table(
        f"{row['trace']}: what LRU stores of a size would resume, % (by stack distance)",
        ("states \\ blocks", *(count(blocks) for blocks in row["blocks"])),
        [
            (count(states), *(f"{100 * hit:.2f}" for hit in hits))
            for states, hits in zip(row["states"], row["hit"], strict=True)
        ],
    )


def plot(folder: Path, name: str, lines: Mapping[str, Sequence[tuple[float, float]]], working_set: Any) -> None:
    """Two charts of one trace: policies by states, and stack distances by blocks."""
    folder.mkdir(parents=True, exist_ok=True)
    y_label = "hit, % of prompt tokens"
    chart = line_chart(f"{name}: resumed tokens", "states held", y_label, lines)
    (folder / f"policies_{name}.svg").write_text(chart)
    rooms = [float(blocks) for blocks in working_set["blocks"]]
    curves = {
        f"{count(states)} states": list(zip(rooms, (100 * hit for hit in hits), strict=True))
        for states, hits in zip(working_set["states"], working_set["hit"], strict=True)
    }
    chart = line_chart(f"{name}: working set of LRU stores", "blocks held, of 512 tokens", y_label, curves)
    (folder / f"working_set_{name}.svg").write_text(chart)
