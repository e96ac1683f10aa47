"""`ucmcache demo`: a conversation about a long document, the engine restarted in between, and what the restart cost.

Three engine processes, one after the other: a first run that saves to a folder, a second that finds it there, and vLLM
without a connector, which gives the reference outputs and times. Nothing here imports torch or vllm.
"""

import json
import os
import random
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ucmcache.demo.engine import Action, EngineProcessError, Job, Result, run_engine
from ucmcache.demo.report import Turn, provenance, render, report_json, verdict
from ucmcache.errors import ConfigError, UcmCacheError

FOLLOW_UPS = 3
FOLLOW_UP_TOKENS = 200  # new tokens that each follow-up adds to the conversation so far
OUTPUT_TOKENS = 32
LOCAL_REPEATS = 3  # a local hit is short, so one measurement of it says little
_SEED = 20


class Reference(NamedTuple):
    """One prompt in vLLM without a connector."""

    # In the course of the conversation, on what vLLM's own cache kept. Its tokens are the reference: the cold ones are
    # not, because bytes that decoding wrote are rounded otherwise than a prefill's, and plain vLLM flips a token by it.
    in_course: Result
    cold: Result
    local: Sequence[Result]  # repeats, after the cold one


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line chose."""

    model: Path | None = None  # None: the demo checkpoint
    document_tokens: int = 8000
    keep: Path | None = None
    json_file: Path | None = None


def first_difference(expected: Sequence[int], *others: Sequence[int]) -> int | None:
    """Index of the first token at which any of `others` departs from `expected`; None if all are the same.

    An output that merely ends earlier or later departs where the shorter one ends.
    """
    found = (_difference(expected, other) for other in others)
    return min((index for index in found if index is not None), default=None)


def _difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def assemble_turns(first: Sequence[Result], restarted: Sequence[Result], references: Sequence[Reference]) -> list[Turn]:
    """Rows from the `generate` results of the three processes, one of each per turn."""
    return [
        Turn(
            turn="document" if number == 0 else f"turn {number + 1}",
            prompt_tokens=plain.cold["prompt_tokens"],
            resumed_tokens=after["external_tokens"],
            ttft_cold_s=plain.cold["ttft_s"],
            ttft_local_s=statistics.median(hit["ttft_s"] for hit in plain.local),
            ttft_restart_s=after["ttft_s"],
            # The first run saved what the restart resumed from, so its own outputs are held to the reference too.
            differs_at=first_difference(plain.in_course["tokens"], before["tokens"], after["tokens"]),
        )
        for number, (before, after, plain) in enumerate(zip(first, restarted, references, strict=True))
    ]


def run_demo(settings: Settings) -> int:
    """Run the demo and print its table; returns the exit code: 0 as promised, 1 not so, 2 it could not be run."""
    errors = Console(stderr=True)
    try:
        turns, totals = _measure(settings, errors)
    except UcmCacheError as error:
        if isinstance(error, EngineProcessError):
            errors.print(error.log_tail, markup=False, highlight=False, soft_wrap=True)
        errors.print(f"ucmcache demo: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    Console().print(render(turns, totals))
    if settings.json_file is not None:
        report = report_json(turns, totals, provenance(shlex.join(["ucmcache", *sys.argv[1:]])))
        settings.json_file.write_text(json.dumps(report, indent=2) + "\n")
    exit_code, reason = verdict(turns)
    if reason:
        errors.print(f"ucmcache demo: {reason}", style="red", markup=False, highlight=False, soft_wrap=True)
    return exit_code


def _measure(settings: Settings, console: Console) -> tuple[list[Turn], dict[str, Any]]:
    started = time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with _store_folder(settings) as store, Progress(*columns, console=console) as progress:
        model = settings.model or _demo_model(_work_folder(settings), progress)
        conversation = _Conversation(model, settings.document_tokens, progress)
        first = conversation.first_run(store)
        prompts = conversation.prompts(first)
        restarted = conversation.after_restart(prompts, store)
        references = conversation.without_connector(prompts)
        disk_bytes = sum(file.stat().st_size for file in store.rglob("*") if file.is_file())
    totals = {"disk_bytes": disk_bytes, "seconds": round(time.perf_counter() - started, 1), "model": str(model)}
    return assemble_turns(first, restarted, references), totals


class _Conversation:
    """The prompts, and the three engine processes that compute them."""

    def __init__(self, model: Path, document_tokens: int, progress: Progress) -> None:
        self._model = model
        self._progress = progress
        longest_tokens = document_tokens + FOLLOW_UPS * FOLLOW_UP_TOKENS + (FOLLOW_UPS + 1) * OUTPUT_TOKENS
        vocab_size = _read_vocab_size(model, longest_tokens)
        # The limit keeps vLLM from asking for room for the longest prompt that the model could take.
        self._max_model_len = longest_tokens
        draw = random.Random(_SEED)
        self._document = [draw.randrange(vocab_size) for _ in range(document_tokens)]
        self._follow_ups = [[draw.randrange(vocab_size) for _ in range(FOLLOW_UP_TOKENS)] for _ in range(FOLLOW_UPS)]

    def first_run(self, store: Path) -> list[Result]:
        """Compute and save every turn."""
        turns: list[Action] = [_generate(prompt=self._document)]
        turns += [_generate(follow=tokens) for tokens in self._follow_ups]
        return self._run("first run", [*turns, {"settle": True}], store)

    def prompts(self, first: Sequence[Result]) -> list[list[int]]:
        """The prompts of all turns, spelled out with what the first run generated."""
        prompts = [self._document]
        for result, tokens in zip(first, self._follow_ups, strict=False):
            prompts.append([*prompts[-1], *result["tokens"], *tokens])
        return prompts

    def after_restart(self, prompts: Sequence[list[int]], store: Path) -> list[Result]:
        """The same prompts in a new engine, its own cache emptied before each: all come from the connector."""
        actions: list[Action] = []
        for prompt in prompts:
            actions += [{"settle": True}, {"reset_local": True}, _generate(prompt=prompt)]
        return self._run("after restart", actions, store)

    def without_connector(self, prompts: Sequence[list[int]]) -> list[Reference]:
        """Plain vLLM: the conversation in its course, then every prompt cold and again from vLLM's own cache."""
        # The course comes first: an engine's first large prompt is slower than the rest, and would flatter the restart.
        actions = [_generate(prompt=prompt) for prompt in prompts]
        for prompt in prompts:
            actions += [{"reset_local": True}, *[_generate(prompt=prompt)] * (1 + LOCAL_REPEATS)]
        results = self._run("without connector", actions, None)
        in_course, rest = results[: len(prompts)], iter(results[len(prompts) :])
        return [Reference(turn, next(rest), [next(rest) for _ in range(LOCAL_REPEATS)]) for turn in in_course]

    def _run(self, description: str, actions: Sequence[Action], store: Path | None) -> list[Result]:
        task = self._progress.add_task(description, total=1 + len(actions))

        def advance(_: Result) -> None:
            self._progress.advance(task)

        results = run_engine(
            Job(
                model=str(self._model),
                actions=actions,
                kv_transfer_config=None if store is None else kv_transfer_config(store),
                engine_args={"max_model_len": self._max_model_len},
            ),
            on_result=advance,
        )
        for result in results:
            for name in ("settle", "reset_local"):
                if name in result and not result[name]["done"]:
                    raise UcmCacheError(f"{description}: {name} did not finish; its times would mean nothing")
        return [result["generate"] for result in results if "generate" in result]


