"""Time to the first token of a long prompt by where its prefix comes from, and what the connector costs without a hit.

Engines stay alive side by side and take turns prompt by prompt, so that what else the machine does meets them alike; a
ratio is the median of ratios between neighbours in time. Cases: cold, from vLLM's own cache ("local"), from host memory
after a local reset ("host"), and from the folder that an earlier process wrote ("disk", page cache warm). Where its
packages are there, vLLM's MooncakeStoreConnector computes the same prompts.

`serve.py --engine FD` is the child: a job, then actions, as JSON lines on stdin; results as JSON lines on FD.
"""

import argparse
import importlib.util
import inspect
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from _common import Neighbours, below, console, options, print_goals, table, write_report

from ucmcache.demo.checkpoints import RECIPES
from ucmcache.demo.engine import Action, EngineProcessError, Job, Result, _child_environment, _Engine, _tail
from ucmcache.demo.report import Goal
from ucmcache.demo.run import kv_transfer_config
from ucmcache.errors import UcmCacheError

DOCUMENT_TOKENS = 8000
DOCUMENT_OUTPUT_TOKENS = 16
NO_HIT_TOKENS = 1500
NO_HIT_OUTPUT_TOKENS = 64
ANSWER_LIMIT_S = 300.0
_IDLE_S = 0.001  # vLLM's engine process sleeps so long after a step that computed nothing (EngineCoreProc)
_NEIGHBOURS_TOLERATED = 0.25  # CPUs that other processes may want beyond those there are
_SEED = 41


# -- the child: an engine whose steps and connector hooks are timed --------------------------------------------------


class _Hooks:
    """Time inside a connector's hooks, both roles; a hook that calls another one counts once."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self.load_s = 0.0
        self._depth = 0

    def time(self, connector: Any) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

        for name in dir(KVConnectorBase_V1):
            if not name.startswith("_") and inspect.isfunction(inspect.getattr_static(connector, name)):
                setattr(connector, name, self._timed(getattr(connector, name), name == "start_load_kv"))

    def _timed(self, hook: Callable[..., Any], loads: bool) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            started = time.perf_counter()
            try:
                return hook(*args, **kwargs)
            finally:
                taken_s = time.perf_counter() - started
                self._depth -= 1
                if self._depth == 0:
                    self.total_s += taken_s
                    self.load_s += taken_s if loads else 0.0

        return timed


@dataclass(frozen=True, slots=True)
class _Step:
    started_s: float
    taken_s: float
    tokens: int  # scheduled; 0 in a step that only waited or moved bytes
    hooks_s: float
    load_s: float  # of it, in start_load_kv


class _TimedEngine(_Engine):
    """The demo's engine; each result of `generate` also tells its steps and where its time to the first token went."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        super().__init__(job)
        self._steps: list[_Step] = []
        self._tokens = 0
        self._hooks = _Hooks()
        if self._core.scheduler.connector is not None:
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            self._hooks.time(self._core.scheduler.connector)
            self._hooks.time(get_kv_transfer_group())
        schedule, step = self._core.scheduler.schedule, self._engine.step

        def counted_schedule(*args: Any) -> Any:
            output = schedule(*args)
            self._tokens = output.total_num_scheduled_tokens
            return output

        def timed_step() -> Any:
            self._tokens, hooks_s, load_s = 0, self._hooks.total_s, self._hooks.load_s
            started = time.perf_counter()
            outputs = step()
            if not self._tokens and self._core.scheduler.has_requests():
                time.sleep(_IDLE_S)
            taken_s = time.perf_counter() - started
            hooks_s, load_s = self._hooks.total_s - hooks_s, self._hooks.load_s - load_s
            self._steps.append(_Step(started, taken_s, self._tokens, hooks_s, load_s))
            return outputs

        self._core.scheduler.schedule = counted_schedule
        self._engine.step = timed_step

    def generate(self, arguments: Mapping[str, Any]) -> Result:
        self._steps.clear()
        hooks_s = self._hooks.total_s
        neighbours, began = Neighbours(), time.perf_counter()
        result = super().generate(arguments)
        result["neighbour_cpus"] = neighbours.cpus()
        result["hooks_s"] = self._hooks.total_s - hooks_s
        result["steps"] = [[step.tokens, step.taken_s, step.hooks_s] for step in self._steps]
        result["phases"] = _phases(began, result["ttft_s"], self._steps)
        return result


