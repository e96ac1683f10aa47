"""The unit map on whole models: vLLM groups, lays out and views their caches; every byte is followed there and back."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from tests.sim.engine import _vllm_config, config_folder
from ucmcache.connector.layout import Storages, UnitMap, group_facts, unit_map
from ucmcache.connector.messages import UnitCopy
from ucmcache.connector.transfer import HostTransfer
from ucmcache.coordinator.binding import bind
from ucmcache.coordinator.spec import Kind
from ucmcache.store.arena import ArenaPlan
from ucmcache.store.memory import SlotMemory

LAYOUTS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
BLOCKS = 13  # a prime, so that no other axis is taken for it


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


def latent_window(tokens: int = 16, size: int = 24, span: int = 40) -> Any:
    from vllm.v1.kv_cache_interface import SlidingWindowMLASpec

    return SlidingWindowMLASpec(
        block_size=tokens, num_kv_heads=1, head_size=size, dtype=torch.float32, sliding_window=span, max_tp_shards=1
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
    return {f"layers.{i}.{name}": spec for i in range(times) for name, spec in pattern.items()}


@dataclass
class Model:
    """A model's cache by layer, what shares another layer's, and the kinds that its groups must have."""

    specs: dict[str, Any]
    kinds: set[Kind]
    shared: dict[str, str]  # layer -> the layer whose memory it uses


def models() -> dict[str, Model]:
    """Shaped like the models they are named after: pattern and kinds of layers, in small."""
    attention = full().page_size_bytes
    both, chain = {Kind.CHAIN, Kind.SNAPSHOT}, {Kind.CHAIN}
    gdn = state(attention, (3, 20), (2, 4, 6))
    kda = state(latent().page_size_bytes, (3, 12), (2, 3, 8))
    return {
        # Three gated delta nets to one full attention.
        "Qwen3-Next": Model(repeated({"gdn0": gdn, "gdn1": gdn, "gdn2": gdn, "attn": full()}, 3), both, {}),
        # Kimi delta attention and latent attention.
        "Kimi-K3": Model(repeated({"kda0": kda, "kda1": kda, "kda2": kda, "mla": latent()}, 2), both, {}),
        # Two compressions, an indexer with a cache of its own, a window, and what the compressor still reads.
        "DeepSeek-V4": Model(
            repeated(
                {
                    "swa": latent_window(size=16),
                    "c4": latent(64, 40, tokens_per_state=4, dtype=torch.uint8, state_content_bytes=41),
                    "c4.indexer": latent(64, 8, tokens_per_state=4, dtype=torch.uint8),
                    "c4.compressor": latent_window(8, 12, span=8),
                    "c128": latent(128, 40, tokens_per_state=128, dtype=torch.uint8, state_content_bytes=41),
                },
                2,
            ),
            chain,
            {},
        ),
        "Gemma-3": Model(
            repeated({**{f"local{i}": window() for i in range(5)}, "global": full()}, 2),
            chain,
            # Layers that read the cache of an earlier one, as in Gemma 3n.
            {"layers.2.local0": "layers.1.local4", "layers.2.global": "layers.1.global"},
        ),
        # Lightning attention's one state, and full attention.
        "MiniMax-M3": Model(
            repeated({**{f"linear{i}": state(attention, (2, 5, 7)) for i in range(7)}, "attn": full()}, 1), both, {}
        ),
        "gpt-oss": Model(repeated({"local": window(span=20), "global": full()}, 3), chain, {}),
        # One group of layers that differ in bytes: a sparse indexer beside the latents that it chooses from.
        "DeepSeek-V3.2": Model(
            repeated({"mla": latent(size=28), "indexer": latent(size=8, dtype=torch.uint8)}, 3), chain, {}
        ),
    }


MODELS = models()


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = config_folder("llama", tmp_path_factory.mktemp("unit_map"))
    return _vllm_config(str(folder), "{}", "v1", "fail", "{}")


@dataclass
class Caches:
    """A model's caches as vLLM made them."""

    config: Any
    views: dict[str, torch.Tensor]
    storages: Storages
    units: dict[int, UnitMap]

    def content(self, layer: str, block: int) -> torch.Tensor:
        """A block's bytes as the layer itself sees them, without padding."""
        view = self.views[layer]
        blocks = view if view.shape[0] == self.config.num_blocks else view.unflatten(0, (self.config.num_blocks, -1))
        return blocks[block].contiguous().view(torch.uint8)