def _generate(**arguments: Any) -> Action:
    return {"generate": {**arguments, "max_tokens": OUTPUT_TOKENS}}


def kv_transfer_config(store: Path) -> dict[str, Any]:
    """vLLM's `--kv-transfer-config` for ucmcache on a folder."""
    return {
        "kv_connector": "UcmCacheConnector",
        "kv_connector_module_path": "ucmcache.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"backend": {"url": store.absolute().as_uri()}},
    }


def _read_vocab_size(model: Path, longest_tokens: int) -> int:
    config_file = model / "config.json"
    try:
        config = json.loads(config_file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {model}: cannot read {config_file}: {error}; name a checkpoint's folder") from error
    text = {**config, **config.get("text_config", {})}
    if not isinstance(text.get("vocab_size"), int):
        raise ConfigError(f"--model {model}: {config_file} states no vocab_size; name a language model's folder")
    limit_tokens = text.get("max_position_embeddings", longest_tokens)
    if longest_tokens > limit_tokens:
        spare = limit_tokens - longest_tokens
        raise ConfigError(
            f"the conversation takes {longest_tokens} tokens and {model} at most {limit_tokens}; "
            f"lower --document-tokens by {-spare}"
        )
    return int(text["vocab_size"])


def _work_folder(settings: Settings) -> Path:
    if settings.keep is not None:
        settings.keep.mkdir(parents=True, exist_ok=True)
        return settings.keep
    folder = Path(tempfile.gettempdir()) / f"ucmcache-demo-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise ConfigError(f"{folder} belongs to another user; name a folder of your own with --keep")
    return folder


@contextmanager
def _store_folder(settings: Settings) -> Iterator[Path]:
    # New for every run, since the first engine is to find nothing.
    store = Path(tempfile.mkdtemp(prefix="store-", dir=_work_folder(settings)))
    try:
        yield store
    finally:
        if settings.keep is None:
            shutil.rmtree(store, ignore_errors=True)


def _demo_model(work: Path, progress: Progress) -> Path:
    task = progress.add_task("demo model", total=1)
    model = work / "model"
    command = [sys.executable, "-m", "ucmcache.demo.checkpoints", "demo", str(model)]
    made = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if made.returncode != 0:
        raise EngineProcessError(f"making the demo model ended with exit code {made.returncode}", made.stdout)
    progress.advance(task)
    return model
