"""Conversations that resume at the very token: what of each turn is computed again, and what that takes.

One lane (C = 1) and so little room that a side request pushes the conversation out of the engine, as in the articles on
the registry whose figures stand beside ours (docs/sessions.md); then an agent of many turns, beside vLLM's own prefix
cache, by its defaults and as fine as it can be set, and beside its Mooncake store connector where that is installed.
Engines stay alive side by side and take turns; a ratio is the median of ratios between neighbours in time.
"""

import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from _common import above, below, console, median_ratio, ms, options, print_goals, table, warn_if_busy, write_report
from serving.engines import LiveEngine
from serving.mooncake import mooncake_lacks, mooncake_master

from ucmcache.demo.checkpoints import RECIPES, write_checkpoint
from ucmcache.demo.engine import EngineProcessError, Job, Result
from ucmcache.demo.report import Goal

PROMPT, TITLE, ANSWER = 561, 312, 51  # tokens; below the model's block of 640, so that the grid holds nothing of them
LATER, TAIL = 8, 13  # tokens that a template adds behind an answer, and those of a user's next message
AGENT_PROMPT, AGENT_ANSWER = 900, 24
BLOCKS = 14  # of the engine: what one conversation takes, and not two
Row = dict[str, Any]

# Figures of the article: what each turn resumed at, of what it had.
S2_ABAB = {0: ("0", "0"), 1: ("961", "0"), 2: ("957", "0"), 3: ("957", "311"), 4: ("957", "311")}
S2_SHAPES = {"D1": "1035", "D2": "1032", "D2'": "1037", "T1": "980", "T5": "979"}
S2_MODES = {"G1": ("979", "979"), "G2": ("1035", "979"), "G3": ("1030", "979"), "G4": ("1035", "1035")}


@dataclass(frozen=True, slots=True)
class Bench:
    """What all parts share: the models' folder, how much is measured, the draw of all tokens, and the model's shape."""

    folder: Path
    quick: bool
    draw: random.Random
    shape: str = "demo"

    def tokens(self, count: int) -> list[int]:
        """Random token ids."""
        return [self.draw.randrange(RECIPES[self.shape].config["vocab_size"]) for _ in range(count)]

    def engine(
        self, sessions: Mapping[str, Any] | None, transfer: Mapping[str, Any] | None = None, **more: Any
    ) -> LiveEngine:
        """An engine with sessions, with another connector, or with none."""
        environment = more.pop("environment", None)
        if sessions is not None:
            transfer = {
                "kv_connector": "UcmCacheConnector",
                "kv_connector_module_path": "ucmcache.connector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"sessions": dict(sessions)},
            }
        arguments: dict[str, Any] = {"max_model_len": 8192, **more}
        batch = int(arguments.pop("max_num_batched_tokens", 2048))
        job = Job(str(self.folder / self.shape), (), transfer, max_num_batched_tokens=batch, engine_args=arguments)
        return LiveEngine(job, environment)

    @contextmanager
    def one_lane(self, entries: int, mode: str = "keep-current") -> Iterator[LiveEngine]:
        """An engine of one lane, in which a side request leaves nothing of a conversation."""
        more: dict[str, Any] = {"max_num_seqs": 1, "num_gpu_blocks_override": BLOCKS, "max_model_len": 768}
        with closing(self.engine({"entries": entries, "mode": mode}, **more)) as engine:
            yield engine


def ask(engine: LiveEngine, prompt: Sequence[int], answer: int = ANSWER) -> Result:
    """One request; what the engine itself has of it is forgotten before, as where others have had its blocks."""
    engine.settle()
    engine.reset_local()
    return engine.generate(prompt, answer)


def cached(result: Result) -> int:
    """Tokens that were not computed."""
    return int(result["local_tokens"] + result["external_tokens"])


# -- one lane ----------------------------------------------------------------------------------------------------------


