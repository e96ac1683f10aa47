"""A simulated engine: vLLM's real scheduler, a model whose KV and state are pure functions of the tokens.

The forward checks every byte that it reads (KV of all earlier tokens, state at the chunk start) against what the tokens
say, so a wrong resume fails at once, in milliseconds. Memory is laid out by vLLM's own code; the order of hooks is the
V1 or the V2 model runner's. Scheduler side and worker sides are the product's own, through the real connector.
"""

from __future__ import annotations

import copy
import functools
import json
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

POISON = 0xAB
VOCAB = 50
KV_TOKEN_BYTES = 32  # one head of eight K and eight V values, two bytes each


@dataclass(frozen=True)
class Group:
    """One KV cache group: "full", "latent", "window", "chunk", "state", "mixed" (its first layer latent, the others
    full), or "ring", which is scratch of one request.

    The ranks of a stage hold so many `shards` of it between them, each its own if 0; of a latent group all the same.
    """

    kind: str
    block_tokens: int
    window: int = 0
    shards: int = 0
    layers: int = 2

    @property
    def sees_a_window(self) -> bool:
        return self.kind in ("window", "chunk")


@dataclass
class WrongBytesError(Exception):
    """The forward read bytes that the tokens do not explain."""

    where: str

    def __str__(self) -> str:
        return self.where


@functools.cache
def _vllm_config(model: str, extra: str, order: str, policy: str, overrides: str) -> Any:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=4096,
        kv_transfer_config=KVTransferConfig(
            kv_connector="UcmCacheConnector",
            kv_connector_module_path="ucmcache.connector",
            kv_role="kv_both",
            kv_load_failure_policy=policy,
            kv_connector_extra_config=json.loads(extra),
        ),
        **json.loads(overrides),
    )
    return args.create_engine_config()


def config_folder(shape: str, folder: Path) -> Path:
    """A folder with only the configuration of one of the demo's tiny models."""
    import transformers

    from ucmcache.demo.checkpoints import RECIPES

    recipe = RECIPES[shape]
    target = folder / shape
    if not target.exists():
        config = getattr(transformers, recipe.config_class)(**recipe.config)
        architecture = recipe.config_class.replace("TextConfig", "Config").replace("Config", "ForCausalLM")
        config.architectures = [architecture]
        config.save_pretrained(target)
    return target


def _digest(state: int, token: int) -> int:
    return zlib.crc32(token.to_bytes(4, "little"), state) * 2654435761 % (1 << 32)


class Tokens:
    """Running digests of a token sequence: all that the simulated model knows of it."""

    def __init__(self) -> None:
        self.digests = [1]

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.digests.append(_digest(self.digests[-1], token))


def pattern(digest: int, group: int, layer: int, rank: int, nbytes: int) -> NDArray[np.uint8]:
    """The bytes that a digest stands for in one layer of one group on one rank."""
    seed = (digest * 31 + group * 7919 + layer * 104729 + rank * 15485863) % (1 << 32)
    values = (np.arange(nbytes, dtype=np.uint64) * 2654435761 + seed) % 251
    return values.astype(np.uint8)


@dataclass
class Rank:
    """One worker: its connector, its memory as one byte view per group and layer."""

    connector: Any
    pages: dict[tuple[int, int], NDArray[np.uint8]] = field(default_factory=dict)  # [blocks, page content bytes]
    kv_caches: dict[str, torch.Tensor] = field(default_factory=dict)


