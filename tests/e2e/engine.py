"""A real vLLM engine on CPU for the tests, in the process that imports this.

Every engine's KV memory is filled with huge numbers before the first request and after every local reset, so that
bytes which nobody wrote cannot pass for zeros. (Not with NaN: vLLM's CPU attention multiplies the unwritten rest of a
block by zero, which a number does not survive and NaN does.)
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

_MISTAKES = (":AttributeError", ":IndexError", ":KeyError", ":NameError", ":TypeError", ":UnboundLocalError")


def transfer_config(
    extra: Mapping[str, Any] | None,
    policy: str = "fail",
    module: str = "ucmcache.connector",
    name: str = "UcmCacheConnector",
) -> dict[str, Any]:
    """What an operator passes as --kv-transfer-config."""
    return {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": dict(extra or {}),
    }


def _poison(worker: Any) -> None:
    seen = set()
    for value in worker.model_runner.kv_caches:
        for tensor in value if isinstance(value, list | tuple) else [value]:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                storage.fill_(0x4F)


class Engine:
    """One engine, stepped by hand."""

    def __init__(self, model: str, transfer: Mapping[str, Any] | None, **options: Any) -> None:
        from vllm import LLM

        self.counts: Counter[str] = Counter()
        if transfer is not None:
            self._tally()
        options.setdefault("max_model_len", 4096)
        self.llm = LLM(
            model=model,
            skip_tokenizer_init=True,
            enforce_eager=True,
            kv_transfer_config=dict(transfer) if transfer is not None else None,
            **options,
        )
        self.engine: Any = self.llm.llm_engine
        self.core: Any = self.engine.engine_core.engine_core
        self.scheduler: Any = self.core.scheduler
        self.connector: Any = self.scheduler.connector
        self._next = 0
        self.ids: dict[str, str] = {}  # our name of a request -> the engine's
        self.steps = 0
        self.stats: dict[str, Any] = {}
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        if transfer is not None and self.core.vllm_config.parallel_config.world_size > 1:
            self._tally_workers()
        self.poison()

    def _tally_workers(self) -> None:
        """Counts of workers in processes of their own, as they arrive here."""
        update = self.connector.update_connector_output

        def tally(output: Any) -> None:
            if output.kv_connector_stats is not None:
                self.counts.update(output.kv_connector_stats.data)
            update(output)

        self.connector.update_connector_output = tally

    def _tally(self) -> None:
        from ucmcache.connector.metrics import Counters

        add = Counters.add
        counts = self.counts

        def tally(counters: Counters, name: str, amount: int, label: str = "") -> None:
            counts[f"{name}/{label}" if label else name] += amount
            add(counters, name, amount, label)

        setattr(Counters, "add", tally)

    @property
    def block_tokens(self) -> int:
        """The grid of resume positions."""
        return int(self.scheduler.block_size)

    def poison(self) -> None:
        """Fill all KV memory with 3.5e9, in bfloat16 as in float32."""
        self.core.model_executor.collective_rpc(_poison)

    def poison_free(self) -> None:
        """Fill all KV memory with the poison while no request runs and no local cache could be hurt."""
        self.finish()
        if self.scheduler.kv_cache_manager.enable_caching:
            raise AssertionError("the engine's own cache would be poisoned; use reset_local")
        self.poison()

    def add(self, prompt: Sequence[int], max_tokens: int, **sampling: Any) -> str:
        """Queue a prompt; returns its name."""
        from vllm import SamplingParams

        self._next += 1
        name = f"t{self._next}"
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **sampling)
        self.ids[name] = self.engine.add_request(name, {"prompt_token_ids": list(prompt)}, params) or name
        self.outputs[name] = []
        self.stats[name] = self.scheduler.requests[self.ids[name]].prefill_stats
        return name

    def step(self) -> None:
        """One engine step."""
        self.steps += 1
        for output in self.engine.step():
            self.outputs[output.request_id] = list(output.outputs[0].token_ids)
            if output.finished:
                self.reasons[output.request_id] = str(output.outputs[0].finish_reason)

    def abort(self, name: str) -> None:
        """Abort a request."""
        self.engine.abort_request([name])

    def finish(self) -> None:
        """Step until all requests have ended and the connector has nothing in flight."""
        while self.engine.has_unfinished_requests() or self.scheduler.has_requests():
            self.step()

    def generate(self, prompt: Sequence[int], max_tokens: int = 16) -> dict[str, Any]:
        """Run one prompt; tokens, and how many prompt tokens were resumed locally and externally."""
        return self.generate_all([prompt], max_tokens)[0]

    def generate_all(self, prompts: Sequence[Sequence[int]], max_tokens: int = 16) -> list[dict[str, Any]]:
        """Run prompts at once."""
        names = [self.add(prompt, max_tokens) for prompt in prompts]
        self.finish()
        return [
            {
                "tokens": self.outputs[name],
                "local": self.stats[name].num_local_cached_tokens,
                "external": self.stats[name].num_external_cached_tokens,
                "reason": self.reasons.get(name),
            }
            for name in names
        ]

    def reset_local(self) -> None:
        """Forget vLLM's own prefix cache and poison its memory."""
        self.finish()
        if not self.engine.reset_prefix_cache():
            raise AssertionError("vLLM's prefix cache could not be reset: something still holds blocks")
        self.poison()

    def read_index(self) -> None:
        """Wait until the backend is listed."""
        side = self.connector._scheduler
        while side._discovery.is_listing or side._discovery._found:
            side._learn()
            time.sleep(0.001)

    def preempt_all(self) -> None:
        """Preempt what runs, as vLLM does when its weights change, and poison all KV memory."""
        if not self.engine.reset_prefix_cache(reset_running_requests=True):
            raise AssertionError("the running requests were not preempted")
        self.poison()

    def free_blocks(self) -> int:
        """Free blocks of the engine's pool."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def shutdown(self) -> None:
        """Stop in order. Of the failures that cost an operator only time, a programming error is none."""
        self.engine.engine_core.shutdown()
        mistakes = {name: count for name, count in self.counts.items() if name.endswith(_MISTAKES) and count}
        if mistakes:
            raise AssertionError(f"the connector, or what watches it, is wrong: {mistakes}")
