"""The unit map against the engine's own views: what is saved and loaded is exactly the bytes that a view shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ucmcache.connector.layout import Span, Storages, content_text, unit_map
from ucmcache.connector.messages import UnitCopy
from ucmcache.connector.transfer import HostTransfer
from ucmcache.errors import UnsupportedModelError
from ucmcache.store.arena import ArenaPlan
from ucmcache.store.memory import SlotMemory

LAYOUTS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
DTYPES = [torch.uint8, torch.float16, torch.bfloat16, torch.float32]
SPARE_BYTES = 64  # in a slot, beyond the unit

Views = dict[str, torch.Tensor | list[torch.Tensor]]


@dataclass
class Pool:
    """A group's memory: its size, how the engine views it, and what one block of a view is."""

    size_bytes: int
    num_blocks: int
    unit_bytes: int
    views: Callable[[torch.Tensor], Views]  # over an int8 buffer of `size_bytes`
    block: Callable[[torch.Tensor, int], torch.Tensor]


def blocks_first(num_blocks: int) -> Callable[[torch.Tensor, int], torch.Tensor]:
    """One block of a view whose first axis is blocks, or kernel blocks."""

    def block(tensor: torch.Tensor, index: int) -> torch.Tensor:
        from vllm.v1.kv_cache_interface import group_kernel_blocks

        grouped: torch.Tensor = group_kernel_blocks(tensor, num_blocks)
        return grouped[index]

    return block


def engine_pool(spec: Any, layout: str, num_blocks: int, layers: int, offset: int, kernel_tokens: int | None) -> Pool:
    """A pool as vLLM lays it out; the group shares it with whatever else is in it."""
    from vllm.v1.kv_cache_interface import KVCacheTensor, compute_layout_strides, create_kv_cache_views
    from vllm.v1.kv_cache_layout import KVCacheLayout

    names = [f"layer{i}" for i in range(layers)]
    strides = compute_layout_strides(spec, num_blocks, layers, KVCacheLayout[layout])
    size = offset + layers * num_blocks * spec.page_size_bytes + 48
    tensor = KVCacheTensor(size, names, layer_stride=strides[0], block_stride=strides[1], offset=offset)

    def views(buffer: torch.Tensor) -> Views:
        made = create_kv_cache_views(buffer, spec, num_blocks, KVCacheLayout[layout], tensor, kernel_tokens)
        return dict(zip(names, made, strict=True))

    return Pool(size, num_blocks, layers * spec.real_page_size_bytes, views, blocks_first(num_blocks))


@st.composite
def attention_pools(draw: st.DrawFn, layout: str, kind: str) -> Pool:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

    block_tokens = draw(st.integers(1, 6)) * (4 if kind == "kernel blocks" else 1)
    common: dict[str, Any] = {
        "block_size": block_tokens,
        "num_kv_heads": 1 if kind == "mla" else draw(st.integers(1, 4)),
        "head_size": draw(st.integers(1, 9)),
        "dtype": draw(st.sampled_from(DTYPES)),
    }
    num_blocks, layers = draw(st.integers(1, 7)), draw(st.integers(1, 3))
    offset = 16 * draw(st.integers(0, 3))
    kernel_tokens = None
    spec: Any
    if kind == "mla":
        spec = MLAAttentionSpec(**common)
    elif kind == "padded":
        spec = FullAttentionSpec(**{**common, "num_kv_heads": 1})
        spec = FullAttentionSpec(
            **{**common, "num_kv_heads": 1}, page_size_padded=spec.page_size_bytes + 4 * draw(st.integers(1, 9))
        )
    elif kind == "kernel blocks":
        spec = FullAttentionSpec(**common)
        kernel_tokens = block_tokens // draw(st.sampled_from([1, 2, 4]))
        # There vLLM 0.32.0 gives a single layer's heads the stride of whole blocks, see test_blocks_that_share_bytes.
        assume(layout != "BHLNC" or spec.num_kv_heads == 1 or kernel_tokens == block_tokens)
    else:
        spec = SlidingWindowSpec(sliding_window=5, head_size_v=draw(st.integers(1, 9)), **common)
    pool = engine_pool(spec, layout, num_blocks, layers, offset, kernel_tokens)
    try:
        pool.views(torch.empty(pool.size_bytes, dtype=torch.int8))
    except ValueError as refused:  # vLLM itself splits only blocks that are one dense page
        assume("cannot be split" not in str(refused))
        raise
    return pool