def blocks_of_one(groups: Sequence[Group], tokens: int, in_flight_tokens: int) -> int:
    """How many blocks vLLM wants for one request of so many tokens, which is hardly enough for two: it preempts."""
    blocks = 1
    for group in groups:
        # Of a window, it holds what the first token in flight looks back at, and all in flight.
        most = min(tokens, group.window + in_flight_tokens) if group.sees_a_window else tokens
        blocks += 4 if group.kind == "state" else -(-most // group.block_tokens) + 1
    return blocks


class SimEngine:
    """Guaranteed by the caller: `close` at the end. Promised: a wrong byte raises WrongBytesError in `step`."""

    def __init__(
        self,
        groups: Sequence[Group],
        model: Path,
        extra_config: Mapping[str, Any] | None = None,
        *,
        num_blocks: int = 200,
        max_step_tokens: int = 64,
        max_seqs: int = 8,
        ranks: int = 1,
        stages: int = 1,
        order: str = "v1",
        policy: str = "fail",
        layout: str = "LBHNC",
        retention_interval: int = 0,
        chunked_prefill: bool = True,
        mutate: Callable[[Any], None] | None = None,
        asynchronous: bool = False,
    ) -> None:
        self.groups = list(groups)
        self.order = order
        # Every state that there is, unless a test is about which are kept: more positions to be wrong at.
        # And little host memory, which is taken whole.
        small = {"blocks": "4MiB", "snapshots": "4MiB"}
        extra_config = {"retention": {"interval_tokens": None}, "host": small, **(extra_config or {})}
        if extra_config.get("backend") is not None:
            # What a simulated engine computes, no disk is as fast as.
            extra_config["backend"] = {"when_slow": "load", **extra_config["backend"]}
        base = _vllm_config(str(model), json.dumps(extra_config), order, policy, "{}")
        self.config = copy.deepcopy(base)
        self.kv_cache_config = self._kv_cache_config(num_blocks, layout, retention_interval)
        self.config.cache_config.num_gpu_blocks = num_blocks
        self.config.cache_config.enable_prefix_caching = True
        self.config.cache_config.prefix_cache_retention_interval = retention_interval
        self.config.scheduler_config.max_num_batched_tokens = max_step_tokens
        self.config.scheduler_config.max_num_scheduled_tokens = None
        self.config.scheduler_config.max_num_seqs = max_seqs
        self.config.scheduler_config.enable_chunked_prefill = chunked_prefill
        self.config.parallel_config.tensor_parallel_size = ranks // stages
        self.config.parallel_config.pipeline_parallel_size = stages
        self.config.parallel_config.world_size = ranks
        if mutate is not None:
            mutate(self.config)
        self._ranks_per_stage = ranks // stages
        self.asynchronous = asynchronous  # plan a step while the one before it is still computed
        self.config.scheduler_config.async_scheduling = asynchronous
        self._in_flight: deque[tuple[Any, Any]] = deque()
        self.scheduler = self._scheduler()
        self.ranks = [self._rank(rank, num_blocks, layout) for rank in range(ranks)]
        facts = {
            divmod(rank, ranks // stages): worker.connector.get_handshake_metadata()
            for rank, worker in enumerate(self.ranks)
        }
        self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(facts)
        self.requests: dict[str, Any] = {}
        self.tokens: dict[str, Tokens] = {}
        self.state_column: dict[str, int] = {}
        self.started: set[str] = set()
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.counts: dict[str, int] = {}
        self.preemptions = 0
        self._aggregator = None
        if ranks > 1:
            from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator

            self._aggregator = KVOutputAggregator(ranks)

    # -- construction ---------------------------------------------------------------------------------------------

    def _kv_cache_config(self, num_blocks: int, layout: str, retention_interval: int) -> Any:
        from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
        from vllm.v1.kv_cache_interface import (
            ChunkedLocalAttentionSpec,
            CircularBufferSpec,
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
            KVCacheTensor,
            MambaSpec,
            MLAAttentionSpec,
            SlidingWindowSpec,
            UniformTypeKVCacheSpecs,
        )

        page = max(KV_TOKEN_BYTES * group.block_tokens for group in self.groups)
        most_layers = max(group.layers for group in self.groups)
        attention = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float16}
        specs: list[KVCacheGroupSpec] = []
        tensors = []
        for i, group in enumerate(self.groups):
            padded = page if KV_TOKEN_BYTES * group.block_tokens != page else None
            common = {"block_size": group.block_tokens, "page_size_padded": padded, **attention}
            if group.kind == "full":
                spec: Any = FullAttentionSpec(max_tp_shards=group.shards or None, **common)
            elif group.kind == "latent":
                spec = MLAAttentionSpec(**{**common, "head_size": KV_TOKEN_BYTES // 2})
            elif group.kind == "mixed":
                latent = MLAAttentionSpec(**{**common, "head_size": KV_TOKEN_BYTES // 2})
                spec = UniformTypeKVCacheSpecs(
                    block_size=group.block_tokens,
                    kv_cache_specs={
                        f"g{i}.l{layer}": FullAttentionSpec(**common) if layer else latent
                        for layer in range(group.layers)
                    },
                )
            elif group.kind == "ring":
                spec = CircularBufferSpec(**common)
            elif group.kind == "window":
                spec = SlidingWindowSpec(sliding_window=group.window, **common)
            elif group.kind == "chunk":
                spec = ChunkedLocalAttentionSpec(attention_chunk_size=group.window, **common)
            else:
                spec = MambaSpec(
                    block_size=group.block_tokens,
                    shapes=((3, 4), (5,)),
                    dtypes=(torch.float16, torch.float32),
                    page_size_padded=page,
                    mamba_cache_mode="align",
                    tp_replicated=group.shards == 1,
                )
            names = [f"g{i}.l{layer}" for layer in range(group.layers)]
            specs.append(KVCacheGroupSpec(names, spec))
            by_layer = layout.index("L") < layout.index("B")
            tensors.append(
                KVCacheTensor(
                    size=most_layers * num_blocks * page,
                    layers=names,
                    layer_stride=page * num_blocks if by_layer else page,
                    block_stride=page if by_layer else most_layers * page,
                )
            )
        config = KVCacheConfig(num_blocks, tensors, specs, prefix_cache_retention_interval=retention_interval)
        config.kv_cache_layout = layout
        cache = self.config.cache_config
        cache.block_size = min(group.block_tokens for group in self.groups)
        cache.prefix_match_unit = None
        if any(group.kind == "state" for group in self.groups):
            cache.mamba_cache_mode = "align"
            cache.mamba_block_size = next(group.block_tokens for group in self.groups if group.kind == "state")
        self.block_tokens, self.hash_block_tokens = resolve_kv_cache_block_sizes(config, self.config)
        config.hash_block_size = self.hash_block_tokens
        config.cache_hit_alignment_tokens = self.block_tokens
        return config

    def _scheduler(self) -> Any:
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import (
            generate_scheduler_kv_cache_config,
            get_request_block_hasher,
            init_none_hash,
        )
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        hash_fn = get_hash_fn_by_name("sha256")
        init_none_hash(hash_fn)
        self._hasher = get_request_block_hasher(self.hash_block_tokens, hash_fn)
        scheduler_class = AsyncScheduler if self.asynchronous else Scheduler
        return scheduler_class(
            vllm_config=self.config,
            kv_cache_config=generate_scheduler_kv_cache_config([self.kv_cache_config]),
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=self.block_tokens,
            hash_block_size=self.hash_block_tokens,
            log_stats=True,
        )

    def _rank(self, rank: int, num_blocks: int, layout: str) -> Rank:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.v1.kv_cache_interface import create_kv_cache_views
        from vllm.v1.kv_cache_layout import KVCacheLayout

        config = copy.copy(self.config)
        config.parallel_config = copy.copy(self.config.parallel_config)
        config.parallel_config.rank = rank
        worker = Rank(KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, self.kv_cache_config))
        buffer = torch.full((self.kv_cache_config.kv_cache_tensors[0].size,), POISON - 256, dtype=torch.int8)
        flat = buffer.view(torch.uint8).numpy()
        for g, (group, tensor) in enumerate(
            zip(self.kv_cache_config.kv_cache_groups, self.kv_cache_config.kv_cache_tensors, strict=True)
        ):
            spec = self._layer_spec(group)
            views = create_kv_cache_views(buffer, spec, num_blocks, KVCacheLayout[layout], tensor)
            worker.kv_caches.update(zip(tensor.layers, views, strict=True))
            for layer in range(self.groups[g].layers):
                worker.pages[g, layer] = np.lib.stride_tricks.as_strided(
                    flat[tensor.offset + layer * tensor.layer_stride :],
                    (num_blocks, self._content_bytes(g)),
                    (tensor.block_stride, 1),
                )
        worker.connector.register_kv_caches(worker.kv_caches)
        return worker

    def _content_bytes(self, group: int) -> int:
        return int(self._layer_spec(self.kv_cache_config.kv_cache_groups[group]).real_page_size_bytes)

    @staticmethod
    def _layer_spec(group: Any) -> Any:
        return getattr(group.kv_cache_spec, "first_spec", group.kv_cache_spec)

    # -- requests -------------------------------------------------------------------------------------------------

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int = 4, cache_salt: str | None = None) -> None:
        """Queue a request."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        request = Request(request_id, list(prompt), params, None, block_hasher=self._hasher, cache_salt=cache_salt)
        self.requests[request_id] = request
        self.tokens[request_id] = Tokens()
        self.outputs[request_id] = []
        self.scheduler.add_request(request)

    def abort(self, request_id: str) -> None:
        """Abort a request in whatever state it is."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        self.requests.pop(request_id, None)

    def run(self, max_steps: int = 2000) -> None:
        """Step until every request has ended and nothing is in flight."""
        for _ in range(max_steps):
            if not self.scheduler.has_requests() and not self._in_flight:
                return
            self.step()
        raise AssertionError(f"still busy after {max_steps} steps: {self._what_is_busy()}")

    def _what_is_busy(self) -> str:
        side, now = self.side, self.side._clock()
        waiting = [
            f"{name} ({one.request.status.name}, {one.request.num_computed_tokens} of {one.request.num_tokens} tokens, "
            f"staging {one.staging}, asks since {now - (one.asked_s or now):.3f} s, impatient {one.impatient}, "
            f"failed {one.failed}, hit {one.hit})"
            for name, one in side._requests.items()
        ]
        jobs = [f"{number}: {job.waiting} for {job.request_id!r}" for number, job in side._jobs._jobs.items()]
        workers = [worker.connector._worker for worker in self.ranks]
        held = [(one._pipeline.pending, len(one._running), len(one._results)) for one in workers]
        pool = self.scheduler.kv_cache_manager.block_pool
        room = f"{pool.get_num_free_blocks()} of {pool.num_gpu_blocks}"
        queues = [
            [request.request_id for request in queue]
            for queue in (self.scheduler.running, self.scheduler.kv_holding_waiting, self.scheduler.waiting)
        ]
        return (
            f"requests {waiting}, jobs {jobs}, I/O, copies and results of the ranks {held}, free blocks {room}, "
            f"running, waiting with blocks, waiting {queues}"
        )

    def read_index(self) -> None:
        """Take in all that a listing of the backend finds."""
        discovery = self.side._discovery
        while discovery.is_listing or discovery._found:
            self.side._learn()
            time.sleep(0.001)

    def generate(self, request_id: str, prompt: Sequence[int], max_tokens: int = 4) -> list[int]:
        """Run one request to its end; returns its output."""
        self.add(request_id, prompt, max_tokens)
        self.run()
        return self.outputs[request_id]

    @staticmethod
    def expected(prompt: Sequence[int], max_tokens: int) -> list[int]:
        """What the simulated model answers, computed without an engine."""
        tokens = Tokens()
        tokens.extend(prompt)
        output = []
        for _ in range(max_tokens):
            output.append(tokens.digests[-1] % VOCAB)
            tokens.extend(output[-1:])
        return output

    # -- one step -------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Schedule, compute, report: one engine step."""
        output = self.scheduler.schedule()
        self.preemptions += len(output.preempted_req_ids or ())
        tables = {
            request_id: self.scheduler.kv_cache_manager.get_block_ids(request_id)
            for request_id in output.num_scheduled_tokens
        }
        starts = {
            request_id: self.scheduler.requests[request_id].num_computed_tokens - scheduled
            for request_id, scheduled in output.num_scheduled_tokens.items()
        }
        results = [self._worker_step(worker, rank, output, tables, starts) for rank, worker in enumerate(self.ranks)]
        sampled = self._sample(output)
        self._in_flight.append((output, self._runner_output(sampled, results)))
        if not self.asynchronous or len(self._in_flight) > 1 or not output.num_scheduled_tokens:
            self._settle()

    def _settle(self) -> None:
        """Give the scheduler the results of the oldest step in flight, and of empty ones behind it."""
        self._update(*self._in_flight.popleft())
        while self._in_flight and not self._in_flight[0][0].num_scheduled_tokens:
            self._update(*self._in_flight.popleft())

    def _update(self, output: Any, runner_output: Any) -> None:
        for request_outputs in self.scheduler.update_from_output(output, runner_output).values():
            for one in request_outputs.outputs:
                if one.request_id not in self.outputs:
                    continue
                self.outputs[one.request_id].extend(one.new_token_ids)
                if one.finish_reason is not None:
                    self.reasons[one.request_id] = str(one.finish_reason)
                    self.requests.pop(one.request_id, None)
            stats = request_outputs.scheduler_stats
            if stats is not None and stats.kv_connector_stats:
                self._count(stats.kv_connector_stats)

    def _count(self, stats: Mapping[str, int]) -> None:
        for name, amount in stats.items():
            self.counts[name] = self.counts.get(name, 0) + amount

    def _runner_output(self, sampled: dict[str, list[int]], results: list[Any]) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput

        ids = list(sampled)
        outputs = [
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
                sampled_token_ids=[sampled[request_id] for request_id in ids],
                kv_connector_output=result,
            )
            for result in results
        ]
        return outputs[0] if self._aggregator is None else self._aggregator.aggregate(outputs)

    def _sample(self, output: Any) -> dict[str, list[int]]:
        sampled: dict[str, list[int]] = {}
        for request_id in output.num_scheduled_tokens:
            request = self.scheduler.requests[request_id]
            done = request.num_computed_tokens  # after this step
            sampled[request_id] = []
            if done >= request.num_tokens:
                tokens = self.tokens[request_id]
                sampled[request_id] = [tokens.digests[done] % VOCAB]
                if len(tokens.digests) == done + 1:
                    # The worker goes on with it, whether or not the scheduler knows it yet.
                    tokens.extend(sampled[request_id])
        return sampled

    def _worker_step(
        self, worker: Rank, rank: int, output: Any, tables: Mapping[str, Any], starts: Mapping[str, int]
    ) -> Any:
        from vllm.v1.outputs import KVConnectorOutput

        connector, meta = worker.connector, output.kv_connector_metadata
        if self.order == "v1":
            connector.handle_preemptions(meta)
        self._zero_and_copy(worker, output)
        if output.num_scheduled_tokens:
            self._precopy_states(worker, rank, output, tables, starts)
        if self.order == "v2":
            connector.handle_preemptions(meta)
        connector.bind_connector_metadata(meta)
        if output.has_sync_kv_loads:
            connector.start_load_kv(None)
        self._forward(worker, rank, output, tables, starts)
        connector.finish_forward()
        if not output.has_sync_kv_loads:
            connector.start_load_kv(None)
        connector.wait_for_save()
        transfers = connector.get_transfer_results(output.finished_req_ids)
        result = KVConnectorOutput(
            finished_sending=transfers.finished_sending or None,
            finished_recving=transfers.finished_recving or None,
            failed_recving=transfers.failed_recving,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_stats=connector.get_kv_connector_stats(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        connector.clear_connector_metadata()
        return result

    def _zero_and_copy(self, worker: Rank, output: Any) -> None:
        for block in output.new_block_ids_to_zero or ():
            for pages in worker.pages.values():
                pages[block] = 0
        for one in output.kv_cache_block_copies or ():
            for pages in worker.pages.values():
                pages[one.dst_block_id] = pages[one.src_block_id]

    def _precopy_states(
        self, worker: Rank, rank: int, output: Any, tables: Mapping[str, Any], starts: Mapping[str, int]
    ) -> None:
        states = [g for g, group in enumerate(self.groups) if group.kind == "state"]
        if not states:
            return
        size = self.groups[states[0]].block_tokens
        fresh = {one.req_id for one in output.scheduled_new_reqs} | set(output.scheduled_cached_reqs.resumed_req_ids)
        for request_id, scheduled in output.num_scheduled_tokens.items():
            start = starts[request_id]
            known = self.state_column.get(f"{rank}/{request_id}")
            previous = known if known is not None and request_id not in fresh else (start - 1) // size
            current = (start + scheduled - 1) // size
            self.state_column[f"{rank}/{request_id}"] = current
            if previous in (-1, current):
                continue
            for group in states:
                table = tables[request_id][group]
                for layer in range(self.groups[group].layers):
                    pages = worker.pages[group, layer]
                    pages[table[current]] = pages[table[previous]]

    def _forward(
        self, worker: Rank, rank: int, output: Any, tables: Mapping[str, Any], starts: Mapping[str, int]
    ) -> None:
        for request_id, scheduled in output.num_scheduled_tokens.items():
            request, tokens = self.scheduler.requests[request_id], self.tokens[request_id]
            tokens.extend(request.all_token_ids[len(tokens.digests) - 1 :])
            start, end = starts[request_id], starts[request_id] + scheduled
            for g, group in enumerate(self.groups):
                table = tables[request_id][g]
                for layer in range(0 if group.kind == "ring" else group.layers):
                    latent = group.kind == "latent" or (group.kind == "mixed" and layer == 0)
                    alike = max(self._ranks_per_stage // (group.shards or (1 if latent else self._ranks_per_stage)), 1)
                    holder = rank // alike * alike
                    pages = worker.pages[g, layer]
                    run = self._run_state if group.kind == "state" else self._run_attention
                    run(pages, table, group, tokens, start, end, (g, layer, holder), request_id)

    def _run_state(
        self,
        pages: NDArray[np.uint8],
        table: Sequence[int],
        group: Group,
        tokens: Tokens,
        start: int,
        end: int,
        at: tuple[int, int, int],
        request_id: str,
    ) -> None:
        column = (end - 1) // group.block_tokens
        page = pages[table[column]]
        if start and not np.array_equal(page, pattern(tokens.digests[start], *at, page.size)):
            raise WrongBytesError(f"{request_id}: state at {start} in group, layer, rank {at}, block {table[column]}")
        page[:] = pattern(tokens.digests[end], *at, page.size)

    def _run_attention(
        self,
        pages: NDArray[np.uint8],
        table: Sequence[int],
        group: Group,
        tokens: Tokens,
        start: int,
        end: int,
        at: tuple[int, int, int],
        request_id: str,
    ) -> None:
        size = group.block_tokens
        first = 0
        if group.kind == "window":
            first = max(start - group.window + 1, 0)
        elif group.kind == "chunk":
            first = start // group.window * group.window
        for t in range(first, start):
            begin = t % size * KV_TOKEN_BYTES
            found = pages[table[t // size]][begin : begin + KV_TOKEN_BYTES]
            if not np.array_equal(found, pattern(tokens.digests[t + 1], *at, KV_TOKEN_BYTES)):
                raise WrongBytesError(
                    f"{request_id}: KV of token {t} in group, layer, rank {at}, block {table[t // size]}"
                )
        for t in range(start, end):
            begin = t % size * KV_TOKEN_BYTES
            pages[table[t // size]][begin : begin + KV_TOKEN_BYTES] = pattern(
                tokens.digests[t + 1], *at, KV_TOKEN_BYTES
            )

    # -- inspection -----------------------------------------------------------------------------------------------

    @property
    def side(self) -> Any:
        """The connector's scheduler side."""
        return self.scheduler.connector._scheduler

    def tokens_accounted_for(self) -> bool:
        """Whether every token that the chains had was adopted or lost for a cause; asked when no request is left."""
        self._count(self.side.take_counts())
        lost = sum(n for name, n in self.counts.items() if name.startswith("lost_tokens/"))
        return self.counts.get("chain_tokens", 0) == self.counts.get("adopted_tokens", 0) + lost

    def free_blocks(self) -> int:
        """Free blocks of the engine's pool."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def reset_local(self) -> bool:
        """Forget the engine's own prefix cache, not ours, and poison its memory."""
        done = bool(self.scheduler.reset_prefix_cache(reset_connector=False))
        if done and not self.scheduler.has_unfinished_requests():
            for worker in self.ranks:
                for pages in worker.pages.values():
                    pages[:] = POISON
        return done

    def close(self) -> None:
        """Shut both sides down."""
        self.scheduler.shutdown()
        for worker in self.ranks:
            worker.connector.shutdown()
