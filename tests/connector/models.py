"""Caches of whole models in small, made by vLLM: grouped, laid out, allocated and viewed by its own code."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

from ucmcache.connector.layout import Storages, UnitMap, unit_map
from ucmcache.coordinator.spec import Kind

LAYOUTS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
# Of these vLLM takes one where layers differ in heads, states or bytes per block.
MIXED = ["LBHNC", "LBNHC", "BLHNC", "BLNHC"]
BLOCKS = 13  # a prime, so that no other axis is taken for it

CHAIN, BOTH = frozenset({Kind.CHAIN}), frozenset({Kind.CHAIN, Kind.SNAPSHOT})


def full(tokens: int = 16, heads: int = 2, size: int = 8, **options: Any) -> Any:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(block_size=tokens, num_kv_heads=heads, head_size=size, dtype=torch.bfloat16, **options)


def window(tokens: int = 16, heads: int = 2, size: int = 8, span: int = 40) -> Any:
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    return SlidingWindowSpec(
        block_size=tokens, num_kv_heads=heads, head_size=size, dtype=torch.bfloat16, sliding_window=span
    )


def latent(tokens: int = 16, size: int = 24, **options: Any) -> Any:
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    options.setdefault("dtype", torch.bfloat16)
    return MLAAttentionSpec(block_size=tokens, num_kv_heads=1, head_size=size, max_tp_shards=1, **options)


def latent_window(tokens: int = 16, size: int = 24, span: int = 40, **options: Any) -> Any:
    from vllm.v1.kv_cache_interface import SlidingWindowMLASpec

    options.setdefault("dtype", torch.float32)
    return SlidingWindowMLASpec(
        block_size=tokens, num_kv_heads=1, head_size=size, sliding_window=span, max_tp_shards=1, **options
    )


def state(page_bytes: int, *shapes: tuple[int, ...], tokens: int = 16) -> Any:
    """A convolution's and a recurrence's state in one page, padded to that of the attention layers."""
    from vllm.v1.kv_cache_interface import MambaSpec

    return MambaSpec(
        block_size=tokens,
        shapes=shapes,
        dtypes=(torch.bfloat16, torch.float32)[: len(shapes)],
        page_size_padded=page_bytes,
        mamba_cache_mode="align",
    )


def repeated(pattern: Mapping[str, Any], times: int) -> dict[str, Any]:
    return {f"layers.{i}.{name}": spec for i, (name, spec) in product(range(times), pattern.items())}


@dataclass
class Model:
    """A model's cache by layer, the kinds that its groups must have, and the layouts that vLLM has for it."""

    specs: dict[str, Any]
    kinds: frozenset[Kind]
    layouts: list[str]
    split: list[str]  # those in which attention can have kernel blocks smaller than the manager's
    shared: dict[str, str] = field(default_factory=dict)  # layer -> the layer whose memory it uses


def models() -> dict[str, Model]:
    """Shaped like the models they are named after: pattern and kinds of layers, in small."""
    page = full().page_size_bytes
    gdn = state(page, (3, 20), (2, 4, 6))
    kda = state(latent().page_size_bytes, (3, 12), (2, 3, 8))
    packed: dict[str, Any] = {"dtype": torch.uint8, "alignment": 64}
    layers_outside, blocks_outside = ["LBHNC", "LBNHC"], ["BLHNC", "BLNHC"]
    return {
        # Three gated delta nets to one full attention.
        "Qwen3-Next": Model(
            repeated({"gdn0": gdn, "gdn1": gdn, "gdn2": gdn, "attn": full()}, 3), BOTH, MIXED, layers_outside
        ),
        # Kimi delta attention and latent attention.
        "Kimi-K3": Model(
            repeated({"kda0": kda, "kda1": kda, "kda2": kda, "mla": latent()}, 2), BOTH, MIXED, layers_outside
        ),
        # Two compressions, an indexer with a cache of its own, a window, and what the compressor still reads.
        "DeepSeek-V4": Model(
            repeated(
                {
                    "swa": latent_window(size=16, alignment=64),
                    "c4": latent(64, 40, tokens_per_state=4, state_content_bytes=41, **packed),
                    "c4.indexer": latent(64, 9, tokens_per_state=4, **packed),
                    "c4.compressor": latent_window(8, 12, span=8, alignment=64),
                    "c128": latent(128, 40, tokens_per_state=128, state_content_bytes=41, **packed),
                },
                2,
            ),
            CHAIN,
            blocks_outside,
            [],
        ),
        # Five windows to one full attention; two layers read the cache of an earlier one, as in Gemma 3n.
        "Gemma-3": Model(
            repeated({**{f"local{i}": window() for i in range(5)}, "global": full()}, 2),
            CHAIN,
            LAYOUTS,
            layers_outside,
            {"layers.2.local0": "layers.1.local4", "layers.2.global": "layers.1.global"},
        ),
        # Full attention, in sparse layers beside the keys that an indexer chooses blocks by.
        "MiniMax-M3": Model(
            {"layers.0.attn": full(32), **repeated({"sparse": full(32), "indexer": latent(32, 8)}, 3)},
            CHAIN,
            MIXED,
            layers_outside,
        ),
        # Lightning attention's one state, and full attention: groups of one layer.
        "MiniMax-01": Model(
            repeated({**{f"linear{i}": state(page, (2, 5, 7)) for i in range(7)}, "attn": full()}, 1),
            BOTH,
            MIXED,
            MIXED,
        ),
        # One latent attention, whose one head can be outside or inside of everything.
        "DeepSeek-V2": Model(repeated({"mla": latent()}, 3), CHAIN, LAYOUTS, [*layers_outside, "LHBNC"]),
        "gpt-oss": Model(repeated({"local": window(span=20), "global": full()}, 3), CHAIN, LAYOUTS, layers_outside),
        # One group of layers that differ in bytes: a sparse indexer beside the latents that it chooses from.
        "DeepSeek-V3.2": Model(
            repeated({"mla": latent(size=28), "indexer": latent(size=8, dtype=torch.uint8)}, 3),
            CHAIN,
            MIXED,
            layers_outside,
        ),
    }