def capacity(bench: Bench) -> list[Row]:
    """Conversation, side request, conversation, side request, by the number of entries."""
    rows = []
    for entries in (1,) if bench.quick else range(5):
        a, b = bench.tokens(PROMPT), bench.tokens(TITLE)
        anew, later, again = bench.tokens(ANSWER), bench.tokens(TAIL), bench.tokens(TAIL)
        with bench.one_lane(entries) as engine:
            hops = [ask(engine, a), ask(engine, b), ask(engine, [*a, *anew, *later]), ask(engine, [*b, *again])]
        rows.append({"measured": "capacity", "entries": entries, "cached": [cached(hop) for hop in hops]})
    return rows


def shapes(bench: Bench) -> list[Row]:
    """What a next turn of each shape resumes at, and whether its text is that of its control."""
    rows = []
    with bench.one_lane(1) as engine, closing(split_control(bench)) as control:
        for shape, aside, ended in (
            ("D1", False, "assistant"),
            ("D2", True, "assistant"),
            ("D2'", True, "assistant"),
            ("T1", True, "user"),
            ("T5", False, "user"),
        ):
            rows.append(_shape(bench, engine, control, shape, aside, ended))
    return rows


def _shape(bench: Bench, engine: LiveEngine, control: LiveEngine, shape: str, aside: bool, ended: str) -> Row:
    first = bench.tokens(PROMPT)
    whole = ask(engine, first, ANSWER)["tokens"]
    if aside:
        ask(engine, bench.tokens(TITLE), 8)
    if ended == "assistant":
        # By the continuation control: the turn before is told once more whole, and cut where this turn begins.
        prompt = [*first, *whole]
        result = ask(engine, prompt, LATER)
        expected = ask(control, first, ANSWER + LATER)["tokens"][ANSWER:]
    else:
        prompt = [*first, *bench.tokens(ANSWER), *bench.tokens(TAIL)]
        result = ask(engine, prompt, LATER)
        expected = ask(control, prompt, LATER)["tokens"]
    return {
        "measured": "shape",
        "shape": shape,
        "prompt": len(prompt),
        "cached": cached(result),
        "computed": len(prompt) - cached(result),
        "expected": len(prompt) - 1 if ended == "assistant" else PROMPT,
        "equal": result["tokens"] == expected,
        "ttft_s": result["ttft_s"],
    }


def split_control(bench: Bench) -> LiveEngine:
    """vLLM alone, whose prefills are cut where a turn's prompt ends."""
    return bench.engine(None, max_num_batched_tokens=PROMPT, enable_chunked_prefill=True)


def modes(bench: Bench) -> list[Row]:
    """The same requests with and without the state at the frontier in an entry.

    Controls: what the whole answer goes on with, and vLLM alone with its prefill cut where the resume was. Where the
    modes resume at different tokens, the one decodes what the other prefills. To vLLM itself that is the same to the
    last bit on Gemma-3, and is not on GDN.
    """
    rows = []
    found: dict[str, list[Result]] = {}
    requests: list[tuple[str, bool, bool, list[int], list[int]]] = [
        (shape, aside, assistant, bench.tokens(PROMPT), bench.tokens(ANSWER + TAIL))
        for shape, aside, assistant in (
            ("G1", True, False),
            ("G2", True, True),
            ("G3", True, True),
            ("G4", False, True),
        )
    ]
    sides = [bench.tokens(TITLE) for _ in requests]
    asked: dict[str, list[list[int]]] = {"keep-current": [], "drop-current": []}
    for mode in ("keep-current", "drop-current"):
        with bench.one_lane(1, mode) as engine:
            for (_, aside, assistant, first, other), side in zip(requests, sides, strict=True):
                whole = ask(engine, first, ANSWER)["tokens"]
                if aside:
                    ask(engine, side, 8)
                prompt = [*first, *(whole if assistant else other)]
                asked[mode].append(prompt)
                found.setdefault(mode, []).append(ask(engine, prompt, LATER))
    with closing(split_control(bench)) as control:
        split = [ask(control, prompt, LATER)["tokens"] for prompt in asked["keep-current"]]
        whole_ones = [ask(control, first, ANSWER + LATER)["tokens"][ANSWER:] for _, _, _, first, _ in requests]
    for (shape, aside, assistant, first, _), keep, drop, at_turn, at_frontier in zip(
        requests, *found.values(), split, whole_ones, strict=True
    ):
        drops = aside and assistant
        rows.append(
            {
                "measured": "mode",
                "model": bench.shape,
                "shape": shape,
                "prompt": keep["prompt_tokens"],
                "keep": cached(keep),
                "drop": cached(drop),
                "expected_difference": ANSWER - 1 if drops else 0,
                "keep_equal": keep["tokens"] == (at_frontier if assistant else at_turn),
                "drop_equal": drop["tokens"] == (at_frontier if assistant and not drops else at_turn),
                "equal": keep["tokens"] == drop["tokens"],
                "keep_ttft_s": keep["ttft_s"],
                "drop_ttft_s": drop["ttft_s"],
                "prompt_end": len(first),
            }
        )
    return rows


