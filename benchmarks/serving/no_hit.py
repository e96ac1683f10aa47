"""What the connector costs when nothing is found: prompts that nobody has seen, in every engine."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from _common import median_ratio, ms, table
from rich.table import Table

from serving.engines import NAMES, LiveEngine
from ucmcache.demo.engine import Result

PROMPT_TOKENS = 1500
OUTPUT_TOKENS = 64


def compute_unseen(engines: Mapping[str, LiveEngine], prompts: Sequence[Sequence[int]]) -> dict[str, list[Result]]:
    """A result per variant and prompt: each prompt in every engine before the next; who begins goes round.

    The first prompt only warms up.
    """
    results: dict[str, list[Result]] = {variant: [] for variant in engines}
    names = list(engines)
    for number, prompt in enumerate(prompts):
        turn = number % len(names)
        for variant in names[turn:] + names[:turn]:
            result = engines[variant].generate(prompt, OUTPUT_TOKENS)
            engines[variant].settle()  # what it still has to write must not slow the next engine
            if number:
                results[variant].append(result)
    return results


def no_hit_rows(no_hits: Mapping[str, Sequence[Result]]) -> list[dict[str, Any]]:
    """One row per variant: its steps beside plain vLLM's for the same prompt, and the connector's own share of them."""
    rows = []
    plain = no_hits["plain"]
    for variant in filter(no_hits.__contains__, NAMES):
        results = no_hits[variant]
        rows.append(
            {
                "measured": "no_hit",
                "variant": variant,
                "prompt_tokens": results[0]["prompt_tokens"],
                "local_tokens": max(result["local_tokens"] for result in results),
                "external_tokens": max(result["external_tokens"] for result in results),
                "samples": len(results),
                "decode_step_s": statistics.median(map(_decode_step_s, results)),
                "prefill_s": statistics.median(map(_prefill_s, results)),
                "total_s": statistics.median(result["total_s"] for result in results),
                "decode_overhead": median_ratio(map(_decode_step_s, results), map(_decode_step_s, plain)) - 1,
                "prefill_overhead": median_ratio(map(_prefill_s, results), map(_prefill_s, plain)) - 1,
                "total_overhead": median_ratio((r["total_s"] for r in results), (r["total_s"] for r in plain)) - 1,
                "hooks_decode_share": _hooks_share(results, lambda tokens: tokens == 1),
                "hooks_prefill_share": _hooks_share(results, lambda tokens: tokens > 1),
                # With what runs before the first step, which `on_new_request` belongs to.
                "hooks_share": sum(r["hooks_s"] for r in results) / sum(taken_s for _, taken_s, _ in _steps(results)),
                "hooks_decode_step_s": statistics.median(
                    hooks_s for tokens, _, hooks_s in _steps(results) if tokens == 1
                ),
                "outputs_equal": [r["tokens"] for r in results] == [r["tokens"] for r in plain],
                "neighbour_cpus": statistics.fmean(result["neighbour_cpus"] for result in results),
            }
        )
    return rows


def _decode_step_s(result: Result) -> float:
    return statistics.median(taken_s for tokens, taken_s, _ in _steps([result]) if tokens == 1)


def _prefill_s(result: Result) -> float:
    return sum(taken_s for tokens, taken_s, _ in _steps([result]) if tokens > 1)


def _steps(results: Sequence[Result]) -> list[tuple[int, float, float]]:
    """Scheduled tokens, seconds, and seconds in the connector's hooks of every step."""
    return [(int(tokens), float(taken_s), float(hooks_s)) for r in results for tokens, taken_s, hooks_s in r["steps"]]


def _hooks_share(results: Sequence[Result], chosen: Callable[[int], bool]) -> float:
    steps = [(taken_s, hooks_s) for tokens, taken_s, hooks_s in _steps(results) if chosen(tokens)]
    return sum(hooks_s for _, hooks_s in steps) / sum(taken_s for taken_s, _ in steps)


def no_hit_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Steps beside plain vLLM's, and the connector's share of them."""
    return table(
        f"No hit: {rows[0]['samples']} prompts of {PROMPT_TOKENS:,} tokens, {OUTPUT_TOKENS} tokens each",
        (
            "ms; over vLLM; share in hooks",
            *("decode\nstep", "prefill", "total", "over\ndecode", "over\nprefill", "over\ntotal"),
            *("hooks/\ndecode", "hooks/\nprefill", "hooks/\nall", "outputs\nequal", "neigh-\nbours"),
        ),
        [
            (
                NAMES[row["variant"]],
                *(ms(row[name]) for name in ("decode_step_s", "prefill_s", "total_s")),
                *(f"{row[name]:+.1%}" for name in ("decode_overhead", "prefill_overhead", "total_overhead")),
                *(f"{row[name]:.2%}" for name in ("hooks_decode_share", "hooks_prefill_share", "hooks_share")),
                "yes" if row["outputs_equal"] else "NO",
                f"{row['neighbour_cpus']:.1f}",
            )
            for row in rows
        ],
    )