def _phases(began: float, ttft_s: float, steps: Sequence[_Step]) -> dict[str, float]:
    """Where the time to the first token went; `rest_s` is what lies between the steps and in vLLM's front end."""
    steps = [step for step in steps if step.started_s - began < ttft_s]
    idle = [step for step in steps if not step.tokens]
    computing = [step for step in steps if step.tokens]
    phases = {
        "idle_steps": len(idle),
        "compute_steps": len(computing),
        "admit_s": steps[0].started_s - began,
        "wait_s": sum(step.taken_s - step.load_s for step in idle),
        "load_s": sum(step.load_s for step in idle),
        "hooks_s": sum(step.hooks_s for step in computing),
        "compute_s": sum(step.taken_s - step.hooks_s for step in computing),
    }
    return {**phases, "rest_s": ttft_s - sum(value for name, value in phases.items() if name.endswith("_s"))}


def engine_main(results_fd: int) -> int:
    os.set_inheritable(results_fd, False)
    job = json.loads(sys.stdin.readline())
    with open(results_fd, "w", buffering=1) as results:
        engine = _TimedEngine(job)
        results.write(json.dumps({"ready": engine.ready}) + "\n")
        for line in sys.stdin:
            results.write(json.dumps(engine.act(json.loads(line))) + "\n")
        engine.shutdown()
    return 0


# -- the parent's side of one engine ---------------------------------------------------------------------------------