MODELS = models()


def states_of(spec: Any, page: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A layer's states as vLLM's own layers take them from the page that they are given."""
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    class Layer(MambaBase):
        mamba_type = spec.mamba_type

        def get_state_shape(self) -> Any:
            return spec.shapes

        def get_state_dtype(self) -> Any:
            return spec.dtypes

    layer = Layer()
    layer.bind_kv_cache(page)
    states: tuple[torch.Tensor, ...] = layer.kv_cache
    return states


@dataclass
class Caches:
    """A model's caches as vLLM made them, and the unit maps of its groups."""

    config: Any
    views: dict[str, torch.Tensor]  # as registered, by layer
    parts: dict[str, Sequence[torch.Tensor]]  # as the layer itself uses them
    storages: Storages
    units: dict[int, UnitMap]

    def content(self, layer: str, block: int) -> torch.Tensor:
        """A copy of a block's bytes as the layer itself sees them, without padding."""
        blocks = self.config.num_blocks
        return torch.cat(
            [
                part.unflatten(0, (blocks, -1))[block].contiguous().view(torch.uint8).reshape(-1)
                for part in self.parts[layer]
            ]
        )

    def layers(self, group: int) -> list[str]:
        """The group's layers that are here."""
        return [name for name in self.config.kv_cache_groups[group].layer_names if name in self.views]


def kernel_tokens(spec: Any, split: int) -> int:
    """Tokens in a kernel block, where a manager's block is split into `split`; states and padded pages are not."""
    whole = spec.block_size
    first = next(iter(getattr(spec, "kv_cache_specs", {}).values()), spec)
    attention = hasattr(first, "num_kv_heads")
    return int(whole // split if attention and getattr(first, "page_size_padded", None) is None else whole)


def caches_of(vllm_config: Any, model: Model, layout: str, split: int = 1, stage: set[str] | None = None) -> Caches:
    """Choose the layout, group, lay out, allocate and view, by vLLM; a manager's block is `split` kernel blocks.

    With `stage`, only those layers are here. Raises what vLLM raises where it has no such engine.
    """
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import add_kv_sharing_layers_to_kv_cache_groups, allocate_kv_cache

    vllm_config = copy.deepcopy(vllm_config)
    # As with a backend that has this layout only: vLLM takes it, or says that it cannot be for these layers.
    resolve_kv_cache_layout(vllm_config, [[layout]], model.specs.values())
    groups = get_kv_cache_groups(vllm_config, dict(model.specs))
    probe = get_kv_cache_config_from_groups(vllm_config, groups, 1 << 24)
    per_block = probe.kv_cache_tensors[0].size // probe.num_blocks
    config = get_kv_cache_config_from_groups(vllm_config, groups, per_block * BLOCKS)
    assert config.num_blocks == BLOCKS
    kernel = [kernel_tokens(group.kv_cache_spec, split) for group in groups]
    views = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout[layout], kernel)
    add_kv_sharing_layers_to_kv_cache_groups(model.shared, config.kv_cache_groups)
    views |= {layer: views[source] for layer, source in model.shared.items()}
    if stage is not None:
        views = {layer: view for layer, view in views.items() if layer in stage}
    specs = {**model.specs, **{layer: model.specs[source] for layer, source in model.shared.items()}}
    parts: dict[str, Sequence[torch.Tensor]] = {
        layer: states_of(specs[layer], view) if hasattr(specs[layer], "shapes") else (view,)
        for layer, view in views.items()
    }
    storages = Storages()
    units = {i: unit_map(views, group.layer_names, BLOCKS, storages) for i, group in enumerate(config.kv_cache_groups)}
    return Caches(config, views, parts, storages, units)
