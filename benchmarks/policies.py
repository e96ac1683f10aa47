"""Which states to keep and which to evict: traces replayed through the real coordinator and stores, without bytes.

Hit is the share of all prompt tokens that were resumed past. Baselines evict states in place of the shipped policy;
each is run with the shipped triggers and without the interval, and the better of the two counts. The ceilings are a
state at every block without a limit, and (an approximation) states that leave by their farthest next read. The
generated trace was not used to choose anything.
"""

import argparse
import gc
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from _common import console, options, print_goals, write_report
from replay.baselines import Arc, Belady, Clock, Fifo, Lru, Marconi, S3Fifo, Sieve, TwoQueue
from replay.run import DENSE, END, END_JUNCTION, SHIPPED, UNLIMITED, Event, Keep, Outcome, replay
from replay.tables import by_capacity, by_trigger, limited_chains, plot, working_sets
from replay.traces import Trace, generate, read_mooncake
from replay.working_set import working_set

from ucmcache.demo.report import Goal
from ucmcache.store.eviction import EvictionPolicy, GreedyDual

CAPACITIES = (125, 250, 500, 1000, 2000, 4000, 8000)
QUICK_CAPACITIES = (250, 1000)
QUICK_REQUESTS = 1000
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
BELADY = "Belady (approximate ceiling)"
KEEPS = (END, END_JUNCTION, SHIPPED, DENSE)
BASELINE_KEEPS = (SHIPPED, END_JUNCTION)
CHAIN_PARTS = (10, 3)  # of the trace's distinct blocks
CHAIN_CAPACITIES = (250, 1000, 4000)
CHAIN_POLICIES = (SHIPPED_POLICY, "LRU", "CLOCK", "Marconi 1")
# Figures of an earlier, throw-away replay: states held -> % of prompt tokens.
AT_LEAST = {
    "conversation": {250: 20.0, 500: 26.4, 1000: 31.2, 2000: 34.3, 4000: 35.8},
    "synthetic": {250: 48.0, 500: 56.9, 1000: 60.1, 2000: 63.0},
}
_SHARED_TRACES = Path(__file__).parents[2] / "shared" / "traces"
_TRACES: dict[str, Trace] = {}  # in each process

Row = dict[str, Any]


class Job(NamedTuple):
    """One replay."""

    trace: str
    keep: Keep
    policy: str = SHIPPED_POLICY
    states: int = UNLIMITED
    blocks: int = UNLIMITED
    joint: bool = True  # blocks and states leave together; else blocks by CLOCK, whatever states build on them


def _load(traces: Sequence[Trace]) -> None:
    _TRACES.update((trace.name, trace) for trace in traces)
    gc.freeze()  # the prompts stay: nothing to look for in them


@cache
def _unlimited_events(trace: str, keep: Keep) -> Sequence[Event]:
    return replay(_TRACES[trace], keep, UNLIMITED).events


def _run(job: Job) -> Row:
    policy = POLICIES.get(job.policy)
    if policy is None:
        reads: dict[bytes, list[int]] = {}
        for number, event in enumerate(_unlimited_events(job.trace, job.keep)):
            reads.setdefault(event.read, []).append(number)
        policy = partial(Belady, reads=reads)
    return row_of(job, replay(_TRACES[job.trace], job.keep, job.states, policy, job.blocks, joint=job.joint))


