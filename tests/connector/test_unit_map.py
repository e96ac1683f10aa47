"""The unit map on whole models: vLLM groups, lays out and views their caches; every byte is followed there and back."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.connector.models import BLOCKS, LAYOUTS, MODELS, Caches, caches_of
from tests.sim.engine import _vllm_config, config_folder
from ucmcache.connector.layout import Storages, UnitMap, group_facts, unit_map
from ucmcache.connector.messages import UnitCopy
from ucmcache.connector.transfer import HostTransfer
from ucmcache.coordinator.binding import bind
from ucmcache.store.arena import ArenaPlan
from ucmcache.store.memory import SlotMemory

SPLIT = 4  # kernel blocks in a manager's block
SPARE_BYTES = 16  # in a slot, beyond the unit
# vLLM's words for layers and layouts that do not go together.
REFUSALS = ("need a block-compact layout", "cannot be padded", "cannot express", "cannot be split")
CASES = [
    (name, layout, split)
    for name, model in MODELS.items()
    for split, layouts in ((1, model.layouts), (SPLIT, model.split))
    for layout in layouts
]


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = config_folder("llama", tmp_path_factory.mktemp("unit_map"))
    return _vllm_config(str(folder), "{}", "v1", "fail", "{}")


@pytest.fixture(params=CASES, ids=lambda case: "-".join(map(str, case)))
def caches(request: pytest.FixtureRequest, vllm_config: Any) -> Caches:
    name, layout, split = request.param
    return caches_of(vllm_config, MODELS[name], layout, split)


def fill(caches: Caches, seed: int) -> NDArray[np.uint8]:
    """The engine's whole memory, with new random bytes in it."""
    (flat,) = caches.storages.flat
    memory: NDArray[np.uint8] = flat.numpy()
    memory[:] = np.random.default_rng(seed).integers(0, 256, memory.size, dtype=np.uint8)
    return memory


def transfer_of(caches: Caches) -> tuple[HostTransfer, dict[int, SlotMemory]]:
    """A real transfer with one slot for each group."""
    slots = {}
    for group, unit in caches.units.items():
        slot_bytes = unit.unit_bytes + SPARE_BYTES
        slots[group] = SlotMemory(ArenaPlan(slot_bytes, 1, (group,)), np.full(slot_bytes, 0x5A, dtype=np.uint8))
    return HostTransfer(caches.storages, caches.units, slots), slots


def covered(unit: UnitMap, block: int, size: int) -> NDArray[np.int32]:
    """How often each byte of the engine's memory is in a block's unit."""
    times = np.zeros(size, dtype=np.int32)
    for region in unit.regions:
        start = region.offset_bytes + block * region.stride_bytes
        assert 0 <= start <= start + region.nbytes <= size
        times[start : start + region.nbytes] += 1
    return times


def test_the_cases_are_all_that_vllm_has(vllm_config: Any) -> None:
    """Of every other layout vLLM itself says that it has no such engine; the groups are of the model's kinds."""
    from vllm.v1.kv_cache_layout import KVCacheLayout

    assert [layout.name for layout in KVCacheLayout] == LAYOUTS
    for name, model in MODELS.items():
        made: dict[int, list[str]] = {1: [], SPLIT: []}
        for split, layout in ((split, layout) for split in made for layout in LAYOUTS):
            try:
                one = caches_of(vllm_config, model, layout, split)
            except (ValueError, NotImplementedError) as refused:
                assert any(reason in str(refused) for reason in REFUSALS), refused
                continue
            except RuntimeError as refused:  # vLLM 0.32 sets heads wrongly apart, see test_layout.py
                assert layout == "BHLNC"
                assert split > 1
                assert "out of bounds" in str(refused)
                continue
            made[split].append(layout)
            rows = bind(group_facts(i, group) for i, group in enumerate(one.config.kv_cache_groups))
            assert {row.kind for row in rows} == model.kinds
        assert {split: sorted(layouts) for split, layouts in made.items()} == {
            1: sorted(model.layouts),
            SPLIT: sorted(model.split),
        }, name


