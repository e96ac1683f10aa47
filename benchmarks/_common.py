"""What every benchmark needs: its options, its report, and what else the machine was doing meanwhile."""

import argparse
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ucmcache.demo.report import Goal, provenance

_STAT = Path("/proc/stat")
_IDLE_FIELDS = (3, 4)  # idle and iowait; guest time is part of user time
_COUNTED_FIELDS = 8
_NEIGHBOURS_TOLERATED = 0.25  # CPUs that other processes may want beyond those there are


def options(description: str) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", dest="json_file", help="write the numbers to FILE too")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter measurements, within a minute")
    return parser


def below(name: str, value: float, limit: float, unit: str = "ratio") -> Goal:
    """A goal that is met up to `limit`."""
    value = round(value, 4)
    return Goal(name, value, f"<= {limit:g}", unit, value <= limit)


def above(name: str, value: float, limit: float, unit: str = "ratio") -> Goal:
    """A goal that is met from `limit` on."""
    value = round(value, 4)
    return Goal(name, value, f">= {limit:g}", unit, value >= limit)


def ms(seconds: float) -> str:
    """Milliseconds, as tables show them."""
    return f"{seconds * 1000:,.1f}"


def median_ratio(times: Iterable[float], references: Iterable[float]) -> float:
    """The median of ratios between neighbours, which what else the machine did met alike."""
    return statistics.median(one / other for one, other in zip(times, references, strict=True))


def table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A plain table: the first column is text, the rest are numbers."""
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, heading in enumerate(headings):
        made.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        made.add_row(*row)
    return made


def console() -> Console:
    """Where tables go; as wide as they need when it is no terminal."""
    return Console() if sys.stdout.isatty() else Console(width=170)


def print_goals(goals: Sequence[Goal]) -> None:
    """One line per goal, met or not."""
    for goal in goals:
        print(f"{goal.name} {goal.value} {goal.unit}, goal {goal.goal}: {'met' if goal.met else 'MISSED'}")


def write_report(path: Path | None, rows: Sequence[Mapping[str, Any]], goals: Sequence[Goal], **further: Any) -> None:
    """The numbers as JSON, if a file was asked for; `further` are keys beside rows and goals."""
    if path is None:
        return
    report = {
        **provenance(shlex.join(["python", *sys.argv])),
        "rows": [dict(row) for row in rows],
        "goals": [asdict(goal) for goal in goals],
        **further,
    }
    path.write_text(json.dumps(report, indent=2) + "\n")


def warn_if_busy(rows: Sequence[Mapping[str, Any]], threads: int | None) -> None:
    """Say so if more CPUs were wanted than there are; `threads` is what the benchmark took, None for all."""
    cpus = os.cpu_count() or 1
    wanted = (threads or cpus) + max(row["neighbour_cpus"] for row in rows)
    if wanted > cpus + _NEIGHBOURS_TOLERATED:
        print(
            "WARNING: in some rows (see neighbours) more CPUs were wanted than there are: their times mean little. "
            "Wait for a quiet machine, or leave CPUs to the neighbours with --threads."
        )


class Neighbours:
    """CPUs that other processes kept busy, from `start` on: on a shared machine, what a time is worth."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin a new interval."""
        self._wall_s, self._busy_s, self._own_s = time.perf_counter(), _busy_s(), time.process_time()

    def cpus(self) -> float:
        """CPUs that were busy on average and not with this process; the kernel counts in steps of 10 ms."""
        wall_s = time.perf_counter() - self._wall_s
        others_s = (_busy_s() - self._busy_s) - (time.process_time() - self._own_s)
        return max(0.0, others_s / wall_s) if wall_s else 0.0


def _busy_s() -> float:
    if not _STAT.exists():
        return time.process_time()
    fields = [int(field) for field in _STAT.read_text().split("\n", 1)[0].split()[1 : 1 + _COUNTED_FIELDS]]
    busy = sum(fields) - sum(fields[number] for number in _IDLE_FIELDS)
    return busy / os.sysconf("SC_CLK_TCK")
