"""One vLLM engine in a child process, driven by a JSON job.

`python -m ucmcache.demo.engine FD` reads a job (the fields of `Job`) from stdin, carries its actions out one after the
other, and writes one JSON line per result to the file descriptor FD, so that vLLM's own output cannot mix in.
`run_engine` is the parent's side of it. Actions are objects with one key:

- `{"generate": {"prompt": [ids], "max_tokens": 32}}` computes a prompt. With `"follow": [ids]` in place of `"prompt"`,
  the prompt is the previous one, the tokens generated for it, and these.
- `{"reset_local": true}` empties vLLM's own prefix cache; a connector's stores stay.
- `{"settle": true}` steps the idle engine until the connector has nothing left to save.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import IO, Any

from ucmcache.errors import UcmCacheError

Result = dict[str, Any]
Action = Mapping[str, Any]

SETTLE_LIMIT_S = 30.0
# An engine that has been up has computed prompts of every length: kernels are made at the first use of a size, and the
# demo's document leaves this many tokens behind its last block. Below a hybrid's block: nothing is left to find.
_WARM_UP_TOKENS = 320
_LOG_TAIL_LINES = 25
# Before the first measurement: what an engine does in the background once it is up is not part of a request.
_PAUSE_S = 0.5


@dataclass(frozen=True, slots=True)
class Job:
    """What one engine process is to do."""

    model: str
    actions: Sequence[Action]
    kv_transfer_config: Mapping[str, Any] | None = None
    enable_prefix_caching: bool = True
    max_num_batched_tokens: int = 2048
    # Further keyword arguments of vllm.LLM.
    engine_args: Mapping[str, Any] = field(default_factory=dict)


class EngineProcessError(UcmCacheError):
    """An engine process that ended early; `log_tail` is the end of what it wrote."""

    def __init__(self, reason: str, log_tail: str) -> None:
        super().__init__(reason)
        self.log_tail = log_tail


def run_engine(job: Job, on_result: Callable[[Result], None] | None = None, limit_s: float = 600.0) -> list[Result]:
    """Run `job` in a process of its own; returns its results, the first of which is `{"ready": ...}`.

    `on_result` sees each result as it arrives. Raises EngineProcessError if the process fails or takes over `limit_s`.
    """
    read_fd, write_fd = os.pipe()
    with tempfile.TemporaryFile("w+", errors="replace") as log, open(read_fd) as lines:
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "ucmcache.demo.engine", str(write_fd)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(write_fd,),
                env=_child_environment(),
                text=True,
            )
        finally:
            os.close(write_fd)  # the child's copy is then the only one, and its end is our end-of-file
        expired = threading.Event()

        def stop() -> None:
            expired.set()
            process.kill()

        timer = threading.Timer(limit_s, stop)
        timer.start()
        try:
            results = _exchange(process, job, lines, on_result)
            exit_code = process.wait()
        finally:
            timer.cancel()
            process.kill()  # no effect on one that has ended; on an interrupt it must not outlive us
            process.wait()
        if exit_code != 0:
            reason = f"took over {limit_s:.0f} s" if expired.is_set() else f"ended with exit code {exit_code}"
            raise EngineProcessError(f"the engine process {reason}", _tail(log))
        return results


def _exchange(
    process: "subprocess.Popen[str]", job: Job, lines: IO[str], on_result: Callable[[Result], None] | None
) -> list[Result]:
    if process.stdin is not None:
        try:
            with process.stdin as stdin:
                json.dump(asdict(job), stdin)
        except BrokenPipeError:
            return []  # it ended before it read its job; the caller reports the exit code and the log
    results: list[Result] = []
    for line in lines:
        result = json.loads(line)
        results.append(result)
        if on_result is not None:
            on_result(result)
    return results


def _child_environment() -> dict[str, str]:
    defaults = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    # The scheduler is read in-process (see `_Engine`), so that setting is not the user's to choose.
    return {**defaults, **os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def _tail(log: IO[str]) -> str:
    log.seek(0)
    return "\n".join(log.read().splitlines()[-_LOG_TAIL_LINES:])


class _Engine:
    """The child's side: an offline vLLM engine stepped by hand, so that the first token's time is exact."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        from vllm import LLM

        started = time.perf_counter()
        llm = LLM(
            model=job["model"],
            skip_tokenizer_init=True,
            enforce_eager=True,
            enable_prefix_caching=job["enable_prefix_caching"],
            max_num_batched_tokens=job["max_num_batched_tokens"],
            kv_transfer_config=job["kv_transfer_config"],
            **job["engine_args"],
        )
        self._engine = llm.llm_engine
        self._core = self._engine.engine_core.engine_core
        self._requests = 0
        self._context: list[int] = []  # the last prompt and its output
        self._warm_up(llm.model_config.get_vocab_size())
        time.sleep(_PAUSE_S)
        self.ready = {
            "start_s": time.perf_counter() - started,
            "max_model_len": llm.model_config.max_model_len,
            "scheduler_block_tokens": self._core.scheduler.block_size,
            "groups": [
                {
                    "kind": type(group.kv_cache_spec).__name__,
                    "block_tokens": group.kv_cache_spec.block_size,
                    "layers": len(group.layer_names),
                }
                for group in self._core.scheduler.kv_cache_config.kv_cache_groups
            ],
        }

    def _warm_up(self, vocab_size: int) -> None:
        self._compute([(7919 * i + 1) % vocab_size for i in range(_WARM_UP_TOKENS)], max_tokens=4)
        self._context = []

    def generate(self, arguments: Mapping[str, Any]) -> Result:
        """Compute one prompt greedily, to exactly `max_tokens` tokens."""
        prompt = arguments["prompt"] if "prompt" in arguments else [*self._context, *arguments["follow"]]
        result = self._compute(prompt, arguments["max_tokens"])
        self._context = [*prompt, *result["tokens"]]
        return result

    def _compute(self, prompt: list[int], max_tokens: int) -> Result:
        from vllm import SamplingParams

        self._requests += 1
        request_id = f"demo-{self._requests}"
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        internal_id = self._engine.add_request(request_id, {"prompt_token_ids": prompt}, sampling)
        # The scheduler fills this in at admission and drops it with the first token; holding it keeps the numbers.
        prefill = self._core.scheduler.requests[internal_id].prefill_stats
        ttft_s: float | None = None
        while True:
            for output in self._engine.step():
                if output.request_id != request_id:
                    continue
                if ttft_s is None and output.outputs[0].token_ids:
                    ttft_s = time.perf_counter() - started
                if output.finished:
                    return {
                        "prompt_tokens": len(prompt),
                        "tokens": list(output.outputs[0].token_ids),
                        "finish_reason": output.outputs[0].finish_reason,
                        "cached_tokens": output.num_cached_tokens or 0,
                        "local_tokens": prefill.num_local_cached_tokens,
                        "external_tokens": prefill.num_external_cached_tokens,
                        "ttft_s": ttft_s,
                        "total_s": time.perf_counter() - started,
                    }

    def reset_local(self) -> Result:
        """Empty vLLM's own prefix cache; `done` is False when something still holds blocks."""
        self._engine.step()  # blocks of the last request are given back in the step after its last token
        return {"done": bool(self._engine.reset_prefix_cache())}

    def settle(self) -> Result:
        """Step the idle engine until the connector has nothing left to save, for at most SETTLE_LIMIT_S."""
        started = time.perf_counter()
        self._engine.step()  # the step in which the connector learns that the last request has finished
        connector = self._core.scheduler.connector
        while connector is not None and connector.has_pending_push_work():
            if time.perf_counter() - started > SETTLE_LIMIT_S:
                return {"done": False, "seconds": time.perf_counter() - started}
            self._engine.step()
            time.sleep(0.001)  # the work is on the connector's own threads: leave them the core
        return {"done": True, "seconds": time.perf_counter() - started}

    def act(self, action: Action) -> Result:
        """Carry out one action of the job; the result has the action's name as its one key."""
        (name,) = action
        if name == "generate":
            return {name: self.generate(action[name])}
        if name == "reset_local":
            return {name: self.reset_local()}
        if name == "settle":
            return {name: self.settle()}
        raise ValueError(f"unknown action {name!r}; there are generate, reset_local and settle")

    def shutdown(self) -> None:
        """Stop the engine in order, so that the connector's own shutdown runs."""
        self._engine.engine_core.shutdown()


def main(arguments: list[str]) -> int:
    """Command line of this module: the descriptor to write results to; the job comes on stdin."""
    results_fd = int(arguments[0])
    os.set_inheritable(results_fd, False)  # a worker process that outlives us must not keep the parent waiting
    job = json.load(sys.stdin)
    with open(results_fd, "w", buffering=1) as results:

        def report(result: Result) -> None:
            results.write(json.dumps(result) + "\n")

        engine = _Engine(job)
        report({"ready": engine.ready})
        for action in job["actions"]:
            report(engine.act(action))
        engine.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