# -- an agent ----------------------------------------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    "vLLM": {},
    "vLLM, finest": {"prefix_match_unit": 16, "prefix_cache_retention_interval": 640},
    "ucmcache, sessions": {},
    "Mooncake": {},
}


def agent(bench: Bench, mooncake: Mapping[str, str] | None) -> list[Row]:
    """Turns of an agent: what was said, a tool's answer, and what the next answer waits for."""
    turns_of = [5] if bench.quick else [10, 20, 40]
    names = ["vLLM", "ucmcache, sessions"] if bench.quick else ["vLLM", "vLLM, finest", "ucmcache, sessions"]
    transfers: dict[str, Mapping[str, Any]] = {}
    if mooncake is not None and not bench.quick:
        names.append("Mooncake")
        transfers["Mooncake"] = {
            "kv_connector": "MooncakeStoreConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"save_decode_cache": True},
        }
    rows: list[Row] = []
    with ExitStack() as stack:
        engines = {}
        for name in names:
            sessions = {"entries": 8} if name.startswith("ucmcache") else None
            environment = mooncake if name == "Mooncake" else None
            more = {**SETTINGS[name], "environment": environment}
            engines[name] = stack.enter_context(closing(bench.engine(sessions, transfers.get(name), **more)))
        for conversation, turns in enumerate(turns_of):
            start = bench.tokens(AGENT_PROMPT + 250 * conversation)
            said = [bench.tokens(bench.draw.randrange(15, 120)) for _ in range(turns)]
            texts = {name: list(start) for name in names}
            for turn in range(turns):
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    result = engines[name].generate(texts[name], AGENT_ANSWER)
                    engines[name].settle()
                    rows.append(
                        {
                            "measured": "agent",
                            "engine": name,
                            "conversation": conversation,
                            "turn": turn + 1,
                            "prompt": len(texts[name]),
                            "new": len(start) if turn == 0 else len(said[turn - 1]),
                            "computed": len(texts[name]) - cached(result),
                            "ttft_s": result["ttft_s"],
                            "neighbour_cpus": result["neighbour_cpus"],
                        }
                    )
                    texts[name] += [*result["tokens"], *said[turn]]
        turn_2 = _turn_2(bench, engines)
    return rows + turn_2


def _turn_2(bench: Bench, engines: Mapping[str, LiveEngine]) -> list[Row]:
    """The second turn that public peers were measured with: 1,200 tokens, 500 generated, 50 more."""
    first, more = bench.tokens(1200), bench.tokens(50)
    rows = []
    for name, engine in engines.items():
        said = ask(engine, first, 500)["tokens"]
        # Ours and Mooncake's from what they keep, as after others have had the engine's blocks; vLLM's from its own.
        again = engine.generate if name.startswith("vLLM") else partial(ask, engine)
        result = again([*first, *said, *more], 8)
        rows.append({"measured": "turn 2", "engine": name, "prompt": 1750, "cached": cached(result)})
    return rows


# -- what sessions cost ------------------------------------------------------------------------------------------------


