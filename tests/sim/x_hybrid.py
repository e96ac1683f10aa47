"""X-Hybrid-96 (S1 8.1): a model of every kind of layer, as ten rows of a spec table and as an engine.

96 layers: 16 latent attention (MLA), 16 compressed attention (CSA, 16 tokens a state, fp8 with scales), 24 sliding
window, 20 Mamba2, 8 Kimi delta attention (KDA) with a state after every token, 8 cross attention, 4 sparse indexers
(DSA), which choose among the latents. Indexers share the latents' blocks, so they are layers of the same group.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.sim.engine import POISON, Group, Rank, SimEngine, WrongBytesError
from ucmcache.coordinator.binding import BoundRow, GroupFacts, bind
from ucmcache.coordinator.coordinator import Coordinator
from ucmcache.coordinator.hit import Prompt
from ucmcache.coordinator.spec import AccessUnit, Kind, RankRule, SpecRow, Tokens
from ucmcache.keys import BlockKey, SnapshotKey
from ucmcache.store.arena import ArenaPlan
from ucmcache.store.block import BlockStore
from ucmcache.store.snapshot import SnapshotStore

TENSOR_RANKS, STAGES, LAYERS = 8, 2, 96
HASH_TOKENS = 64


def _whole(p: Tokens, figures: Mapping[str, int]) -> Tokens:
    return np.zeros_like(p)


def _window(p: Tokens, figures: Mapping[str, int]) -> Tokens:
    return np.maximum(p - figures["window_tokens"] + 1, 0)


def _follower(name: str, source: str, why: str) -> SpecRow:
    return SpecRow(name, Kind.NONE, why, access_unit=AccessUnit.FOLLOWER, source=source)


TABLE: dict[str, SpecRow] = {
    row.spec_class: row
    for row in (
        SpecRow("XMla", Kind.CHAIN, "Latents of all tokens.", reach=_whole, rank_rule=RankRule.UNION),
        SpecRow("XCsa", Kind.CHAIN, "One state for 16 tokens.", reach=_whole, rank_rule=RankRule.UNION),
        SpecRow(
            "XSwa",
            Kind.CHAIN,
            "What the window touches.",
            ("window_tokens",),
            _window,
            access_unit=AccessUnit.WINDOW,
        ),
        SpecRow("XMamba2", Kind.SNAPSHOT, "One state for the whole prefix.", access_unit=AccessUnit.ROW),
        SpecRow("XKda", Kind.SNAPSHOT, "The same, and it could be kept after any token.", access_unit=AccessUnit.ROW),
        SpecRow("XCross", Kind.NONE, "Of the encoder's input, which each request brings along."),
        SpecRow("XOpenGroup", Kind.NONE, "Tokens that are still being compressed; none at a block's end."),
        _follower("XDsaIndexer", "XMla", "In the blocks of the latents that it chooses from."),
        _follower("XCsaScales", "XCsa", "Scales of the fp8 values, in the same pages."),
        _follower("XSwaScales", "XSwa", "Scales of the fp8 values, in the same pages."),
    )
}

# (class, tokens a block, layers of its own)
GROUPS: tuple[tuple[str, int, int], ...] = (
    ("XMla", 128, 16),
    ("XCsa", 128, 16),
    ("XSwa", 128, 24),
    ("XMamba2", 64, 20),
    ("XKda", 1, 8),
    ("XCross", 128, 8),
    ("XOpenGroup", 20, 0),
    ("XDsaIndexer", 128, 4),
    ("XCsaScales", 128, 0),
    ("XSwaScales", 128, 0),
)

# The same model as vLLM's scheduler can run it, in small: the same 96 layers in the same kinds.
ENGINE_GROUPS = (
    Group("latent", 16, layers=20),  # MLA and the indexers in its blocks
    Group("latent", 16, layers=16),  # CSA
    Group("window", 16, 40, layers=24),
    Group("state", 16, layers=20),
    Group("state", 16, layers=8),
    Group("ring", 16, layers=8),  # what is of one request only
)


def facts(window_tokens: int = 1 << 20) -> list[GroupFacts]:
    """What an engine would say of the ten groups."""
    spec = SimpleNamespace(window_tokens=window_tokens)
    return [
        GroupFacts(group, name, tokens, spec, content=f"{name} {layers}")
        for group, (name, tokens, layers) in enumerate(GROUPS)
    ]


class XHybrid:
    """The bound table over stores with room for `tokens`; what is kept is named by class and position."""

    def __init__(self, tokens: int = 1 << 14, window_tokens: int = 1 << 20, interval_tokens: int | None = 1024) -> None:
        self.rows: dict[str, BoundRow] = {row.spec.spec_class: row for row in bind(facts(window_tokens), TABLE)}
        seeds = {row.group: row.seed for row in self.rows.values()}
        chains = [ArenaPlan(1, tokens // 128, (self.rows[name].group,)) for name in ("XMla", "XCsa", "XSwa")]
        states = [ArenaPlan(1, 64, (self.rows[name].group,)) for name in ("XMamba2", "XKda")]
        self.blocks = BlockStore(chains, seeds, b"x-hybrid-96".ljust(16))
        self.states = SnapshotStore(states, seeds, b"x-hybrid-96".ljust(16))
        self.coordinator = Coordinator(tuple(self.rows.values()), self.blocks, self.states, interval_tokens)

    def keep_chain(self, name: str, prompt: Prompt, tokens: int) -> None:
        """Blocks of a chain up to a token: the whole ones."""
        row = self.rows[name]
        size = row.block_tokens
        for end in range(size, tokens + 1, size):
            key = BlockKey(row.group, prompt.prefix(end), end, prompt.prefix(end - size))
            if self.blocks.slot(key) is None:
                for slot in self.blocks.reserve([key]) or ():
                    self.blocks.commit(row.group, slot)

    def keep_states(self, name: str, prompt: Prompt, positions: Sequence[int]) -> None:
        """States of a recurrent kind at these positions."""
        row = self.rows[name]
        for position in positions:
            key = SnapshotKey(row.group, prompt.prefix(position), position)
            for slot in self.states.reserve([key]) or ():
                self.states.commit(row.group, slot)


def prompt_of(tokens: int, text: str = "a", unlike_from: int | None = None) -> Prompt:
    """A prompt with one hash per 64 tokens; from `unlike_from` on it goes another way than others of the same text."""
    cut = tokens if unlike_from is None else unlike_from
    hashes = [
        f"{text}{end}{'' if end <= cut else f'!{cut}'}".encode() for end in range(HASH_TOKENS, tokens + 1, HASH_TOKENS)
    ]
    return Prompt(tokens, hashes, HASH_TOKENS)


# -- the whole model in an engine --------------------------------------------------------------------------------------

PAGE_BYTES = 128 * 16  # of every layer, as vLLM pads them; what a layer really has is less for most
WINDOW_TOKENS = 500


@dataclass(frozen=True)
class Part:
    """Layers of one geometry in a KV cache group: what they keep is `state_bytes` for every `tokens_per_state` tokens.

    `layers` are those of both stages. What is `alike` is the same on all ranks of a stage.
    """

    name: str
    group: int
    kind: str  # "chain", "state", "request" (of one request only), "open" (of the tokens that are still compressed)
    layers: int
    block_tokens: int
    state_bytes: int
    tokens_per_state: int = 1
    window_tokens: int = 0
    alike: bool = False

    @property
    def states_per_block(self) -> int:
        """How many of its states a block has."""
        return self.block_tokens // self.tokens_per_state if self.kind == "chain" else 1


PARTS = (
    Part("XMla", 0, "chain", 16, 128, 16, alike=True),
    Part("XDsaIndexer", 0, "chain", 4, 128, 8, alike=True),  # layers of the latents' group, with keys of their own
    Part("XCsa", 1, "chain", 16, 128, 32, tokens_per_state=16, alike=True),  # 24 values in fp8, and their scales
    Part("XSwa", 2, "chain", 24, 128, 16, window_tokens=WINDOW_TOKENS),
    Part("XMamba2", 3, "state", 20, 64, 48),
    Part("XKda", 4, "state", 8, 64, 64),  # vLLM's scheduler runs states of one block size only
    Part("XCross", 5, "request", 8, 64, 512),
    Part("XOpenGroup", 6, "open", 16, 64, 512, tokens_per_state=16),  # scratch beside the 16 CSA layers
)


def spec_of(part: Part) -> Any:
    """What the engine says of a part's layers: vLLM's own classes, under names that have rows in TABLE."""
    from vllm.v1 import kv_cache_interface as vllm

    latent = {"block_size": part.block_tokens, "num_kv_heads": 1, "page_size_padded": PAGE_BYTES}
    if part.kind in ("request", "open"):
        spec = vllm.CircularBufferSpec(head_size=2, dtype=torch.float16, **latent)
    elif part.kind == "state":
        halves = part.state_bytes // 2
        spec = vllm.MambaSpec(
            block_size=part.block_tokens,
            shapes=((halves // 2,), (halves // 4,)),
            dtypes=(torch.float16, torch.float32),
            page_size_padded=PAGE_BYTES,
            mamba_cache_mode="align",
        )
    elif part.window_tokens:
        spec = vllm.SlidingWindowSpec(
            sliding_window=part.window_tokens, head_size=part.state_bytes // 4, dtype=torch.float16, **latent
        )
    else:
        spec = vllm.MLAAttentionSpec(
            head_size=part.state_bytes, dtype=torch.uint8, tokens_per_state=part.tokens_per_state, **latent
        )
    # A class of its own, as a new model would bring along; the manager is found by the class that it extends.
    name = "XMla" if part.name == "XDsaIndexer" else part.name
    figures = {"window_tokens": property(lambda own: own.sliding_window)} if part.window_tokens else {}
    named = _CLASSES.setdefault(name, dataclass(frozen=True, kw_only=True)(type(name, (type(spec),), figures)))
    values = {field.name: getattr(spec, field.name) for field in fields(spec)}
    return named(**values)


_CLASSES: dict[str, type[Any]] = {}


class XHybridEngine(SimEngine):
    """All 96 layers under TP=8 and PP=2: 16 ranks with the 48 layers of their stage, in blocks of 128 and 64 tokens.

    Guaranteed by the caller: TABLE's rows are registered. Promised, as by SimEngine: a byte that the tokens do not
    explain raises WrongBytesError.
    """

    def __init__(self, model: Path, extra_config: Mapping[str, Any], **options: Any) -> None:
        super().__init__((), model, extra_config, ranks=TENSOR_RANKS * STAGES, stages=STAGES, **options)

    def _stage(self, rank: int) -> int:
        return rank // TENSOR_RANKS

    def _layers(self, part: Part, stage: int) -> range:
        half = part.layers // STAGES
        return range(stage * half, (stage + 1) * half)

    def _kv_cache_config(self, num_blocks: int, layout: str, retention_interval: int) -> Any:
        from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, resolve_kv_cache_block_sizes

        cache = self.config.cache_config
        cache.block_size, cache.mamba_block_size, cache.mamba_cache_mode = 64, 64, "align"
        cache.prefix_match_unit = None
        self._of_stage = [self._config_of(stage, num_blocks, retention_interval) for stage in range(STAGES)]
        config = generate_scheduler_kv_cache_config(self._of_stage)
        self.block_tokens, self.hash_block_tokens = resolve_kv_cache_block_sizes(config, self.config)
        for one in (config, *self._of_stage):
            one.kv_cache_layout, one.hash_block_size = layout, self.hash_block_tokens
            one.cache_hit_alignment_tokens = self.block_tokens
        return config

    def _config_of(self, stage: int, num_blocks: int, retention_interval: int) -> Any:
        from vllm.v1 import kv_cache_interface as vllm

        groups, tensors = [], []
        most = max(sum(part.layers for part in PARTS if part.group == group) for group in range(7)) // STAGES
        for group in range(7):
            specs: dict[str, Any] = {}
            for part in (part for part in PARTS if part.group == group):
                names = [f"{part.name}.{layer}" for layer in self._layers(part, stage)]
                layer_bytes = num_blocks * PAGE_BYTES
                tensors.append(
                    vllm.KVCacheTensor(most * layer_bytes, names, layer_bytes, PAGE_BYTES, len(specs) * layer_bytes)
                )
                specs.update(dict.fromkeys(names, spec_of(part)))
            spec, *others = {*specs.values()}
            if others:
                spec = vllm.UniformTypeKVCacheSpecs(block_size=spec.block_size, kv_cache_specs=specs)
            groups.append(vllm.KVCacheGroupSpec(list(specs), spec))
        return vllm.KVCacheConfig(num_blocks, tensors, groups, prefix_cache_retention_interval=retention_interval)

    def _rank(self, rank: int, num_blocks: int, layout: str) -> Rank:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.v1.kv_cache_interface import create_kv_cache_views
        from vllm.v1.kv_cache_layout import KVCacheLayout

        config = copy.copy(self.config)
        config.parallel_config = copy.copy(self.config.parallel_config)
        config.parallel_config.rank = rank
        kv_cache_config = self._of_stage[self._stage(rank)]
        worker = Rank(KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, kv_cache_config))
        buffer = torch.full((kv_cache_config.kv_cache_tensors[0].size,), POISON - 256, dtype=torch.int8)
        words = buffer.view(torch.uint8).numpy().view(np.uint64)
        for i, (part, tensor) in enumerate(zip(PARTS, kv_cache_config.kv_cache_tensors, strict=True)):
            views = create_kv_cache_views(buffer, spec_of(part), num_blocks, KVCacheLayout[layout], tensor)
            worker.kv_caches.update(zip(tensor.layers, views, strict=True))
            shape = (num_blocks, len(tensor.layers), part.states_per_block, part.state_bytes // 8)
            strides = (tensor.block_stride, tensor.layer_stride, part.state_bytes, 8)
            worker.pages[i, 0] = np.lib.stride_tricks.as_strided(words[tensor.offset // 8 :], shape, strides)
        worker.connector.register_kv_caches(worker.kv_caches)
        return worker

    def _precopy_states(
        self, worker: Rank, rank: int, output: Any, tables: Mapping[str, Any], starts: Mapping[str, int]
    ) -> None:
        fresh = {one.req_id for one in output.scheduled_new_reqs} | set(output.scheduled_cached_reqs.resumed_req_ids)
        for request_id, scheduled in output.num_scheduled_tokens.items():
            start, known = starts[request_id], self.state_column.get(f"{rank}/{request_id}")
            previous = known if known is not None and request_id not in fresh else (start - 1) // 64
            current = self.state_column[f"{rank}/{request_id}"] = (start + scheduled - 1) // 64
            for i, part in enumerate(PARTS):
                if part.kind == "state" and previous not in (-1, current):
                    table, pages = tables[request_id][part.group], worker.pages[i, 0]
                    pages[table[current]] = pages[table[previous]]

    def _forward(
        self, worker: Rank, rank: int, output: Any, tables: Mapping[str, Any], starts: Mapping[str, int]
    ) -> None:
        fresh = {one.req_id for one in output.scheduled_new_reqs} | set(output.scheduled_cached_reqs.resumed_req_ids)
        for request_id, scheduled in output.num_scheduled_tokens.items():
            request, tokens = self.scheduler.requests[request_id], self.tokens[request_id]
            tokens.extend(request.all_token_ids[len(tokens.digests) - 1 :])
            digests = np.array(tokens.digests, dtype=np.uint64)
            step = range(starts[request_id], starts[request_id] + scheduled)
            for i, part in enumerate(PARTS):
                holder = self._stage(rank) * TENSOR_RANKS if part.alike else rank
                table = np.array(tables[request_id][part.group])
                read, written = _touched(part, digests, step, request_id, request_id in fresh)
                for states, store in ((read, False), (written, True)):
                    self._run(worker, i, holder, table, states, store, f"{request_id}: rank {rank}, {part.name}")

    def _run(self, worker: Rank, i: int, holder: int, table: Words, states: States, store: bool, where: str) -> None:
        """Write some states of a part's layers, or check that they are there."""
        columns, at, digests = states
        if not len(columns):
            return
        part, pages = PARTS[i], worker.pages[i, 0]
        layers = self._layers(part, self._stage(holder))
        expected = _words(digests, i, layers, holder, part.state_bytes // 8)
        if store:
            pages[table[columns], :, at] = expected
        elif not np.array_equal(pages[table[columns], :, at], expected):
            wrong = np.flatnonzero((pages[table[columns], :, at] != expected).any(axis=(1, 2)))[0]
            raise WrongBytesError(
                f"{where}: state {at[wrong]} of block {table[columns[wrong]]}, column {columns[wrong]}"
            )


Words = NDArray[Any]
States = tuple[Words, Words, Words]  # columns of the block table, states within their blocks, the digests they tell of


def _touched(part: Part, digests: Words, step: range, request_id: str, first: bool) -> tuple[States, States]:
    """What a step over the tokens of `step` reads of a part, and what it then writes."""
    start, end, size = step.start, step.stop, part.tokens_per_state

    def states(numbers: Words) -> States:
        return numbers // part.states_per_block, numbers % part.states_per_block, digests[(numbers + 1) * size]

    def one(column: int, digest: int) -> States:
        return np.array([column]), np.array([0]), np.array([digest], dtype=np.uint64)

    nothing: States = (np.array([], dtype=np.int64),) * 3
    if part.kind == "chain":
        seen = max(start - part.window_tokens + 1, 0) if part.window_tokens else 0
        return states(np.arange(seen // size, start // size)), states(np.arange(start // size, end // size))
    if part.kind == "state":
        column = (end - 1) // part.block_tokens
        return one(column, digests[start]) if start else nothing, one(column, digests[end])
    if part.kind == "request":
        input_digest = zlib.crc32(request_id.encode())
        return nothing if first else one(0, input_digest), one(0, input_digest)
    # The open group of tokens: none at a boundary, so what is resumed there needs none.
    return (
        one(0, digests[start]) if start % size else nothing,
        one(0, digests[end]) if end % size else nothing,
    )


def _words(digests: Words, part: int, layers: range, holder: int, words: int) -> Words:
    """What states that tell of these digests have in these layers on a rank: [states, layers, words], uint64."""
    where = np.array([(layer * 1009 + part) * 1009 + holder for layer in layers], dtype=np.uint64)
    seeds = digests[:, None] * np.uint64(0x9E3779B97F4A7C15) + where * np.uint64(0xC2B2AE3D27D4EB4F)
    seeds = (seeds ^ (seeds >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    found: Words = seeds[..., None] ^ (np.arange(words, dtype=np.uint64) * np.uint64(0x94D049BB133111EB))
    return found