def caches_of(vllm_config: Any, model: Model, layout: str, stage: set[str] | None = None) -> Caches:
    """Group, lay out, allocate and view: all of it vLLM's own code. With `stage`, only those layers are here."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import add_kv_sharing_layers_to_kv_cache_groups, allocate_kv_cache

    vllm_config = copy.deepcopy(vllm_config)
    vllm_config.cache_config.kv_cache_layout = layout
    groups = get_kv_cache_groups(vllm_config, dict(model.specs))
    probe = get_kv_cache_config_from_groups(vllm_config, groups, 1 << 24)
    per_block = probe.kv_cache_tensors[0].size // probe.num_blocks
    config = get_kv_cache_config_from_groups(vllm_config, groups, per_block * BLOCKS)
    assert config.num_blocks == BLOCKS
    views = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout[layout])
    add_kv_sharing_layers_to_kv_cache_groups(model.shared, config.kv_cache_groups)
    views |= {layer: views[source] for layer, source in model.shared.items()}
    if stage is not None:
        views = {layer: view for layer, view in views.items() if layer in stage}
    storages = Storages()
    units = {i: unit_map(views, group.layer_names, BLOCKS, storages) for i, group in enumerate(config.kv_cache_groups)}
    return Caches(config, views, storages, units)


CASES = [(name, layout) for name in MODELS for layout in LAYOUTS]


@pytest.fixture(params=CASES, ids=lambda case: "-".join(case))
def caches(request: pytest.FixtureRequest, vllm_config: Any) -> Caches:
    name, layout = request.param
    try:
        return caches_of(vllm_config, MODELS[name], layout)
    except (ValueError, NotImplementedError, AssertionError) as refused:
        # vLLM itself has no such engine: mixed page sizes want blocks outermost.
        pytest.skip(f"vLLM: {refused}")


def test_every_model_has_a_layout(vllm_config: Any) -> None:
    """The skips above are of layouts, not of models; and the groups are of the kinds that the model is about."""
    for name, model in MODELS.items():
        made = 0
        for layout in LAYOUTS:
            try:
                one = caches_of(vllm_config, model, layout)
            except (ValueError, NotImplementedError, AssertionError):
                continue
            made += 1
            rows = bind(group_facts(i, group) for i, group in enumerate(one.config.kv_cache_groups))
            assert {row.kind for row in rows} == model.kinds
        assert made >= 2, name


def test_bytes_there_and_back(caches: Caches) -> None:
    """Blocks of all groups at once, saved, overwritten, loaded into other blocks: each layer sees what it saw."""
    rng = np.random.default_rng(7)
    (flat,) = caches.storages.flat
    memory = flat.numpy()
    memory[:] = rng.integers(0, 256, memory.size, dtype=np.uint8)
    groups = caches.config.kv_cache_groups
    # A block id belongs to one group at a time: groups lie over each other.
    ids = rng.permutation(BLOCKS).tolist()
    sources = {group: [ids.pop()] for group in range(len(groups))}
    targets = {group: [ids.pop()] for group in range(len(groups)) if ids}
    slots = {
        group: SlotMemory(
            ArenaPlan(unit.unit_bytes + 16, 1, (group,)), np.full(unit.unit_bytes + 16, 0x5A, dtype=np.uint8)
        )
        for group, unit in caches.units.items()
    }
    transfer = HostTransfer(caches.storages, caches.units, slots)
    before = {
        (layer, group): caches.content(layer, sources[group][0]).clone()
        for group in sources
        for layer in groups[group].layer_names
        if layer in caches.views
    }
    transfer.save([UnitCopy(group, 0, source) for group, (source,) in sources.items()])
    for group, unit in caches.units.items():
        assert (slots[group].row(0)[unit.unit_bytes :] == 0x5A).all()
    memory[:] = rng.integers(0, 256, memory.size, dtype=np.uint8)
    poisoned = memory.copy()
    transfer.load([UnitCopy(group, 0, target) for group, (target,) in targets.items()])
    for (layer, group), content in before.items():
        if group in targets:
            assert torch.equal(caches.content(layer, targets[group][0]), content), layer
    # All else is as it was: padding, other blocks, other groups' memory.
    touched = np.zeros(memory.size, dtype=bool)
    for group, (target,) in targets.items():
        for region in caches.units[group].regions:
            start = region.offset_bytes + target * region.stride_bytes
            touched[start : start + region.nbytes] = True
    assert (memory[~touched] == poisoned[~touched]).all()


def test_a_unit_is_the_layers_bytes_once_and_in_bounds(caches: Caches) -> None:
    (flat,) = caches.storages.flat
    for group, unit in caches.units.items():
        layers = [name for name in caches.config.kv_cache_groups[group].layer_names if name in caches.views]
        owners = [name for name in layers if not unit.spans[name].follows]
        assert unit.unit_bytes == sum(caches.content(name, 0).numel() for name in owners)
        seen = np.zeros(flat.numel(), dtype=np.int32)
        for block in range(BLOCKS):
            for region in unit.regions:
                start = region.offset_bytes + block * region.stride_bytes
                assert start >= 0
                assert start + region.nbytes <= flat.numel()
                seen[start : start + region.nbytes] += 1
        assert seen.max() == 1  # neither twice in a unit, nor in two blocks
        assert seen.sum() == BLOCKS * unit.unit_bytes


def test_layers_are_at_fixed_offsets_of_a_record(caches: Caches) -> None:
    """What a span says is where a layer's bytes are in the slot, for every block."""
    rng = np.random.default_rng(3)
    (flat,) = caches.storages.flat
    flat.numpy()[:] = rng.integers(0, 256, flat.numel(), dtype=np.uint8)
    for group, unit in caches.units.items():
        spans = list(unit.spans.values())
        owned = [span for span in spans if not span.follows]
        assert [span.offset_bytes for span in owned] == [0, *np.cumsum([span.nbytes for span in owned])[:-1].tolist()]
        assert all(one.offset_bytes + one.nbytes == other.offset_bytes for one, other in pairwise(owned))
        slot = SlotMemory(ArenaPlan(unit.unit_bytes, 1, (group,)), np.zeros(unit.unit_bytes, dtype=np.uint8))
        transfer = HostTransfer(caches.storages, caches.units, {group: slot})
        for block in (1, BLOCKS - 1):
            transfer.save([UnitCopy(group, 0, block)])
            for name, span in unit.spans.items():
                found = slot.row(0)[span.offset_bytes : span.offset_bytes + span.nbytes]
                # In the order of memory, which is not the view's own where heads are outside of tokens.
                assert np.array_equal(np.sort(found), np.sort(caches.content(name, block).numpy().reshape(-1))), name