def rates(bench: Bench) -> list[Row]:
    """Prefill and decode of prompts that nobody has seen, with sessions and without them, by turns in one engine.

    Two processes would not do: equal ones differ by several percent. "off again" is what the measurement can tell.
    """
    kept = {"off": False, "on": True, "off again": False}
    found: dict[str, list[Result]] = {name: [] for name in kept}
    with closing(bench.engine({"entries": 8})) as engine:
        for number in range(3 if bench.quick else 41):
            for name in list(kept)[number % 3 :] + list(kept)[: number % 3]:
                engine.settle()
                engine.keep_sessions(kept[name])
                result = ask(engine, bench.tokens(1500), 64)
                if number:
                    found[name].append(result)
    rows = []
    for name in ("on", "off again"):
        for what, seconds in (("prefill", _prefill_s), ("decode", _decode_s)):
            ratio = median_ratio(map(seconds, found[name]), map(seconds, found["off"]))
            rows.append(
                {"measured": "rate", "sessions": name, "what": what, "ratio": ratio, "samples": len(found[name])}
            )
    return rows


def _prefill_s(result: Result) -> float:
    return sum(float(taken_s) for tokens, taken_s, _ in result["steps"] if tokens > 1)


def _decode_s(result: Result) -> float:
    return statistics.median(float(taken_s) for tokens, taken_s, _ in result["steps"] if tokens == 1)


# -- report ------------------------------------------------------------------------------------------------------------


def of(rows: Sequence[Row], measured: str) -> list[Row]:
    """The rows of one part."""
    return [row for row in rows if row["measured"] == measured]


def show(rows: Sequence[Row]) -> None:
    """All tables."""
    out = console()
    out.print(
        table(
            "One lane: what each hop resumes at, by entries; S2's turn 2 and side request beside them",
            ("entries", "A", "B", "A again", "B again", "S2: A", "S2: B"),
            [[str(row["entries"]), *map(str, row["cached"]), *S2_ABAB[row["entries"]]] for row in of(rows, "capacity")],
        )
    )
    if found := of(rows, "shape"):
        out.print(
            table(
                "Shapes of a next turn",
                ("", "prompt", "cached", "computed", "text as its control's", "S2 cached"),
                [
                    [
                        row["shape"],
                        *(f"{row[name]:,}" for name in ("prompt", "cached", "computed")),
                        "yes" if row["equal"] else "no",
                        S2_SHAPES[row["shape"]],
                    ]
                    for row in found
                ],
            )
        )
    if found := of(rows, "mode"):
        out.print(
            table(
                "With and without the state at the frontier in an entry",
                (
                    "",
                    "model",
                    "prompt",
                    "keep",
                    "drop",
                    "TTFT keep",
                    "TTFT drop",
                    "keep as control",
                    "drop as control",
                    "same text",
                    "S2 keep",
                    "S2 drop",
                ),
                [
                    [
                        row["shape"],
                        row["model"],
                        *(f"{row[name]:,}" for name in ("prompt", "keep", "drop")),
                        ms(row["keep_ttft_s"]),
                        ms(row["drop_ttft_s"]),
                        *("yes" if row[name] else "no" for name in ("keep_equal", "drop_equal", "equal")),
                        *S2_MODES[row["shape"]],
                    ]
                    for row in found
                ],
            )
        )
    out.print(table("An agent's turns from the second on", _AGENT_HEADS, [_agent_line(rows, n) for n in _names(rows)]))
    if found := of(rows, "rate"):
        out.print(
            table(
                "Prompts that nobody has seen: time of steps beside those without sessions",
                ("sessions", "", "time ratio", "prompts"),
                [[row["sessions"], row["what"], f"{row['ratio']:.4f}", str(row["samples"])] for row in found],
            )
        )


_AGENT_HEADS = ("", "new tokens", "computed", "computed at most beyond new", "TTFT (ms)", "over vLLM", "1,750 at")


def _names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["engine"] for row in of(rows, "agent")))


def _later(rows: Sequence[Row], name: str) -> list[Row]:
    return [row for row in of(rows, "agent") if row["engine"] == name and row["turn"] > 1]


def _over(rows: Sequence[Row], name: str, other: str) -> float:
    return median_ratio([row["ttft_s"] for row in _later(rows, name)], [row["ttft_s"] for row in _later(rows, other)])