@st.composite
def state_pools(draw: st.DrawFn, layout: str, as_list: bool) -> Pool:
    from vllm.v1.kv_cache_interface import MambaSpec

    shapes = tuple(tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))) for _ in range(2))
    shapes = ((2, *shapes[0]), shapes[1])  # the second state starts at a multiple of its item's size
    content = 2 * math.prod(shapes[0]) + 4 * math.prod(shapes[1])
    spec = MambaSpec(
        block_size=8,
        shapes=shapes,
        dtypes=(torch.float16, torch.float32),
        page_size_padded=(content + 7) // 8 * 8 + 8 * draw(st.integers(0, 4)),
    )
    pool = engine_pool(
        spec, layout, draw(st.integers(1, 7)), draw(st.integers(1, 3)), 16 * draw(st.integers(0, 3)), None
    )
    if not as_list:
        return pool
    whole = pool.views

    def split(view: torch.Tensor) -> list[torch.Tensor]:
        first = 2 * math.prod(shapes[0])
        pages = view[:, 0, 0]
        conv, ssm = pages[:, :first].view(torch.float16), pages[:, first:].view(torch.float32)
        return [conv.unflatten(1, shapes[0]), ssm.unflatten(1, shapes[1])]

    def views(buffer: torch.Tensor) -> Views:
        return {name: split(view) for name, view in whole(buffer).items() if isinstance(view, torch.Tensor)}

    return Pool(pool.size_bytes, pool.num_blocks, pool.unit_bytes, views, blocks_first(pool.num_blocks))


@st.composite
def keys_and_values_pools(draw: st.DrawFn) -> Pool:
    """Tensors `[2, blocks, tokens, heads, size]` of K and V, in any order in memory."""
    num_blocks = draw(st.integers(1, 7).filter(lambda blocks: blocks != 2))
    ratio = draw(st.integers(1, 3))
    shape = [2, num_blocks * ratio, draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 6))]
    order = draw(st.permutations(range(5)))
    inverse = [order.index(axis) for axis in range(5)]
    dtype = draw(st.sampled_from(DTYPES))
    size = math.prod(shape) * dtype.itemsize
    offset = 16 * draw(st.integers(0, 2))

    def views(buffer: torch.Tensor) -> Views:
        flat = buffer[offset : offset + size].view(dtype)
        return {"layer0": flat.view([shape[axis] for axis in order]).permute(inverse)}

    def block(tensor: torch.Tensor, index: int) -> torch.Tensor:
        grouped: torch.Tensor = tensor.unflatten(1, (num_blocks, ratio))
        return grouped[:, index]

    return Pool(offset + size + 16, num_blocks, size // num_blocks, views, block)


def tensors_of(views: Mapping[str, torch.Tensor | list[torch.Tensor]]) -> list[torch.Tensor]:
    return [tensor for view in views.values() for tensor in (view if isinstance(view, list) else [view])]


def noise(rng: np.random.Generator, size: int) -> torch.Tensor:
    return torch.from_numpy(rng.integers(-128, 128, size, dtype=np.int8))


def check(pool: Pool, seed: int) -> None:
    """Move every block to another one through host slots, and compare the whole memory with the views' own copy."""
    rng = np.random.default_rng(seed)
    buffer = noise(rng, pool.size_bytes)
    views = pool.views(buffer)
    storages = Storages()
    unit = unit_map(views, ["not held here", *views], pool.num_blocks, storages)
    assert unit.unit_bytes == pool.unit_bytes
    assert len(storages.flat) == 1
    slot_bytes = unit.unit_bytes + SPARE_BYTES
    plan = ArenaPlan(slot_bytes, pool.num_blocks, (0,))
    memory = SlotMemory(plan, np.full(plan.slots * slot_bytes, 0x5A, dtype=np.uint8))
    transfer = HostTransfer(storages, {0: unit}, {0: memory})

    sources = rng.permutation(pool.num_blocks).tolist()
    transfer.save([UnitCopy(0, slot, source) for slot, source in enumerate(sources)])
    assert all((memory.row(slot)[unit.unit_bytes :] == 0x5A).all() for slot in range(plan.slots))

    original = buffer.clone()
    buffer.copy_(noise(rng, pool.size_bytes))
    # One block stays as it is; the others get another block's bytes each.
    targets = rng.permutation(pool.num_blocks).tolist()[1:]
    expected = buffer.clone()
    for slot, target in enumerate(targets):
        for there, here in zip(tensors_of(pool.views(expected)), tensors_of(pool.views(original)), strict=True):
            pool.block(there, target).copy_(pool.block(here, sources[slot]))
    transfer.load([UnitCopy(0, slot, target) for slot, target in enumerate(targets)])
    assert torch.equal(buffer, expected)


SEEDS = st.integers(0, 2**32 - 1)
# vLLM refuses many pools of kernel blocks: the filter is its own.
_SETTINGS = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])


