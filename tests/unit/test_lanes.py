"""Slots of lanes and entries never meet, and what an entry dropped is not to be had (requirements G2)."""

from __future__ import annotations

import pytest

from ucmcache.errors import ContractError
from ucmcache.registry.lanes import LaneLayout, Mode


@pytest.mark.parametrize("mode", ["keep-current", "drop-current"])
@pytest.mark.parametrize("entries", range(5))
@pytest.mark.parametrize("lanes", range(1, 5))
def test_every_slot_has_one_owner(lanes: int, entries: int, mode: Mode) -> None:
    layout = LaneLayout(lanes, entries, mode)
    slots = [layout.current(lane) for lane in range(lanes)] + [layout.checkpoint(lane) for lane in range(lanes)]
    for entry in range(entries):
        if mode == "keep-current":
            slots.append(layout.entry_current(entry))
        slots.append(layout.entry_checkpoint(entry))
    assert slots == list(range(layout.slots))


def test_the_numbers_of_the_design() -> None:
    keep, drop = LaneLayout(3, 4, "keep-current"), LaneLayout(3, 4, "drop-current")
    assert [keep.current(2), keep.checkpoint(2), keep.entry_current(1), keep.entry_checkpoint(1)] == [2, 5, 8, 9]
    assert drop.entry_checkpoint(1) == 7 and (keep.slots, drop.slots) == (14, 10)


def test_a_dropped_current_is_refused_and_no_other_entry_answers_for_it() -> None:
    layout = LaneLayout(1, 2, "drop-current")
    for entry in range(2):
        with pytest.raises(ContractError, match="drop-current"):
            layout.entry_current(entry)


@pytest.mark.parametrize("number", [-1, 2, 100])
def test_lanes_and_entries_that_do_not_exist(number: int) -> None:
    layout = LaneLayout(2, 2, "keep-current")
    for slot_of in (layout.current, layout.checkpoint, layout.entry_current, layout.entry_checkpoint):
        with pytest.raises(ContractError, match="numbered from 0"):
            slot_of(number)


@pytest.mark.parametrize(("lanes", "entries"), [(0, 1), (-1, 1), (1, -1)])
def test_layouts_that_cannot_be(lanes: int, entries: int) -> None:
    with pytest.raises(ContractError):
        LaneLayout(lanes, entries, "keep-current")
