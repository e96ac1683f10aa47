"""Where the time to the first token goes: an engine's steps, and the phases that they add up to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from _common import ms, table
from rich.table import Table

from serving.engines import NAMES

_COUNTS = ("idle_steps", "compute_steps")
_TIMES = ("admit_s", "wait_s", "load_s", "hooks_s", "compute_s", "rest_s")


@dataclass(frozen=True, slots=True)
class Step:
    """One step of an engine, and of it what the connector took."""

    started_s: float
    taken_s: float
    tokens: int  # scheduled; 0 in a step that only waited or moved bytes
    hooks_s: float
    load_s: float  # of it, in start_load_kv


def phases(began: float, ttft_s: float, steps: Sequence[Step]) -> dict[str, float]:
    """Where the time to the first token went; `rest_s` is what lies between the steps and in vLLM's front end."""
    steps = [step for step in steps if step.started_s - began < ttft_s]
    idle = [step for step in steps if not step.tokens]
    computing = [step for step in steps if step.tokens]
    parts = {
        "idle_steps": len(idle),
        "compute_steps": len(computing),
        "admit_s": steps[0].started_s - began,
        "wait_s": sum(step.taken_s - step.load_s for step in idle),
        "load_s": sum(step.load_s for step in idle),
        "hooks_s": sum(step.hooks_s for step in computing),
        "compute_s": sum(step.taken_s - step.hooks_s for step in computing),
    }
    return {**parts, "rest_s": ttft_s - sum(value for name, value in parts.items() if name.endswith("_s"))}


def breakdown_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The phases of every hit."""
    return table(
        "Where the time to the first token goes (ms, medians)",
        ("", "case", "idle steps", "steps", "admit", "wait", "load", "hooks", "compute", "rest", "TTFT"),
        [
            (
                NAMES[row["variant"]],
                row["case"],
                *(f"{row['phases'][name]:.0f}" for name in _COUNTS),
                *(ms(row["phases"][name]) for name in _TIMES),
                ms(row["ttft_s"]),
            )
            for row in rows
            if row["case"] != "cold"
        ],
    )
