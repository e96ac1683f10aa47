"""The unit map: where in the engine's memory the bytes of one block of one group are.

Derived from the tensors that the engine registers, so it holds for every layout (LBHNC, LBNHC, BLHNC, ...) and for
kernel blocks smaller than the manager's. Padding is never part of a unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product
from typing import Any, NamedTuple

import torch

from ucmcache.coordinator.binding import GroupFacts
from ucmcache.coordinator.spec import HOST_POOL, REFUSALS, SPEC_TABLE
from ucmcache.errors import UnsupportedModelError


class Region(NamedTuple):
    """A run of bytes that every block of a group has: `storage[offset + block * stride : + nbytes]`."""

    storage: int
    offset_bytes: int
    stride_bytes: int
    nbytes: int


class Span(NamedTuple):
    """Where a layer's bytes are in a unit; a follower's are those of the layer whose memory it shares."""

    offset_bytes: int
    nbytes: int
    follows: str = ""


@dataclass(frozen=True, slots=True)
class UnitMap:
    """All regions of one group's block, in slot order: region i starts where region i-1 ends.

    `spans` has every layer that this worker holds, in the group's order, at the same offset in every unit. A region may
    hold several layers, where they are neighbours in memory too.
    """

    regions: tuple[Region, ...]
    spans: Mapping[str, Span] = field(default_factory=dict)

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit, without padding."""
        return sum(region.nbytes for region in self.regions)


class Storages:
    """The distinct memories behind the registered tensors, as flat byte tensors."""

    def __init__(self) -> None:
        self.flat: list[torch.Tensor] = []
        self._by_address: dict[int, int] = {}

    def index_of(self, tensor: torch.Tensor) -> int:
        """Index in `flat` of the memory that backs `tensor`."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self._by_address:
            self._by_address[address] = len(self.flat)
            self.flat.append(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
        return self._by_address[address]


# After a load the engine marks the blocks of every group that it caches as filled, those of silent rows too.
_UNFILLED = (
    "its row keeps nothing of it (kind NONE), but the engine caches its blocks (prefix_cacheable is True), and would "
    "give later requests blocks that no load has filled; if no later request reads them, let the spec's "
    "prefix_cacheable be False, else give the row another kind"
)


def layer_specs(spec: Any, layer_names: Sequence[str]) -> dict[str, Any]:
    """Each layer's own spec; a group of uniform type keeps one per layer, any other shares one."""
    per_layer = getattr(spec, "kv_cache_specs", None)
    return {name: per_layer[name] if per_layer else spec for name in layer_names}


def group_facts(group_id: int, group: Any, content: str = "") -> GroupFacts:
    """What the spec table needs to know of one of vLLM's `KVCacheGroupSpec`s."""
    spec = group.kv_cache_spec
    layers = list(layer_specs(spec, group.layer_names).values()) or [spec]
    first = layers[0]
    shards = [1 if getattr(one, "tp_replicated", False) else getattr(one, "max_tp_shards", None) or 0 for one in layers]
    cacheable = bool(getattr(group, "enable_kv_transfer", True)) and bool(getattr(spec, "prefix_cacheable", True))
    row = SPEC_TABLE.get(type(first).__name__)
    unfilled = _UNFILLED if cacheable and row is not None and not row.votes else ""
    return GroupFacts(
        group=group_id,
        spec_class=type(first).__name__,
        block_tokens=int(spec.block_size),
        spec=first,
        content=content,
        cacheable=cacheable,
        draft=bool(getattr(group, "is_eagle_group", False)),
        others=frozenset(type(one).__name__ for one in layers) - {type(first).__name__},
        tp_shards=max(shards) if all(shards) else None,
        refusal=HOST_POOL if getattr(group, "host_resident", False) else unfilled,
    )


def unit_map(layers: Mapping[str, Any], layer_names: Sequence[str], num_blocks: int, storages: Storages) -> UnitMap:
    """The unit map of one group from the registered tensors of its layers.

    A layer's value may be a tensor or a list of state tensors. Layers that this worker does not hold (pipeline stages)
    are skipped, and what layers share (a kv-sharing alias and its source) is in the unit once. Raises
    UnsupportedModelError for a tensor with no axis of `num_blocks` blocks, or with blocks that share bytes.
    """
    regions: list[Region] = []
    spans: dict[str, Span] = {}
    first_with: dict[frozenset[Region], str] = {}
    at = 0
    for name in layer_names:
        value = layers.get(name)
        if value is None:
            continue
        tensors = value if isinstance(value, list | tuple) else [value]
        found = _joined(region for tensor in tensors for region in _regions(name, tensor, num_blocks, storages))
        source = first_with.setdefault(frozenset(found), name)
        if source != name:
            spans[name] = spans[source]._replace(follows=source)
            continue
        spans[name] = Span(at, sum(region.nbytes for region in found))
        at += spans[name].nbytes
        regions += found
    return UnitMap(tuple(_joined(regions)), spans)


def _joined(regions: Iterable[Region]) -> list[Region]:
    """The same bytes in the same order, in as few regions as possible: each is a copy of its own."""
    joined: list[Region] = []
    for region in regions:
        last = joined[-1] if joined else None
        if last and region == last._replace(offset_bytes=last.offset_bytes + last.nbytes, nbytes=region.nbytes):
            joined[-1] = last._replace(nbytes=last.nbytes + region.nbytes)
        else:
            joined.append(region)
    return joined