@pytest.mark.parametrize("kind", ["full", "mla", "kernel blocks"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_in_every_layout(layout: str, kind: str) -> None:
    @_SETTINGS
    @given(attention_pools(layout, kind), SEEDS)
    def moves_exactly_the_view(pool: Pool, seed: int) -> None:
        check(pool, seed)

    moves_exactly_the_view()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_is_never_part_of_attention(layout: str) -> None:
    @_SETTINGS
    @given(attention_pools(layout, "padded"), SEEDS)
    def moves_exactly_the_view(pool: Pool, seed: int) -> None:
        check(pool, seed)

    moves_exactly_the_view()


@pytest.mark.parametrize("as_list", [False, True], ids=["one tensor", "a list of states"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_states_in_every_layout(layout: str, as_list: bool) -> None:
    @_SETTINGS
    @given(state_pools(layout, as_list), SEEDS)
    def moves_exactly_the_view(pool: Pool, seed: int) -> None:
        check(pool, seed)

    moves_exactly_the_view()


@settings(max_examples=150, deadline=None)
@given(keys_and_values_pools(), SEEDS)
def test_keys_and_values_apart(pool: Pool, seed: int) -> None:
    check(pool, seed)


def test_the_layouts_are_all_that_vllm_has() -> None:
    from vllm.v1.kv_cache_layout import KVCacheLayout

    assert [layout.name for layout in KVCacheLayout] == LAYOUTS


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (9,), (2, 3, 10, 4, 4), (0, 4)])
def test_a_tensor_without_an_axis_of_blocks_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"layer odd registered .*10 blocks"):
        unit_map({"odd": torch.empty(shape)}, ["odd"], 10, Storages())


@pytest.mark.parametrize(("heads", "ratio"), [(2, 2), (2, 4), (3, 2), (4, 4)])
def test_blocks_that_share_bytes_are_refused(heads: int, ratio: int) -> None:
    """BHLNC, one layer, several heads, kernel blocks: vLLM 0.32.0 lays its heads over the next kernel blocks."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = FullAttentionSpec(block_size=8, num_kv_heads=heads, head_size=4, dtype=torch.float16)
    pool = engine_pool(spec, "BHLNC", num_blocks=5, layers=1, offset=0, kernel_tokens=8 // ratio)
    with pytest.raises(RuntimeError, match="out of bounds"):
        pool.views(torch.empty(pool.size_bytes, dtype=torch.int8))
    # With room behind the pool, as where vLLM rounds its allocation up, there is no such error.
    views = pool.views(torch.empty(pool.size_bytes + heads * spec.page_size_bytes, dtype=torch.int8))
    with pytest.raises(UnsupportedModelError, match=r"layer0 registered .* share memory"):
        unit_map(views, ["layer0"], 5, Storages())


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_views_are_refused_or_their_elements_are_apart(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    strides = [data.draw(st.integers(0, 12)) for _ in shape]
    view = torch.empty(160, dtype=torch.float16).as_strided(shape, strides)
    elements = torch.arange(160).as_strided(shape, strides)
    apart = len(set(elements.reshape(-1).tolist())) == elements.numel()
    try:
        unit = unit_map({"layer0": view}, ["layer0"], shape[0], Storages())
    except UnsupportedModelError:
        # Steps that interlock, as threes between twos, are no layout of an engine: refused too.
        steps = sorted(step for step, size in zip(strides, shape, strict=True) if size > 1)
        assert not apart or any(step % inner for inner, step in combinations(steps, 2))
        return
    assert apart
    covered = [
        region.offset_bytes + block * region.stride_bytes + byte
        for region in unit.regions
        for block in range(shape[0])
        for byte in range(region.nbytes)
    ]
    assert sorted(covered) == sorted(2 * element + byte for element in elements.reshape(-1).tolist() for byte in (0, 1))


@pytest.mark.parametrize(
    ("layout", "regions"), [("LBHNC", 3), ("LBNHC", 3), ("LHBNC", 6), ("BLHNC", 1), ("BLNHC", 1), ("BHLNC", 6)]
)
def test_layers_that_are_neighbours_in_memory_are_one_copy(layout: str, regions: int) -> None:
    spec = attention("FullAttentionSpec", num_kv_heads=2)
    pool = engine_pool(spec, layout, num_blocks=5, layers=3, offset=16, kernel_tokens=None)
    views = pool.views(torch.empty(pool.size_bytes, dtype=torch.int8))
    unit = unit_map(views, list(views), 5, Storages())
    assert len(unit.regions) == regions
    page = spec.page_size_bytes
    assert unit.spans == {name: Span(i * page, page) for i, name in enumerate(views)}


def test_a_follower_may_see_the_shared_memory_in_its_own_way() -> None:
    """Whole, in parts, as other items or with its axes in another order: the bytes are the source's, and kept once."""
    source = torch.empty(5, 2, 4, 8, dtype=torch.float16)
    outside = torch.empty(2, 4, 5, 8, dtype=torch.float16).permute(2, 0, 1, 3)  # a block in eight pieces
    ways = {
        "source": source,
        "same": source,
        "parts": [source[:, 0], source[:, 1]],
        "bytes": source.view(torch.uint8).flatten(1),
        "tokens first": source.transpose(1, 2),
        "pieces": outside,
        "pieces in another order": outside.transpose(1, 2),
    }
    unit = unit_map(ways, list(ways), 5, Storages())
    assert unit.spans["parts"] == Span(0, 128, follows="source")
    assert [span.follows for span in unit.spans.values()] == ["", *["source"] * 4, "", "pieces"]
    assert unit.unit_bytes == 2 * 128


def test_a_state_of_no_bytes_takes_no_room() -> None:
    states = [torch.empty(5, 3, dtype=torch.float16), torch.empty(5, 0, 4)]
    unit = unit_map({"a": states, "b": torch.empty(5, 7, dtype=torch.uint8)}, ["a", "b"], 5, Storages())
    assert unit.spans == {"a": Span(0, 6), "b": Span(6, 7)}
    assert unit.unit_bytes == 13


def test_groups_over_one_memory_share_its_storage() -> None:
    buffer = torch.zeros(1024, dtype=torch.int8)
    storages = Storages()
    first = unit_map({"a": buffer[:512].view(8, 64)}, ["a"], 8, storages)
    second = unit_map({"b": buffer.view(torch.float32).view(8, 32)}, ["b"], 8, storages)
    assert {region.storage for unit in (first, second) for region in unit.regions} == {0}
    assert [storage.numel() for storage in storages.flat] == [1024]
    assert (first.unit_bytes, second.unit_bytes) == (64, 128)


# -- what a group's content text tells --------------------------------------------------------------------------------


def group_of(*specs: Any, **options: Any) -> Any:
    """A group with one spec for all layers, or with one per layer."""
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, UniformTypeKVCacheSpecs

    names = [f"layer{i}" for i in range(max(len(specs), 2))]
    if len(specs) == 1:
        return KVCacheGroupSpec(names, specs[0], **options)
    uniform = UniformTypeKVCacheSpecs(block_size=8, kv_cache_specs=dict(zip(names, specs, strict=True)))
    return KVCacheGroupSpec(names, uniform, **options)


def attention(class_name: str, **values: Any) -> Any:
    from vllm.v1 import kv_cache_interface

    common = {"block_size": 8, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float16}
    return getattr(kv_cache_interface, class_name)(**{**common, **values})


def text_of(group: Any) -> str:
    return content_text(group, unit_map({}, [], 1, Storages()))


def test_every_layers_spec_counts() -> None:
    full = attention("FullAttentionSpec")
    texts = [
        text_of(group_of(full)),
        text_of(group_of(attention("FullAttentionSpec", head_size_v=4))),
        text_of(group_of(attention("FullAttentionSpec", dtype=torch.bfloat16))),
        text_of(group_of(attention("FullAttentionSpec", num_kv_heads=2, head_size=4))),
        text_of(group_of(full, attention("MLAAttentionSpec"))),
        text_of(group_of(attention("MLAAttentionSpec"), full)),
        text_of(group_of(full, full, full)),
    ]
    assert len(set(texts)) == len(texts)
    assert text_of(group_of(full)) == text_of(group_of(full, full)) == text_of(group_of(attention("FullAttentionSpec")))


@pytest.mark.parametrize("first", [True, False])
def test_a_group_that_mixes_in_an_unknown_class_is_refused(first: bool) -> None:
    """The scheduler is told of one layer per group; the worker sees them all."""
    layers = [attention("FullAttentionSpec"), attention("RSWASpec", rswa_window=4)]
    with pytest.raises(UnsupportedModelError, match="covers RSWASpec among their classes FullAttentionSpec, RSWASpec"):
        text_of(group_of(*(layers[::-1] if first else layers)))
    assert text_of(group_of(*layers, enable_kv_transfer=False))  # nothing of it is kept


def test_attention_to_later_tokens_is_refused() -> None:
    later = attention("FullAttentionSpec", non_causal=True)
    for group in (group_of(later), group_of(attention("FullAttentionSpec"), later)):
        with pytest.raises(UnsupportedModelError, match=r"layer1 attend to later tokens"):
            text_of(group)
