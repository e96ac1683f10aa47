"""Time to the first token of a long prompt by where its prefix comes from, and what the connector costs without a hit.

Engines stay alive side by side and take turns prompt by prompt, so that what else the machine does meets them alike; a
ratio is the median of ratios between neighbours in time. What the connector costs is measured within one process, with
and without it. Cases: cold, from vLLM's own cache ("local"), from host memory
after a local reset ("host"), and from the folder that an earlier process wrote ("disk", page cache warm). Where its
packages are there, vLLM's MooncakeStoreConnector computes the same prompts.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _common import below, console, median_ratio, ms, options, print_goals, table, warn_if_busy, write_report
from rich.table import Table
from serving import no_hit
from serving.breakdown import breakdown_table
from serving.engines import NAMES, Launcher, LiveEngine
from serving.mooncake import mooncake_lacks, mooncake_master

from ucmcache.demo.checkpoints import RECIPES
from ucmcache.demo.engine import EngineProcessError, Result
from ucmcache.demo.report import Goal

DOCUMENT_TOKENS = 8000
DOCUMENT_OUTPUT_TOKENS = 16
MAX_MODEL_LEN = DOCUMENT_TOKENS + no_hit.OUTPUT_TOKENS
_SEED = 41


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    documents: int
    repeats: int  # of each hit that can be repeated
    no_hit_prompts: int  # each computed with and without the connector, in every engine
    host_only: bool  # an engine that keeps nothing in a folder
    idle: bool  # an engine whose connector does nothing: what vLLM itself takes for having one
    warm_up_tokens: int  # of the document that is not counted: an engine's first large prompt is slower than the rest


FULL = Plan(documents=5, repeats=3, no_hit_prompts=40, host_only=True, idle=True, warm_up_tokens=DOCUMENT_TOKENS)
QUICK = Plan(documents=1, repeats=2, no_hit_prompts=2, host_only=False, idle=False, warm_up_tokens=2000)


@dataclass(slots=True)
class Samples:
    """One case of one variant: a result per run, and plain vLLM's times for the same document beside it."""

    results: list[Result] = field(default_factory=list)
    cold_s: list[float] = field(default_factory=list)
    local_s: list[float] = field(default_factory=list)
    equal: bool = True


Cases = dict[tuple[str, str], Samples]  # (variant, case)


