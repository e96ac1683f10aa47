"""What `ucmcache demo` says about its numbers: the table, the JSON, the goals and the exit code. All of it pure."""

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

_NUMBER_HEADINGS = (
    "prompt\ntokens",
    "resumed\ntokens",
    "TTFT\ncold",
    "TTFT\nlocal",
    "TTFT\nrestart",
    "over\nlocal",
    "over\ncold",
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One row of the result: the same prompt computed cold, from vLLM's own cache, and after a restart."""

    turn: str
    prompt_tokens: int
    resumed_tokens: int  # taken from the connector after the restart
    ttft_cold_s: float
    ttft_local_s: float
    ttft_restart_s: float
    differs_at: int | None  # the first output token that is not the reference's

    @property
    def over_local(self) -> float:
        """TTFT after the restart as a multiple of a local hit's."""
        return self.ttft_restart_s / self.ttft_local_s

    @property
    def over_cold(self) -> float:
        """TTFT after the restart as a share of the cold one."""
        return self.ttft_restart_s / self.ttft_cold_s


@dataclass(frozen=True, slots=True)
class Goal:
    """A measured value beside what it is meant to be."""

    name: str
    value: float | int | bool
    goal: str
    unit: str
    met: bool


def goals_of(turns: Sequence[Turn]) -> list[Goal]:
    """The four goals; times are those of the document, the one prompt that can only come from the folder."""
    document = turns[0]
    resumed = sum(turn.resumed_tokens for turn in turns)
    equal = all(turn.differs_at is None for turn in turns)
    over_local, over_cold = round(document.over_local, 3), round(document.over_cold, 3)
    return [
        Goal("ttft_after_restart_over_local", over_local, "<= 1.25", "ratio", over_local <= 1.25),
        Goal("ttft_after_restart_over_cold", over_cold, "<= 0.10", "ratio", over_cold <= 0.10),
        Goal("resumed_tokens_after_restart", resumed, "> 0", "tokens", resumed > 0),
        Goal("outputs_equal", equal, "true", "", equal),
    ]


def verdict(turns: Sequence[Turn]) -> tuple[int, str]:
    """Exit code and, when it is not 0, the one line that says why. Times do not decide: they are the machine's."""
    for turn in turns:
        if turn.differs_at is not None:
            return 1, f"{turn.turn}: output token {turn.differs_at} is not the one that plain vLLM computes"
    if not any(turn.resumed_tokens for turn in turns):
        return 1, "nothing was resumed after the restart: every prompt was computed again"
    return 0, ""


def report_json(turns: Sequence[Turn], totals: Mapping[str, Any], provenance: Mapping[str, str]) -> dict[str, Any]:
    """The table's numbers as JSON: where they come from, one row per turn (times in seconds), the goals, the totals."""
    rows = [
        {
            **asdict(turn),
            "over_local": round(turn.over_local, 3),
            "over_cold": round(turn.over_cold, 3),
            "outputs_equal": turn.differs_at is None,
        }
        for turn in turns
    ]
    return {**provenance, "rows": rows, "goals": [asdict(goal) for goal in goals_of(turns)], "totals": dict(totals)}


def render(turns: Sequence[Turn], totals: Mapping[str, Any]) -> Table:
    """The one table that the demo prints, within 80 columns."""
    title = "The same conversation after an engine restart (TTFT in ms)"
    table = Table(title=title, caption=_caption(turns, totals), box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("turn", no_wrap=True)
    for heading in _NUMBER_HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("outputs\nequal", no_wrap=True)
    for turn in turns:
        table.add_row(
            turn.turn,
            f"{turn.prompt_tokens:,}",
            f"{turn.resumed_tokens:,}",
            *(f"{ttft_s * 1000:,.0f}" for ttft_s in (turn.ttft_cold_s, turn.ttft_local_s, turn.ttft_restart_s)),
            f"{turn.over_local:.2f}",
            f"{turn.over_cold:.3f}",
            "yes" if turn.differs_at is None else "NO",
        )
    return table


def _caption(turns: Sequence[Turn], totals: Mapping[str, Any]) -> str:
    resumed, prompt = sum(turn.resumed_tokens for turn in turns), sum(turn.prompt_tokens for turn in turns)
    goals = (
        f"{goal.name} {goal.value}, goal {goal.goal}: {'met' if goal.met else 'MISSED'}" for goal in goals_of(turns)
    )
    return "\n".join(
        [
            f"{resumed:,} of {prompt:,} prompt tokens resumed; {totals['disk_bytes'] / 2**20:,.1f} MiB on disk; "
            f"{totals['seconds']:.0f} s in all",
            *goals,
        ]
    )


def provenance(command: str) -> dict[str, str]:
    """The machine, the commit ("unknown" outside a checkout of ucmcache) and the command that made a report."""
    git = ["git", "-C", str(Path(__file__).parent)]
    commit = "unknown"
    # An installed copy may lie inside somebody else's repository, whose commit says nothing about it.
    if shutil.which("git") and _run([*git, "ls-files", "--error-unmatch", __file__]) is not None:
        commit = _run([*git, "rev-parse", "HEAD"]) or commit
    machine = f"{_cpu_name()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"
    return {"machine": machine, "commit": commit, "command": command}


def _run(command: Sequence[str]) -> str | None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_name() -> str:
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.exists():
        for line in cpu_info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