class LiveEngine:
    """An engine process that waits for its next action. Raises EngineProcessError when it ends or hangs."""

    def __init__(self, job: Job, environment: Mapping[str, str] | None = None) -> None:
        read_fd, write_fd = os.pipe()
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed by `close`
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--engine", str(write_fd)],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            pass_fds=(write_fd,),
            env={**_child_environment(), **(environment or {})},
            text=True,
            bufsize=1,
        )
        os.close(write_fd)
        self._results = open(read_fd)  # noqa: SIM115
        self._send(asdict(job))
        self._ready = False

    def generate(self, prompt: Sequence[int], max_tokens: int) -> Result:
        """The result of `ucmcache.demo.engine`, with steps and phases."""
        return self._ask({"generate": {"prompt": prompt, "max_tokens": max_tokens}})

    def settle(self) -> None:
        """Until the connector has saved everything."""
        self._must({"settle": True})

    def reset_local(self) -> None:
        """Empty vLLM's own prefix cache."""
        self._must({"reset_local": True})

    def wait_ready(self) -> None:
        """Until the engine has started."""
        if not self._ready:
            self._receive()
            self._ready = True

    def close(self) -> None:
        """Let it shut down in order; kill it if it does not."""
        try:
            if self._process.stdin is not None:
                self._process.stdin.close()
            self._process.wait(timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        finally:
            self._results.close()
            self._log.close()

    def _must(self, action: Action) -> None:
        if not self._ask(action)["done"]:
            raise UcmCacheError(f"{next(iter(action))} did not finish; the times after it would mean nothing")

    def _ask(self, action: Action) -> Result:
        self.wait_ready()
        self._send(action)
        (result,) = self._receive().values()
        return dict(result)

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            if self._process.stdin is not None:
                self._process.stdin.write(json.dumps(message) + "\n")
        except BrokenPipeError:
            pass  # `_receive` says why

    def _receive(self) -> Result:
        timer = threading.Timer(ANSWER_LIMIT_S, self._process.kill)
        timer.start()
        try:
            line = self._results.readline()
        finally:
            timer.cancel()
        if not line:
            raise EngineProcessError(f"an engine process ended with {self._process.wait()}", _tail(self._log))
        return dict(json.loads(line))


# -- Mooncake --------------------------------------------------------------------------------------------------------


def mooncake_lacks() -> str:
    """What is missing to run MooncakeStoreConnector; empty if nothing is."""
    lacks = []
    if importlib.util.find_spec("mooncake") is None:
        lacks.append("the Python package mooncake-transfer-engine-non-cuda (or a CUDA build of it)")
    else:
        tried = subprocess.run(
            [sys.executable, "-c", "import mooncake.store"], capture_output=True, text=True, check=False
        )
        if tried.returncode != 0:
            why = tried.stderr.strip().splitlines()[-1:] or ["no message"]
            lacks.append(f"a library that mooncake.store needs ({why[0]}; on Debian libibverbs1 librdmacm1 libnuma1)")
    if _mooncake_master() is None:
        lacks.append("the program mooncake_master, which that package brings")
    return " and ".join(lacks)


def _mooncake_master() -> str | None:
    beside = Path(sys.executable).parent / "mooncake_master"
    return str(beside) if beside.exists() else shutil.which("mooncake_master")


@contextmanager
def mooncake_master(folder: Path) -> Iterator[Mapping[str, str]]:
    """A master of its own on free ports; gives the environment that an engine needs to reach it."""
    port, metrics_port = _free_port(), _free_port()
    config = folder / "mooncake.json"
    config.write_text(
        json.dumps(
            {
                "metadata_server": "P2PHANDSHAKE",
                "master_server_address": f"127.0.0.1:{port}",
                "protocol": "tcp",
                "device_name": "",
                "global_segment_size": 2 << 30,
                "local_buffer_size": 512 << 20,
            }
        )
    )
    with (folder / "mooncake_master.log").open("w") as log:
        master = subprocess.Popen(
            [_mooncake_master() or "mooncake_master", "--port", str(port), "--metrics_port", str(metrics_port)],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            _wait_for_port(port)
            yield {
                "MOONCAKE_CONFIG_PATH": str(config),
                "MOONCAKE_REQUESTER_LOCAL_HOSTNAME": "127.0.0.1",
                "VLLM_HOST_IP": "127.0.0.1",
            }
        finally:
            master.terminate()
            try:
                master.wait(timeout=10)
            except subprocess.TimeoutExpired:
                master.kill()
                master.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for_port(port: int) -> None:
    for _ in range(100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise UcmCacheError(f"mooncake_master does not listen on port {port}")


# -- what is measured ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    documents: int
    repeats: int  # of each hit that can be repeated
    no_hit_prompts: int
    host_only: bool  # an engine that keeps nothing in a folder
    control: bool  # a second engine without connector: how much two equal processes differ
    warm_up_tokens: int  # of the document that is not counted: an engine's first large prompt is slower than the rest


FULL = Plan(documents=5, repeats=3, no_hit_prompts=10, host_only=True, control=True, warm_up_tokens=DOCUMENT_TOKENS)
QUICK = Plan(documents=1, repeats=2, no_hit_prompts=2, host_only=False, control=False, warm_up_tokens=2000)


@dataclass(slots=True)
class Samples:
    """One case of one variant: a result per run, and plain vLLM's times for the same document beside it."""

    results: list[Result] = field(default_factory=list)
    cold_s: list[float] = field(default_factory=list)
    local_s: list[float] = field(default_factory=list)
    equal: bool = True


Cases = dict[tuple[str, str], Samples]  # (variant, case)
NoHits = dict[str, list[Result]]  # variant -> a result per prompt


class Bench:
    """The engines, the prompts and what was measured."""

    def __init__(self, plan: Plan, model: Path, folder: Path, mooncake: Mapping[str, str] | None) -> None:
        self._plan = plan
        self._model = model
        self._store = folder / "store"
        self._mooncake = mooncake
        draw = random.Random(_SEED)
        vocab_size = RECIPES["demo"].config["vocab_size"]

        def prompts(count: int, tokens: int) -> list[list[int]]:
            return [[draw.randrange(vocab_size) for _ in range(tokens)] for _ in range(count)]

        # The first of each only warms up.
        self._documents = prompts(1, plan.warm_up_tokens) + prompts(plan.documents, DOCUMENT_TOKENS)
        self._no_hit_prompts = prompts(1 + plan.no_hit_prompts, NO_HIT_TOKENS)
        self._reference: list[list[int]] = []
        self._cold_s: list[float] = []
        self.cases: Cases = {}
        self.no_hits: NoHits = {}

    def run(self) -> None:
        with ExitStack() as stack:

            def start(variant: str) -> LiveEngine:
                engine = self._start(variant)
                stack.callback(engine.close)
                return engine

            file = self._start("file")
            try:
                chosen = {"plain": True, "host": self._plan.host_only, "mooncake": self._mooncake is not None}
                engines = {variant: start(variant) for variant, wanted in chosen.items() if wanted}
                for number in range(len(self._documents)):
                    self._first_time(number, {**engines, "file": file})
            finally:
                file.close()
            self._warm_page_cache()
            engines["file"] = start("file")
            for number in range(len(self._documents)):
                self._after_restart(number, engines["plain"], engines["file"])
            if self._plan.control:
                engines["control"] = start("plain")
            self._without_hits(engines)

    def _start(self, variant: str) -> LiveEngine:
        on_disk = kv_transfer_config(self._store)
        transfer = {
            "plain": None,
            "host": {**on_disk, "kv_connector_extra_config": {}},
            "file": on_disk,
            "mooncake": {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"},
        }[variant]
        job = Job(
            model=str(self._model),
            actions=(),
            kv_transfer_config=transfer,
            engine_args={"max_model_len": DOCUMENT_TOKENS + NO_HIT_OUTPUT_TOKENS},
        )
        return LiveEngine(job, self._mooncake if variant == "mooncake" else None)

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

    def _without_hits(self, engines: Mapping[str, LiveEngine]) -> None:
        """Prompts that nobody has seen, each in every engine before the next; who begins goes round."""
        names = list(engines)
        for number, prompt in enumerate(self._no_hit_prompts):
            turn = number % len(names)
            for variant in names[turn:] + names[:turn]:
                result = engines[variant].generate(prompt, NO_HIT_OUTPUT_TOKENS)
                engines[variant].settle()  # what it still has to write must not slow the next engine
                if number:
                    self.no_hits.setdefault(variant, []).append(result)

    def _warm_page_cache(self) -> None:
        for path in self._store.rglob("*"):
            if path.is_file():
                path.read_bytes()


# -- what is said of it ----------------------------------------------------------------------------------------------

NAMES = {
    "plain": "vLLM",
    "control": "vLLM again",
    "host": "ucmcache, host only",
    "file": "ucmcache, folder",
    "mooncake": "Mooncake",
}
_PHASES = ("admit_s", "wait_s", "load_s", "hooks_s", "compute_s", "rest_s")


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
                "over_local": _ratio(times, samples.local_s),
                "over_cold": _ratio(times, samples.cold_s),
                "outputs_equal": samples.equal,
                "neighbour_cpus": statistics.fmean(result["neighbour_cpus"] for result in samples.results),
                "phases": {
                    name: statistics.median(result["phases"][name] for result in samples.results)
                    for name in samples.results[0]["phases"]
                },
            }
        )
    return rows


def no_hit_rows(no_hits: NoHits) -> list[dict[str, Any]]:
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
                "decode_overhead": _ratio(map(_decode_step_s, results), map(_decode_step_s, plain)) - 1,
                "prefill_overhead": _ratio(map(_prefill_s, results), map(_prefill_s, plain)) - 1,
                "total_overhead": _ratio((r["total_s"] for r in results), (r["total_s"] for r in plain)) - 1,
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


def _ratio(times: Iterable[float], references: Iterable[float]) -> float:
    return statistics.median(one / other for one, other in zip(times, references, strict=True))


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


def goals_of(ttft: Sequence[Mapping[str, Any]], no_hit: Sequence[Mapping[str, Any]]) -> list[Goal]:
    """The goals; of the two variants without a hit, the worse counts."""
    disk = next(row for row in ttft if row["variant"] == "file" and row["case"] == "disk")
    overhead = max(row["hooks_share"] for row in no_hit if row["variant"] in ("host", "file"))
    equal = all(row["outputs_equal"] for row in [*ttft, *no_hit] if row["variant"] != "mooncake")
    return [
        below("ttft_after_restart_over_local", disk["over_local"], 1.25),
        below("ttft_after_restart_over_cold", disk["over_cold"], 0.10),
        below("no_hit_overhead", overhead, 0.02, "share of step time"),
        Goal("outputs_equal", equal, "true", "", equal),
    ]


def show(ttft: Sequence[Mapping[str, Any]], no_hit: Sequence[Mapping[str, Any]]) -> None:
    out = console()
    headings = ("TTFT in ms", "case", "prompt", "local", "external", "runs", "median", "min", "max", "over\nlocal")
    out.print(
        table(
            "Time to the first token, by where the prefix comes from",
            (*headings, "over\ncold", "outputs\nequal", "neigh-\nbours"),
            [
                (
                    NAMES[row["variant"]],
                    row["case"],
                    *(f"{row[name]:,}" for name in ("prompt_tokens", "local_tokens", "external_tokens", "samples")),
                    *(_ms(row[name]) for name in ("ttft_s", "ttft_min_s", "ttft_max_s")),
                    f"{row['over_local']:.2f}",
                    f"{row['over_cold']:.3f}",
                    "yes" if row["outputs_equal"] else "NO",
                    f"{row['neighbour_cpus']:.1f}",
                )
                for row in sorted(ttft, key=lambda row: list(NAMES).index(row["variant"]))
            ],
        )
    )
    out.print(
        table(
            "Where the time to the first token goes (ms, medians)",
            ("", "case", "idle steps", "steps", "admit", "wait", "load", "hooks", "compute", "rest", "TTFT"),
            [
                (
                    NAMES[row["variant"]],
                    row["case"],
                    *(f"{row['phases'][name]:.0f}" for name in ("idle_steps", "compute_steps")),
                    *(_ms(row["phases"][name]) for name in _PHASES),
                    _ms(row["ttft_s"]),
                )
                for row in sorted(ttft, key=lambda row: list(NAMES).index(row["variant"]))
                if row["case"] != "cold"
            ],
        )
    )
    out.print(
        table(
            f"No hit: {no_hit[0]['samples']} prompts of {NO_HIT_TOKENS:,} tokens, {NO_HIT_OUTPUT_TOKENS} tokens each",
            (
                "ms; over vLLM; share in hooks",
                *("decode\nstep", "prefill", "total", "over\ndecode", "over\nprefill", "over\ntotal"),
                *("hooks/\ndecode", "hooks/\nprefill", "hooks/\nall", "outputs\nequal", "neigh-\nbours"),
            ),
            [
                (
                    NAMES[row["variant"]],
                    *(_ms(row[name]) for name in ("decode_step_s", "prefill_s", "total_s")),
                    *(f"{row[name]:+.1%}" for name in ("decode_overhead", "prefill_overhead", "total_overhead")),
                    *(f"{row[name]:.2%}" for name in ("hooks_decode_share", "hooks_prefill_share", "hooks_share")),
                    "yes" if row["outputs_equal"] else "NO",
                    f"{row['neighbour_cpus']:.1f}",
                )
                for row in no_hit
            ],
        )
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.1f}"


def main() -> int:
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
    parser.add_argument("--engine", type=int, metavar="FD", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine is not None:
        return engine_main(arguments.engine)
    plan = QUICK if arguments.quick else FULL
    wants_mooncake = (arguments.mooncake or ("off" if arguments.quick else "auto")) == "auto"
    lacks = mooncake_lacks() if wants_mooncake else ""
    if lacks:
        print(f"without Mooncake; missing: {lacks}")
    if arguments.threads is not None:
        os.environ.update(OMP_NUM_THREADS=str(arguments.threads), VLLM_CPU_OMP_THREADS_BIND="nobind")
    load_before, started = os.getloadavg(), time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(prefix="ucmcache-serve-") as name, ExitStack() as stack:
            folder = Path(name)
            environment = stack.enter_context(mooncake_master(folder)) if wants_mooncake and not lacks else None
            bench = Bench(plan, _demo_model(), folder, environment)
            bench.run()
    except EngineProcessError as error:
        print(error.log_tail, f"serve.py: {error}", sep="\n", file=sys.stderr)
        return 2
    ttft, no_hit = ttft_rows(bench.cases), no_hit_rows(bench.no_hits)
    goals = goals_of(ttft, no_hit)
    show(ttft, no_hit)
    conditions = {
        "load_before": load_before,
        "load_after": os.getloadavg(),
        "threads": arguments.threads,
        "seconds": round(time.perf_counter() - started, 1),
    }
    print(f"neighbours: CPUs that other processes kept busy meanwhile, of {os.cpu_count()}; {conditions}")
    neighbour_cpus = max(row["neighbour_cpus"] for row in [*ttft, *no_hit])
    if (arguments.threads or os.cpu_count() or 1) + neighbour_cpus > (os.cpu_count() or 1) + _NEIGHBOURS_TOLERATED:
        print(
            "WARNING: in some rows (see neighbours) more CPUs were wanted than there are: their times mean little. "
            "Wait for a quiet machine, or leave CPUs to the neighbours with --threads."
        )
    print_goals(goals)
    write_report(arguments.json_file, [*ttft, *no_hit], goals, conditions=conditions)
    return 0 if goals[-1].met else 1


def _demo_model() -> Path:
    model = Path(tempfile.gettempdir()) / f"ucmcache-bench-{os.getuid()}" / "model"
    subprocess.run([sys.executable, "-m", "ucmcache.demo.checkpoints", "demo", str(model)], check=True)
    return model


if __name__ == "__main__":
    sys.exit(main())