def _agent_line(rows: Sequence[Row], name: str) -> list[str]:
    later = _later(rows, name)
    at = next(row["cached"] for row in of(rows, "turn 2") if row["engine"] == name)
    return [
        name,
        f"{statistics.fmean(row['new'] for row in later):.0f}",
        f"{statistics.fmean(row['computed'] for row in later):.0f}",
        f"{max(row['computed'] - row['new'] for row in later):,}",
        ms(statistics.median(row["ttft_s"] for row in later)),
        f"{_over(rows, name, 'vLLM'):.2f}",
        f"{at:,}",
    ]


def goals_of(rows: Sequence[Row]) -> list[Goal]:
    """The figures of the design."""
    ours, goals = "ucmcache, sessions", []
    by_entries = {row["entries"]: row["cached"] for row in of(rows, "capacity")}
    if 0 in by_entries:
        goals.append(below("turn_2_without_an_entry", by_entries[0][2], 0, "tokens"))
    goals.append(above("turn_2_with_one_entry", by_entries[1][2], PROMPT, "tokens"))
    goals.append(below("fourth_hop_with_one_entry", by_entries[1][3], 0, "tokens"))
    goals += [
        above(f"fourth_hop_with_{entries}_entries", by_entries[entries][3], TITLE, "tokens")
        for entries in (3, 4)
        if entries in by_entries
    ]
    for row in of(rows, "shape"):
        goals.append(above(f"{row['shape']}_resumes_at", row["cached"], row["expected"], "tokens"))
        goals.append(above(f"{row['shape']}_text_is_its_control_s", float(row["equal"]), 1, "of 1"))
    for row in of(rows, "mode"):
        off = abs(row["keep"] - row["drop"] - row["expected_difference"])
        cell = f"{row['shape']}_{row['model']}"
        goals.append(below(f"{cell}_off_the_expected_difference", off, 0, "tokens"))
        goals += [
            above(f"{cell}_{what}", float(row[name]), 1, "of 1")
            for what, name in (
                ("kept_text_is_its_control_s", "keep_equal"),
                ("dropped_text_is_its_control_s", "drop_equal"),
                ("same_text_in_both_modes", "equal"),
            )
        ]
    most = max(row["computed"] - row["new"] for row in _later(rows, ours))
    goals.append(below("agent_computed_beyond_new", most, 1, "tokens"))
    goals.append(below("agent_ttft_over_vllm", _over(rows, ours, "vLLM"), 0.7))
    if "vLLM, finest" in _names(rows):
        goals.append(below("agent_ttft_over_vllm_finest", _over(rows, ours, "vLLM, finest"), 0.999))
    resumed = next(row["cached"] for row in of(rows, "turn 2") if row["engine"] == ours)
    goals.append(above("turn_of_1750_resumes_at", resumed, 1699, "tokens"))
    rates_on = [row for row in of(rows, "rate") if row["sessions"] == "on"]
    return goals + [below(f"{row['what']}_time_with_sessions", row["ratio"], 1.01) for row in rates_on]


def main() -> int:
    """Measure, show, and write the report; 0 if all goals are met."""
    arguments = options(
        "Conversations: where each turn resumes, and what it takes, beside vLLM's own prefix cache."
    ).parse_args()
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        for shape in ("demo", "gemma3"):
            write_checkpoint(shape, folder / shape)
        bench = Bench(folder, arguments.quick, random.Random(7))
        lacks = mooncake_lacks()
        if lacks:
            print(f"Mooncake is left out, for want of {lacks}.")
        mooncake = None if lacks or arguments.quick else stack.enter_context(mooncake_master(folder))
        try:
            rows = capacity(bench)
            if not arguments.quick:
                rows += shapes(bench) + modes(bench) + modes(replace(bench, shape="gemma3"))
            rows += agent(bench, mooncake)
            if not arguments.quick:
                rows += rates(bench)
        except EngineProcessError as error:
            print(error.log_tail, f"sessions.py: {error}", sep="\n", file=sys.stderr)
            return 2
    show(rows)
    goals = goals_of(rows)
    print_goals(goals)
    write_report(arguments.json_file, rows, goals)
    warn_if_busy(of(rows, "agent"), None)
    return 0 if all(goal.met for goal in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