def test_bytes_there_and_back(caches: Caches) -> None:
    """Blocks of all groups at once, saved, overwritten, loaded into other blocks: each layer sees what it saw."""
    memory = fill(caches, 7)
    transfer, slots = transfer_of(caches)
    # A block id belongs to one group at a time: groups lie over each other.
    ids = np.random.default_rng(7).permutation(BLOCKS).tolist()
    sources = {group: ids.pop() for group in caches.units}
    targets = {group: ids.pop() for group in caches.units if ids}
    before = {
        (group, layer): caches.content(layer, sources[group]) for group in targets for layer in caches.layers(group)
    }
    transfer.save([UnitCopy(group, 0, source) for group, source in sources.items()])
    for group, unit in caches.units.items():
        assert (slots[group].row(0)[unit.unit_bytes :] == 0x5A).all()
    poisoned = fill(caches, 8).copy()
    transfer.load([UnitCopy(group, 0, target) for group, target in targets.items()])
    for (group, layer), content in before.items():
        assert torch.equal(caches.content(layer, targets[group]), content), layer
    # All else is as it was: padding, other blocks, other groups' memory.
    touched = sum(covered(caches.units[group], target, memory.size) for group, target in targets.items())
    assert (memory == poisoned)[touched == 0].all()


def test_a_unit_has_each_byte_of_its_layers_once(caches: Caches) -> None:
    size = caches.storages.flat[0].numel()
    owner = np.full(size, -1)
    for block in range(BLOCKS):
        for group, unit in caches.units.items():
            owned = [name for name in caches.layers(group) if not unit.spans[name].follows]
            assert unit.unit_bytes == sum(caches.content(name, block).numel() for name in owned)
            times = covered(unit, block, size)
            assert times.max() == 1
            assert times.sum() == unit.unit_bytes
            # Groups lie over each other, but never another block of another group.
            assert set(owner[times == 1]) <= {-1, block}
            owner[times == 1] = block


def test_layers_are_at_fixed_offsets_of_a_record(caches: Caches) -> None:
    """The bytes that a span names are that layer's, all of them, and no other layer's; for every block."""
    for group, unit in caches.units.items():
        owned = [span for span in unit.spans.values() if not span.follows]
        assert owned[0].offset_bytes == 0
        assert all(one.offset_bytes + one.nbytes == other.offset_bytes for one, other in pairwise(owned))
        assert owned[-1].offset_bytes + owned[-1].nbytes == unit.unit_bytes
        transfer, slots = transfer_of(caches)
        record = slots[group].row(0)
        for name, span in unit.spans.items():
            fill(caches, 3)
            original = caches.content(name, 1)
            transfer.save([UnitCopy(group, 0, 1)])
            record[: span.offset_bytes] = 0
            record[span.offset_bytes + span.nbytes :] = 0
            transfer.load([UnitCopy(group, 0, BLOCKS - 1)])
            assert torch.equal(caches.content(name, BLOCKS - 1), original), name
            for other in set(caches.layers(group)) - {name}:
                if span._replace(follows="") != unit.spans[other]._replace(follows=""):
                    assert not caches.content(other, BLOCKS - 1).any(), (name, other)


def test_states_apart_are_what_they_are_in_one_page(caches: Caches) -> None:
    """A layer may register its page, or the list of states that the page holds: the record is the same."""
    storages = Storages()
    for group, unit in caches.units.items():
        apart = {layer: list(parts) for layer, parts in caches.parts.items()}
        assert unit_map(apart, caches.config.kv_cache_groups[group].layer_names, BLOCKS, storages) == unit


def test_what_layers_share_is_kept_once(vllm_config: Any) -> None:
    model = MODELS["Gemma-3"]
    for layout, split in [(layout, 1) for layout in model.layouts] + [(layout, SPLIT) for layout in model.split]:
        alone = caches_of(vllm_config, replace(model, shared={}), layout, split)
        sharing = caches_of(vllm_config, model, layout, split)
        followers = {}
        for group, unit in sharing.units.items():
            assert unit.regions == alone.units[group].regions
            for name, span in unit.spans.items():
                if span.follows:
                    followers[name] = span.follows
                    assert span._replace(follows="") == unit.spans[span.follows]
        assert followers == model.shared


@pytest.mark.parametrize("name", ["Qwen3-Next", "DeepSeek-V4"])
def test_a_pipeline_stage_has_its_own_layers_only(name: str, vllm_config: Any) -> None:
    model, layout = MODELS[name], "BLHNC"
    whole = caches_of(vllm_config, model, layout)
    here = {layer for layer in model.specs if layer.startswith("layers.1.")}
    for stage in (here, set(model.specs) - here):
        part = caches_of(vllm_config, model, layout, stage=stage)
        for group, unit in part.units.items():
            assert set(unit.spans) == {layer for layer in whole.units[group].spans if layer in stage}
            for layer, span in unit.spans.items():
                assert span.nbytes == whole.units[group].spans[layer].nbytes
            assert unit.unit_bytes == sum(span.nbytes for span in unit.spans.values())
    nothing = caches_of(vllm_config, model, layout, stage=set())
    assert all(unit == UnitMap(()) for unit in nothing.units.values())