def _regions(name: str, tensor: torch.Tensor, num_blocks: int, storages: Storages) -> Iterator[Region]:
    axis = next((axis for axis in (0, 1) if axis < tensor.dim() and _is_blocks(tensor, axis, num_blocks)), None)
    if axis is None:
        raise UnsupportedModelError(
            f"layer {name} registered a tensor of shape {tuple(tensor.shape)}; an axis of {num_blocks} blocks (or a "
            "multiple) is expected first or second"
        )
    if tensor.shape[axis] != num_blocks:
        # Kernel blocks subdivide a manager's block evenly, so grouping them is a pure view.
        tensor = tensor.unflatten(axis, (num_blocks, -1))
    if tensor.numel() == 0:
        return
    item = tensor.element_size()
    stride = tensor.stride(axis) * item
    _check_apart(name, tensor)
    inner = [(n, tensor.stride(d) * item) for d, n in enumerate(tensor.shape) if d != axis and n > 1]
    # Merge the axes that are contiguous in memory into one run; what is left is walked.
    run = item
    rest = sorted(inner, key=lambda size_stride: size_stride[1])
    while rest and rest[0][1] == run:
        run *= rest.pop(0)[0]
    outer = [axis_ for axis_ in inner if axis_ in rest]
    start = int(tensor.storage_offset()) * item
    storage = storages.index_of(tensor)
    for steps in product(*(range(size) for size, _ in outer)):
        shift = sum(step * step_bytes for step, (_, step_bytes) in zip(steps, outer, strict=True))
        yield Region(storage, start + shift, stride, run)


def _check_apart(name: str, tensor: torch.Tensor) -> None:
    # From the innermost axis outwards, each step must clear all that the axes inside it reach.
    reach = 1
    for step, size in sorted((tensor.stride(d), n) for d, n in enumerate(tensor.shape) if n > 1):
        if step < reach:
            raise UnsupportedModelError(
                f"layer {name} registered a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} whose "
                "elements share memory, so the engine itself would mix up its blocks; choose a --block-size that the "
                "attention backend takes as it is, or another VLLM_KV_CACHE_LAYOUT (such as LBNHC)"
            )
        reach += (size - 1) * step


def _is_blocks(tensor: torch.Tensor, axis: int, num_blocks: int) -> bool:
    # A leading axis of two is K and V, unless the pool itself has two blocks.
    size = tensor.shape[axis]
    if axis == 0 and size == 2 and num_blocks != 2 and tensor.dim() == 5:
        return False
    return size >= num_blocks and size % num_blocks == 0


def content_text(group: Any, unit: UnitMap) -> str:
    """Canonical text of all that shapes a group's bytes: its layers, their specs and the sizes of its regions.

    Raises UnsupportedModelError for a group that the spec of one layer cannot speak for, or whose blocks depend on
    tokens after them.
    """
    specs = layer_specs(group.kv_cache_spec, group.layer_names)
    if group_facts(0, group).cacheable:
        _check_layers(specs)
    lines = [f"{name}={specs[name]!r}" for name in group.layer_names]
    return "\n".join([*lines, ",".join(str(region.nbytes) for region in unit.regions)])


def _tokens_per_state(spec: Any) -> int | Fraction:
    try:
        tokens: int | Fraction = spec.tokens_per_state
    except (AttributeError, NotImplementedError):  # as in vLLM's base class
        return 1
    return tokens if tokens > 0 else 1  # a negative one is one state for all tokens


def _check_layers(specs: Mapping[str, Any]) -> None:
    classes = sorted({type(spec).__name__ for spec in specs.values()})
    unknown = [name for name in classes if name not in SPEC_TABLE]
    if len(classes) > 1 and unknown:
        reasons = "".join(f"; {name}: {REFUSALS[name]}" for name in unknown if name in REFUSALS)
        raise UnsupportedModelError(
            f"the layers {', '.join(specs)} share one KV cache group, and no row of ucmcache's spec table "
            f"(ucmcache.coordinator.spec.SPEC_TABLE) covers {', '.join(unknown)} among their classes "
            f"{', '.join(classes)}{reasons}"
        )
    acausal = [name for name, spec in specs.items() if getattr(spec, "non_causal", False)]
    if acausal:
        raise UnsupportedModelError(
            f"the layers {', '.join(acausal)} attend to later tokens (non_causal), so a prefix does not determine "
            "their KV, and ucmcache cannot keep it"
        )
    cut = [name for name, spec in specs.items() if spec.block_size % _tokens_per_state(spec)]
    if cut:
        raise UnsupportedModelError(
            f"a block of the layers {', '.join(cut)} ends within a group of tokens that is compressed into one state "
            f"(block_size {specs[cut[0]].block_size}, tokens_per_state {specs[cut[0]].tokens_per_state}), so it is not "
            "final when it is full; choose a --block-size that is a multiple of tokens_per_state"
        )
    for figure in sorted({figure for name in classes if name in SPEC_TABLE for figure in SPEC_TABLE[name].figures}):
        values = {name: getattr(spec, figure, None) for name, spec in specs.items()}
        if len(set(values.values())) > 1:
            raise UnsupportedModelError(
                f"layers of one KV cache group differ in {figure} ({values}), and a group is kept as one; serve the "
                "model without ucmcache"
            )
