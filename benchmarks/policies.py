"""Which states to keep and which to evict: traces replayed through the real coordinator and stores, without bytes.

Hit is the share of all prompt tokens that were resumed past. Baselines evict states in place of the shipped policy;
each is run with the shipped triggers and without the interval, and the better of the two counts.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from _common import console, options, print_goals, table, write_report
from replay.baselines import Arc, Fifo, Lru, Marconi, S3Fifo, Sieve, TwoQueue
from replay.plots import line_chart
from replay.run import DENSE, END, END_JUNCTION, SHIPPED, UNLIMITED, Keep, Outcome, replay
from replay.traces import Trace, generate, read_mooncake

from ucmcache.demo.report import Goal
from ucmcache.store.eviction import Clock, EvictionPolicy, GreedyDual

CAPACITIES = (125, 250, 500, 1000, 2000, 4000, 8000)
SHIPPED_POLICY = "greedy-dual"
POLICIES: Mapping[str, Callable[[int], EvictionPolicy]] = {
    SHIPPED_POLICY: GreedyDual,
    "CLOCK": Clock,
    "LRU": Lru,
    "FIFO": Fifo,
    "SIEVE": Sieve,
    "S3-FIFO": S3Fifo,
    "ARC": Arc,
    "2Q": TwoQueue,
    **{f"Marconi {alpha:g}": partial(Marconi, alpha=alpha) for alpha in (0.0, 0.25, 0.5, 1.0)},
}
# Figures of an earlier, throw-away replay: states held -> % of prompt tokens.
AT_LEAST = {
    "conversation": {250: 20.0, 500: 26.4, 1000: 31.2, 2000: 34.3, 4000: 35.8},
    "synthetic": {250: 48.0, 500: 56.9, 1000: 60.1, 2000: 63.0},
}
_TRACES: dict[str, Trace] = {}  # in each process

Job = tuple[str, Keep, str, int, int]  # trace, triggers, policy, state slots, block slots


def _load(traces: Sequence[Trace]) -> None:
    _TRACES.update((trace.name, trace) for trace in traces)


def _run(job: Job) -> Outcome:
    trace, keep, policy, states, blocks = job
    return replay(_TRACES[trace], keep, states, POLICIES[policy], blocks)


def jobs_of(traces: Sequence[Trace], capacities: Sequence[int], policies: Sequence[str]) -> list[Job]:
    """All replays: triggers without a limit, policies by capacity, and limited chains."""
    jobs: list[Job] = []
    for trace in traces:
        jobs += [
            (trace.name, keep, SHIPPED_POLICY, UNLIMITED, UNLIMITED) for keep in (END, END_JUNCTION, SHIPPED, DENSE)
        ]
        for states in capacities:
            jobs += [
                (trace.name, keep, policy, states, UNLIMITED) for keep in (SHIPPED, END_JUNCTION) for policy in policies
            ]
        jobs += [(trace.name, SHIPPED, SHIPPED_POLICY, 1000, max(1, trace.distinct_blocks // part)) for part in (10, 3)]
    return jobs


def row_of(job: Job, outcome: Outcome) -> dict[str, Any]:
    """One replay as the report keeps it."""
    trace, keep, policy, states, blocks = job
    return {
        "trace": trace,
        "triggers": keep.name,
        "policy": policy,
        "states": None if states == UNLIMITED else states,
        "blocks": None if blocks == UNLIMITED else blocks,
        "hit": outcome.hit,
        "chain_hit": outcome.chain_tokens / outcome.prompt_tokens,
        "lost": {cause: tokens / outcome.prompt_tokens for cause, tokens in sorted(outcome.lost.items())},
        "by_trigger": {
            str(trigger): {
                "written": written,
                "read_share": outcome.first_reads[trigger] / written,
                "saved_tokens_per_state": outcome.saved[trigger] / written,
            }
            for trigger, written in sorted(outcome.written.items())
        },
        "writes_per_state_read": sum(outcome.written.values()) / max(1, sum(outcome.first_reads.values())),
        "regret": outcome.lost["evicted"] / outcome.prompt_tokens,
    }


def best(rows: Sequence[Mapping[str, Any]], trace: str, policy: str, states: int) -> float:
    """Hit of a policy in percent: the shipped one with the shipped triggers, a baseline with the better ones."""
    return 100 * max(
        float(row["hit"])
        for row in rows
        if (row["trace"], row["policy"], row["states"], row["blocks"]) == (trace, policy, states, None)
        and (policy != SHIPPED_POLICY or row["triggers"] == SHIPPED.name)
    )


def unlimited(rows: Sequence[Mapping[str, Any]], trace: str, keep: Keep) -> Mapping[str, Any]:
    """The row of a replay that evicts nothing."""
    return next(row for row in rows if (row["trace"], row["triggers"], row["states"]) == (trace, keep.name, None))


def goals_of(
    rows: Sequence[Mapping[str, Any]], traces: Sequence[Trace], capacities: Sequence[int], policies: Sequence[str]
) -> list[Goal]:
    """The issue's goals, on every trace."""
    goals = []
    for name in (trace.name for trace in traces):
        share = unlimited(rows, name, SHIPPED)["hit"] / unlimited(rows, name, DENSE)["hit"]
        goals.append(Goal(f"{name}_of_dense_ceiling", round(share, 4), ">= 0.98", "ratio", share >= 0.98))
        for states in capacities:
            ours = best(rows, name, SHIPPED_POLICY, states)
            rival = max((best(rows, name, policy, states), policy) for policy in policies if policy != SHIPPED_POLICY)
            ahead = round(ours - rival[0], 2)
            goals.append(Goal(f"{name}_{states}_ahead_of_{rival[1]}", ahead, "> 0", "points", ahead > 0))
            if states in AT_LEAST.get(name, {}):
                limit = AT_LEAST[name][states]
                goals.append(Goal(f"{name}_{states}_hit", round(ours, 2), f">= {limit:g}", "%", ours >= limit))
    return goals