def test_what_layers_share_is_kept_once(vllm_config: Any) -> None:
    model = MODELS["Gemma-3"]
    alone = caches_of(vllm_config, Model(model.specs, model.kinds, {}), "LBHNC")
    sharing = caches_of(vllm_config, model, "LBHNC")
    for group, unit in sharing.units.items():
        assert unit.regions == alone.units[group].regions
        followers = {name: span for name, span in unit.spans.items() if span.follows}
        assert {name: span.follows for name, span in followers.items()} == {
            layer: source for layer, source in model.shared.items() if source in unit.spans
        }
        for span in followers.values():
            assert span._replace(follows="") == unit.spans[span.follows]
    assert sum(len(unit.spans) for unit in sharing.units.values()) == len(model.specs) + len(model.shared)


@pytest.mark.parametrize("name", ["Qwen3-Next", "DeepSeek-V4"])
def test_a_pipeline_stage_has_its_own_layers_only(name: str, vllm_config: Any) -> None:
    model, layout = MODELS[name], "BLHNC"
    whole = caches_of(vllm_config, model, layout)
    here = {layer for layer in model.specs if layer.startswith("layers.1.")}
    for stage in (here, set(model.specs) - here):
        part = caches_of(vllm_config, model, layout, stage)
        for group, unit in part.units.items():
            assert set(unit.spans) == {layer for layer in whole.units[group].spans if layer in stage}
            for layer, span in unit.spans.items():
                assert span.nbytes == whole.units[group].spans[layer].nbytes


def test_the_layouts_are_all_that_vllm_has() -> None:
    from vllm.v1.kv_cache_layout import KVCacheLayout

    assert [layout.name for layout in KVCacheLayout] == LAYOUTS
