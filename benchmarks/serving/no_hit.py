"""What the connector costs when nothing is found: prompts that nobody has seen, in one engine with and without it.

The same prompt is computed twice in the same process, once with the connector taken out of the engine. Two processes
would not do: equal ones differ by several percent.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from _common import median_ratio, ms, table
from rich.table import Table

from serving.engines import NAMES, LiveEngine
from ucmcache.demo.engine import Result

PROMPT_TOKENS = 1500
OUTPUT_TOKENS = 64

Pair = tuple[Result, Result]  # without the connector, and with it


def compute_unseen(engines: Mapping[str, LiveEngine], prompts: Sequence[Sequence[int]]) -> dict[str, list[Pair]]:
    """A pair per variant and prompt, its halves right after each other, which of them first in turns.

    Plain vLLM has no connector to take out: its pairs show what the measurement itself can tell. The first prompt only
    warms up.
    """
    pairs: dict[str, list[Pair]] = {variant: [] for variant in engines}
    for number, prompt in enumerate(prompts):
        for variant, engine in engines.items():
            halves = {}
            for with_connector in (False, True) if number % 2 else (True, False):
                engine.attach(with_connector)
                halves[with_connector] = engine.generate(prompt, OUTPUT_TOKENS)
                halves[with_connector]["settle_s"] = engine.settle()  # also so that it does not slow what comes next
                engine.reset_local()
            if number:
                pairs[variant].append((halves[False], halves[True]))
    return pairs


def no_hit_rows(no_hits: Mapping[str, Sequence[Pair]]) -> list[dict[str, Any]]:
    """One row per variant: its steps with the connector beside those without, and the connector's hooks' share."""
    rows = []
    for variant in filter(no_hits.__contains__, NAMES):
        without, results = zip(*no_hits[variant], strict=True)
        overheads = sorted(_all_steps_s(one) / _all_steps_s(other) - 1 for other, one in no_hits[variant])
        rows.append(
            {
                "measured": "no_hit",
                "variant": variant,
                "prompt_tokens": results[0]["prompt_tokens"],
                "local_tokens": max(result["local_tokens"] for result in (*results, *without)),
                "external_tokens": max(result["external_tokens"] for result in results),
                "samples": len(results),
                "decode_step_s": statistics.median(map(_decode_step_s, results)),
                "prefill_s": statistics.median(map(_prefill_s, results)),
                "steps_s": statistics.median(map(_all_steps_s, results)),
                "settle_s": statistics.median(result["settle_s"] for result in results),
                "decode_overhead": median_ratio(map(_decode_step_s, results), map(_decode_step_s, without)) - 1,
                "prefill_overhead": median_ratio(map(_prefill_s, results), map(_prefill_s, without)) - 1,
                "step_overhead": statistics.median(overheads),
                "step_overhead_interval": _interval_of_median(overheads),
                "hooks_decode_share": _hooks_share(results, lambda tokens: tokens == 1),
                "hooks_prefill_share": _hooks_share(results, lambda tokens: tokens > 1),
                # With what runs before the first step, which `on_new_request` belongs to.
                "hooks_share": sum(r["hooks_s"] for r in results) / sum(map(_all_steps_s, results)),
                "outputs_equal": all(one["tokens"] == other["tokens"] for other, one in no_hits[variant]),
                "neighbour_cpus": statistics.fmean(result["neighbour_cpus"] for result in results),
            }
        )
    return rows


def _interval_of_median(ordered: Sequence[float]) -> tuple[float, float]:
    """Where the median lies with 95 % confidence, whatever the distribution: the order statistics of the sign test."""
    reach = 1.96 * math.sqrt(len(ordered)) / 2
    low, high = math.floor(len(ordered) / 2 - reach), math.ceil(len(ordered) / 2 + reach)
    return ordered[max(low, 0)], ordered[min(high, len(ordered) - 1)]


def _decode_step_s(result: Result) -> float:
    return statistics.median(taken_s for tokens, taken_s, _ in _steps([result]) if tokens == 1)


def _prefill_s(result: Result) -> float:
    return sum(taken_s for tokens, taken_s, _ in _steps([result]) if tokens > 1)


def _all_steps_s(result: Result) -> float:
    return sum(taken_s for _, taken_s, _ in _steps([result]))


def _steps(results: Sequence[Result]) -> list[tuple[int, float, float]]:
    """Scheduled tokens, seconds, and seconds in the connector's hooks of every step."""
    return [(int(tokens), float(taken_s), float(hooks_s)) for r in results for tokens, taken_s, hooks_s in r["steps"]]


def _hooks_share(results: Sequence[Result], chosen: Callable[[int], bool]) -> float:
    steps = [(taken_s, hooks_s) for tokens, taken_s, hooks_s in _steps(results) if chosen(tokens)]
    return sum(hooks_s for _, hooks_s in steps) / sum(taken_s for taken_s, _ in steps)


def no_hit_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Steps with the connector beside those without, and what of them its hooks took."""
    return table(
        f"No hit: {rows[0]['samples']} prompts of {PROMPT_TOKENS:,} tokens, {OUTPUT_TOKENS} tokens each, with and "
        "without the connector in one process",
        (
            "ms; over without; hooks' share",
            *("decode\nstep", "prefill", "all\nsteps", "settle"),
            *("over\ndecode", "over\nprefill", "over\nall", "95% of\nmedian"),
            *("hooks/\ndecode", "hooks/\nprefill", "hooks/\nall", "outputs\nequal", "neigh-\nbours"),
        ),
        [
            (
                NAMES[row["variant"]],
                *(ms(row[name]) for name in ("decode_step_s", "prefill_s", "steps_s", "settle_s")),
                *(f"{row[name]:+.1%}" for name in ("decode_overhead", "prefill_overhead", "step_overhead")),
                "{:+.1%} {:+.1%}".format(*row["step_overhead_interval"]),
                *(f"{row[name]:.2%}" for name in ("hooks_decode_share", "hooks_prefill_share", "hooks_share")),
                "yes" if row["outputs_equal"] else "NO",
                f"{row['neighbour_cpus']:.1f}",
            )
            for row in rows
        ],
    )