def _working_set(trace: str, capacities: Sequence[int]) -> Row:
    whole = _TRACES[trace]
    blocks = [max(1, whole.distinct_blocks // part) for part in (64, 32, 16, 8, 4, 2, 1)]
    hits = working_set(whole, _unlimited_events(trace, SHIPPED), blocks, [*capacities, UNLIMITED])
    rounded = [[round(hit, 5) for hit in line] for line in hits]
    return {"trace": trace, "blocks": blocks, "states": [*capacities, None], "hit": rounded}


def jobs_of(traces: Sequence[Trace], capacities: Sequence[int]) -> list[Job]:
    """All replays, the longest first."""
    jobs: list[Job] = []
    for trace in traces:
        name = trace.name
        jobs += [Job(name, keep) for keep in reversed(KEEPS)]
        jobs += [Job(name, keep, SHIPPED_POLICY, states) for keep in (DENSE, END) for states in capacities]
        jobs += [
            Job(name, keep, policy, states)
            for policy in (*POLICIES, BELADY)
            for keep in BASELINE_KEEPS
            for states in capacities
        ]
        jobs += [
            Job(name, SHIPPED, policy, states, max(1, trace.distinct_blocks // part), joint)
            for part in CHAIN_PARTS
            for policy, joint in [(SHIPPED_POLICY, True), *((policy, False) for policy in CHAIN_POLICIES)]
            for states in CHAIN_CAPACITIES
            if states in capacities
        ]
    return jobs


def row_of(job: Job, outcome: Outcome) -> Row:
    """One replay as the report keeps it."""
    tokens = outcome.prompt_tokens
    return {
        "trace": job.trace,
        "triggers": job.keep.name,
        "policy": job.policy,
        "states": None if job.states == UNLIMITED else job.states,
        "blocks": None if job.blocks == UNLIMITED else job.blocks,
        "eviction": "joint" if job.joint else "each store by itself",
        "hit": round(outcome.hit, 6),
        "chain_hit": round(outcome.chain_tokens / tokens, 6),
        "lost": {cause: round(lost / tokens, 6) for cause, lost in sorted(outcome.lost.items())},
        "by_trigger": {
            str(trigger): {
                "written": written,
                "reads": outcome.reads[trigger],
                "read_share": round(outcome.first_reads[trigger] / written, 4),
                "saved_tokens_per_state": round(outcome.saved[trigger] / written, 1),
                "evicted": outcome.evicted[trigger],
                "regret_share": round(outcome.regretted[trigger] / max(1, outcome.evicted[trigger]), 4),
            }
            for trigger, written in sorted(outcome.written.items())
        },
        "write_amplification": round(outcome.written.total() / max(1, outcome.reads.total()), 2),
        "regret": round(outcome.regretted_tokens / tokens, 6),
    }


def best(rows: Sequence[Row], trace: str, policy: str, states: int) -> float:
    """Hit of a policy in percent: the shipped one with the shipped triggers, a baseline with the better ones."""
    return 100 * max(float(row["hit"]) for row in _compared(rows, trace, policy) if row["states"] == states)


def _compared(rows: Sequence[Row], trace: str, policy: str) -> list[Row]:
    keeps = [SHIPPED] if policy == SHIPPED_POLICY else BASELINE_KEEPS
    names = {keep.name for keep in keeps}
    return [
        row
        for row in rows
        if (row["trace"], row["policy"], row["blocks"]) == (trace, policy, None)
        and row["triggers"] in names
        and row["states"] is not None
    ]


def unlimited(rows: Sequence[Row], trace: str, keep: Keep) -> Row:
    """The row of a replay that evicts nothing."""
    return next(row for row in rows if (row["trace"], row["triggers"], row["states"]) == (trace, keep.name, None))


def goals_of(rows: Sequence[Row], traces: Sequence[str], capacities: Sequence[int], whole: bool) -> list[Goal]:
    """The goals on every trace; those on figures only where the traces were replayed as a whole."""
    goals = []
    for name in traces:
        share = unlimited(rows, name, SHIPPED)["hit"] / unlimited(rows, name, DENSE)["hit"]
        goals.append(Goal(f"{name}_of_dense_ceiling", round(share, 4), ">= 0.98", "ratio", share >= 0.98))
        for states in capacities:
            ours = best(rows, name, SHIPPED_POLICY, states)
            rival = max((best(rows, name, policy, states), policy) for policy in POLICIES if policy != SHIPPED_POLICY)
            ahead = round(ours - rival[0], 2)
            goals.append(Goal(f"{name}_{states}_ahead_of_{rival[1]}", ahead, "> 0", "points", ahead > 0))
            limit = AT_LEAST.get(name, {}).get(states) if whole else None
            if limit is not None:
                goals.append(Goal(f"{name}_{states}_hit", round(ours, 2), f">= {limit:g}", "%", ours >= limit))
        goals += _joint_goals([row for row in rows if row["trace"] == name and row["blocks"] is not None])
    return goals


def _joint_goals(rows: Sequence[Row]) -> list[Goal]:
    """Where blocks are limited: joint eviction ahead of each store by itself, whatever evicts the states there."""
    goals = []
    for joint in (row for row in rows if row["eviction"] == "joint"):
        same = [row for row in rows if (row["blocks"], row["states"]) == (joint["blocks"], joint["states"])]
        rival = max(100 * row["hit"] for row in same if row["eviction"] != "joint")
        ahead = round(100 * joint["hit"] - rival, 2)
        name = f"{joint['trace']}_{joint['blocks']}_blocks_{joint['states']}_states_joint_ahead"
        goals.append(Goal(name, ahead, "> 0", "points", ahead > 0))
    return goals


def show(rows: Sequence[Row], working: Sequence[Row], capacities: Sequence[int]) -> None:
    """All tables."""
    out = console()
    for curve in working:
        name = curve["trace"]
        mine = [row for row in rows if row["trace"] == name]
        free = [row for row in mine if row["blocks"] is None]
        ours = [row for row in free if row["policy"] == SHIPPED_POLICY]
        compared = [row for policy in (*POLICIES, BELADY) for row in _compared(free, name, policy)]
        out.print(by_capacity(f"{name}: hit in % by states held, greedy-dual", ours, [*capacities, None], "triggers"))
        out.print(by_capacity(f"{name}: hit in % by states held, better triggers", compared, capacities, "policy"))
        told = [row for row in ours if row["states"] is None or row["triggers"] == SHIPPED.name]
        out.print(by_trigger(f"{name}: what became of states, greedy-dual", told))
        out.print(limited_chains(f"{name}: blocks limited, too", [row for row in mine if row["blocks"] is not None]))
        out.print(working_sets(curve))


def _arguments() -> argparse.Namespace:
    parser = options("Retention and eviction of recurrent states, on request traces.")
    parser.add_argument(
        "--traces",
        type=Path,
        metavar="FOLDER",
        default=_SHARED_TRACES if _SHARED_TRACES.is_dir() else None,
        help="of mooncake_*.jsonl (default: ../shared/traces if there); a generated trace is always replayed",
    )
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="write SVG charts there")
    parser.add_argument("--processes", type=int, default=2)
    return parser.parse_args()


def _command() -> str:
    """The command line without this machine's paths."""
    words = ["python", "benchmarks/policies.py"]
    for word in sys.argv[1:]:
        option, equals, value = word.rpartition("=")
        words.append(option + equals + (Path(value).name if Path(value).is_absolute() else value))
    return shlex.join(words)


def main() -> int:
    """Replay, show, and write the report."""
    arguments = _arguments()
    files = sorted(arguments.traces.glob("mooncake_*.jsonl")) if arguments.traces else []
    traces = [*(read_mooncake(path) for path in files), generate()]
    capacities: Sequence[int] = CAPACITIES
    if arguments.quick:
        traces, capacities = [trace.head(QUICK_REQUESTS) for trace in traces], QUICK_CAPACITIES
    names = [trace.name for trace in traces]
    with ProcessPoolExecutor(arguments.processes, initializer=_load, initargs=(traces,)) as pool:
        curves = pool.map(partial(_working_set, capacities=capacities), names)
        every = list(pool.map(_run, jobs_of(traces, capacities)))
        working = list(curves)
    show(every, working, capacities)
    goals = goals_of(every, names, capacities, whole=not arguments.quick)
    print_goals(goals)
    ceilings = [row for row in every if row["policy"] == BELADY]
    rows = [row for row in every if row["policy"] != BELADY]
    write_report(arguments.json_file, rows, goals, command=_command(), ceilings=ceilings, working_set=working)
    if arguments.plots:
        for curve in working:
            name = curve["trace"]
            lines = {
                policy: [(float(states), best(every, name, policy, states)) for states in capacities]
                for policy in (*POLICIES, BELADY)
            }
            plot(arguments.plots, name, lines, curve)
    return 0


if __name__ == "__main__":
    sys.exit(main())