def show(
    rows: Sequence[Mapping[str, Any]], traces: Sequence[Trace], capacities: Sequence[int], policies: Sequence[str]
) -> None:
    """All tables."""
    out = console()
    for name in (trace.name for trace in traces):
        out.print(
            table(
                f"{name}: triggers, nothing evicted",
                ("", "hit %", "of chain", "states", "read back", "writes/read"),
                [
                    (
                        keep.name,
                        f"{100 * row['hit']:.2f}",
                        f"{row['hit'] / row['chain_hit']:.1%}",
                        f"{sum(one['written'] for one in row['by_trigger'].values()):,}",
                        " ".join(f"{trigger} {one['read_share']:.1%}" for trigger, one in row["by_trigger"].items()),
                        f"{row['writes_per_state_read']:.1f}",
                    )
                    for keep in (END, END_JUNCTION, SHIPPED, DENSE)
                    for row in [unlimited(rows, name, keep)]
                ],
            )
        )
        out.print(
            table(
                f"{name}: hit in % by states held",
                ("", *(f"{states:,}" for states in capacities)),
                [(policy, *(f"{best(rows, name, policy, n):.2f}" for n in capacities)) for policy in policies],
            )
        )
        out.print(
            table(
                f"{name}: the shipped policy",
                ("states", "blocks", "hit %", "regret %", "saved tokens per state written"),
                [
                    (
                        f"{row['states']:,}",
                        "all" if row["blocks"] is None else f"{row['blocks']:,}",
                        f"{100 * row['hit']:.2f}",
                        f"{100 * row['regret']:.2f}",
                        " ".join(f"{t} {one['saved_tokens_per_state']:,.0f}" for t, one in row["by_trigger"].items()),
                    )
                    for row in rows
                    if row["trace"] == name
                    and (row["policy"], row["triggers"]) == (SHIPPED_POLICY, SHIPPED.name)
                    and row["states"] is not None
                ],
            )
        )


def plot(
    folder: Path,
    rows: Sequence[Mapping[str, Any]],
    traces: Sequence[Trace],
    capacities: Sequence[int],
    policies: Sequence[str],
) -> None:
    """One chart per trace."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (trace.name for trace in traces):
        lines = {policy: [(float(n), best(rows, name, policy, n)) for n in capacities] for policy in policies}
        chart = line_chart(f"{name}: resumed tokens", "states held", "hit, % of prompt tokens", lines)
        (folder / f"policies_{name}.svg").write_text(chart)


def _arguments() -> argparse.Namespace:
    parser = options("Retention and eviction of recurrent states, on request traces.")
    parser.add_argument("--traces", type=Path, metavar="FOLDER", help="of mooncake_*.jsonl (default: generated only)")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="write SVG charts there")
    parser.add_argument("--processes", type=int, default=2)
    return parser.parse_args()


def main() -> int:
    """Replay, show, and write the report."""
    arguments = _arguments()
    traces = (
        [read_mooncake(path) for path in sorted(arguments.traces.glob("mooncake_*.jsonl"))] if arguments.traces else []
    )
    traces.append(generate(1500 if arguments.quick else 8000))
    capacities = CAPACITIES[1:4] if arguments.quick else CAPACITIES
    policies = list(POLICIES)
    jobs = jobs_of(traces, capacities, policies)
    with ProcessPoolExecutor(arguments.processes, initializer=_load, initargs=(traces,)) as pool:
        rows = [row_of(job, outcome) for job, outcome in zip(jobs, pool.map(_run, jobs), strict=True)]
    show(rows, traces, capacities, policies)
    goals = goals_of(rows, traces, capacities, policies)
    print_goals(goals)
    write_report(arguments.json_file, rows, goals)
    if arguments.plots:
        plot(arguments.plots, rows, traces, capacities, policies)
    return 0


if __name__ == "__main__":
    sys.exit(main())