class Bench:
    """The prompts, the order in which engines compute them, and what was measured."""

    def __init__(self, plan: Plan, launcher: Launcher) -> None:
        self._plan = plan
        self._launcher = launcher
        draw = random.Random(_SEED)
        vocab_size = RECIPES["demo"].config["vocab_size"]

        def prompts(count: int, tokens: int) -> list[list[int]]:
            return [[draw.randrange(vocab_size) for _ in range(tokens)] for _ in range(count)]

        # The first of each only warms up.
        self._documents = prompts(1, plan.warm_up_tokens) + prompts(plan.documents, DOCUMENT_TOKENS)
        self._no_hit_prompts = prompts(1 + plan.no_hit_prompts, no_hit.PROMPT_TOKENS)
        self._reference: list[list[int]] = []
        self._cold_s: list[float] = []
        self.cases: Cases = {}
        self.no_hits: dict[str, list[no_hit.Pair]] = {}

    def run(self) -> None:
        """Measure everything; the engines that are not restarted live until the end."""
        with ExitStack() as stack:

            def start(variant: str) -> LiveEngine:
                return stack.enter_context(closing(self._launcher.start(variant)))

            with closing(self._launcher.start("file")) as file:
                chosen = {"plain": True, "host": self._plan.host_only, "mooncake": self._launcher.mooncake is not None}
                engines = {variant: start(variant) for variant, wanted in chosen.items() if wanted}
                for number in range(len(self._documents)):
                    self._first_time(number, {**engines, "file": file})
            self._launcher.warm_page_cache()
            engines["file"] = start("file")
            for number in range(len(self._documents)):
                self._after_restart(number, engines["plain"], engines["file"])
            if self._plan.idle:
                engines["idle"] = start("idle")
            self.no_hits = no_hit.compute_unseen(engines, self._no_hit_prompts)

    def _first_time(self, number: int, engines: Mapping[str, LiveEngine]) -> None:
        """Cold, then from vLLM's cache, then (not from a folder, which comes later) from the connector's memory."""
        document = self._documents[number]
        local_s = 0.0
        for variant, engine in engines.items():
            cold = engine.generate(document, DOCUMENT_OUTPUT_TOKENS)
            engine.settle()
            local = [engine.generate(document, DOCUMENT_OUTPUT_TOKENS) for _ in range(self._plan.repeats)]
            if variant == "plain":
                self._reference.append(cold["tokens"])
                self._cold_s.append(cold["ttft_s"])
                local_s = statistics.median(hit["ttft_s"] for hit in local)
            self._keep(number, variant, "cold", [cold], local_s)
            self._keep(number, variant, "local", local, local_s)
            if variant in ("host", "mooncake"):
                self._keep(number, variant, "host", self._after_reset(engine, document), local_s)

    def _after_restart(self, number: int, plain: LiveEngine, file: LiveEngine) -> None:
        """The first time in a process that finds it in the folder; plain vLLM's local hit beside it."""
        document = self._documents[number]
        plain.generate(document, DOCUMENT_OUTPUT_TOKENS)  # its blocks may have gone since
        before = [plain.generate(document, DOCUMENT_OUTPUT_TOKENS) for _ in range(self._plan.repeats)]
        # As busy before its measurement as the engine that it is compared with: a hit of its own, on another document.
        file.generate(self._documents[max(0, number - 1)], DOCUMENT_OUTPUT_TOKENS)
        disk = file.generate(document, DOCUMENT_OUTPUT_TOKENS)
        after = [plain.generate(document, DOCUMENT_OUTPUT_TOKENS) for _ in range(self._plan.repeats)]
        local_s = statistics.median(hit["ttft_s"] for hit in [*before, *after])
        self._keep(number, "plain", "local", [*before, *after], local_s)
        self._keep(number, "file", "disk", [disk], local_s)
        local = [file.generate(document, DOCUMENT_OUTPUT_TOKENS) for _ in range(self._plan.repeats)]
        self._keep(number, "file", "local", local, local_s)
        self._keep(number, "file", "host", self._after_reset(file, document), local_s)

    def _after_reset(self, engine: LiveEngine, document: Sequence[int]) -> list[Result]:
        results = []
        for _ in range(self._plan.repeats):
            engine.settle()
            engine.reset_local()
            results.append(engine.generate(document, DOCUMENT_OUTPUT_TOKENS))
        return results

    def _keep(self, number: int, variant: str, case: str, results: Sequence[Result], local_s: float) -> None:
        if number == 0:
            return
        samples = self.cases.setdefault((variant, case), Samples())
        for result in results:
            samples.results.append(result)
            samples.cold_s.append(self._cold_s[number])
            samples.local_s.append(local_s)
            samples.equal = samples.equal and result["tokens"] == self._reference[number]


def ttft_rows(cases: Cases) -> list[dict[str, Any]]:
    """One row per variant and case; times in seconds, medians."""
    rows = []
    for (variant, case), samples in cases.items():
        times = [result["ttft_s"] for result in samples.results]
        rows.append(
            {
                "measured": "ttft",
                "variant": variant,
                "case": case,
                "prompt_tokens": samples.results[0]["prompt_tokens"],
                "local_tokens": min(result["local_tokens"] for result in samples.results),
                "external_tokens": min(result["external_tokens"] for result in samples.results),
                "samples": len(times),
                "ttft_s": statistics.median(times),
                "ttft_min_s": min(times),
                "ttft_max_s": max(times),
                "over_local": median_ratio(times, samples.local_s),
                "over_cold": median_ratio(times, samples.cold_s),
                "outputs_equal": samples.equal,
                "neighbour_cpus": statistics.fmean(result["neighbour_cpus"] for result in samples.results),
                "phases": {
                    name: statistics.median(result["phases"][name] for result in samples.results)
                    for name in samples.results[0]["phases"]
                },
            }
        )
    return rows


def ttft_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The cases of every variant."""
    headings = ("TTFT in ms", "case", "prompt", "local", "external", "runs", "median", "min", "max", "over\nlocal")
    return table(
        "Time to the first token, by where the prefix comes from",
        (*headings, "over\ncold", "outputs\nequal", "neigh-\nbours"),
        [
            (
                NAMES[row["variant"]],
                row["case"],
                *(f"{row[name]:,}" for name in ("prompt_tokens", "local_tokens", "external_tokens", "samples")),
                *(ms(row[name]) for name in ("ttft_s", "ttft_min_s", "ttft_max_s")),
                f"{row['over_local']:.2f}",
                f"{row['over_cold']:.3f}",
                "yes" if row["outputs_equal"] else "NO",
                f"{row['neighbour_cpus']:.1f}",
            )
            for row in rows
        ],
    )


def goals_of(ttft: Sequence[Mapping[str, Any]], no_hit: Sequence[Mapping[str, Any]]) -> list[Goal]:
    """The goals; of the two variants without a hit, the worse counts."""
    disk = next(row for row in ttft if row["variant"] == "file" and row["case"] == "disk")
    ours = [row for row in no_hit if row["variant"] in ("host", "file")]
    equal = all(row["outputs_equal"] for row in [*ttft, *no_hit] if row["variant"] != "mooncake")
    return [
        below("ttft_after_restart_over_local", disk["over_local"], 1.25),
        below("ttft_after_restart_over_cold", disk["over_cold"], 0.10),
        below("no_hit_overhead", max(row["step_overhead"] for row in ours), 0.02, "of step time"),
        below("no_hit_hooks", max(row["hooks_share"] for row in ours), 0.02, "of step time"),
        Goal("outputs_equal", equal, "true", "", equal),
    ]


def show(ttft: Sequence[Mapping[str, Any]], no_hits: Sequence[Mapping[str, Any]]) -> None:
    """All tables."""
    ordered = sorted(ttft, key=lambda row: list(NAMES).index(row["variant"]))
    out = console()
    for made in (ttft_table(ordered), breakdown_table(ordered), no_hit.no_hit_table(no_hits)):
        out.print(made)


def _measure(plan: Plan, with_mooncake: bool) -> Bench:
    with tempfile.TemporaryDirectory(prefix="ucmcache-serve-") as name, ExitStack() as stack:
        folder = Path(name)
        environment = stack.enter_context(mooncake_master(folder)) if with_mooncake else None
        bench = Bench(plan, Launcher(_demo_model(), folder / "store", MAX_MODEL_LEN, environment))
        bench.run()
    return bench


def _demo_model() -> Path:
    model = Path(tempfile.gettempdir()) / f"ucmcache-bench-{os.getuid()}" / "model"
    subprocess.run([sys.executable, "-m", "ucmcache.demo.checkpoints", "demo", str(model)], check=True)
    return model


def _arguments() -> argparse.Namespace:
    parser = options("TTFT by where a prefix comes from, and what the connector costs without a hit.")
    parser.add_argument(
        "--mooncake",
        choices=("auto", "off"),
        nargs="?",
        const="auto",
        help="beside vLLM's MooncakeStoreConnector, where it is installed (default: auto; off with --quick)",
    )
    parser.add_argument(
        "--threads",
        type=int,
        help="compute threads per engine (default: as many as vLLM takes); with "
        "fewer than the machine has, a busy neighbour costs less than the barriers between threads make of it",
    )
    return parser.parse_args()


def main() -> int:
    """Measure, show, and write the report; 0 if all outputs were equal."""
    arguments = _arguments()
    wants_mooncake = (arguments.mooncake or ("off" if arguments.quick else "auto")) == "auto"
    lacks = mooncake_lacks() if wants_mooncake else ""
    if lacks:
        print(f"without Mooncake; missing: {lacks}")
    if arguments.threads is not None:
        os.environ.update(OMP_NUM_THREADS=str(arguments.threads), VLLM_CPU_OMP_THREADS_BIND="nobind")
    load_before, started = os.getloadavg(), time.perf_counter()
    try:
        bench = _measure(QUICK if arguments.quick else FULL, wants_mooncake and not lacks)
    except EngineProcessError as error:
        print(error.log_tail, f"serve.py: {error}", sep="\n", file=sys.stderr)
        return 2
    ttft, no_hits = ttft_rows(bench.cases), no_hit.no_hit_rows(bench.no_hits)
    goals = goals_of(ttft, no_hits)
    show(ttft, no_hits)
    conditions = {
        "load_before": load_before,
        "load_after": os.getloadavg(),
        "threads": arguments.threads,
        "seconds": round(time.perf_counter() - started, 1),
    }
    print(f"neighbours: CPUs that other processes kept busy meanwhile, of {os.cpu_count()}; {conditions}")
    warn_if_busy([*ttft, *no_hits], arguments.threads)
    print_goals(goals)
    write_report(arguments.json_file, [*ttft, *no_hits], goals, conditions=conditions)
    return 0 if goals[-1].met else 1


if __name__ == "__main__":
    sys.exit(main())
