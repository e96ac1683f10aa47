"""Host memory that several processes share, and slots that go round their parts of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucmcache.errors import ContractError
from ucmcache.store.arena import ArenaPlan, plan_arenas
from ucmcache.store.memory import MemoryHandle, SlotMemory, map_shared, take_shared_memory

_OTHER_PROCESS = """
import json, sys
from ucmcache.store.memory import MemoryHandle, map_shared
memory = map_shared(MemoryHandle(*json.loads(sys.argv[1])))
print(memory[3], memory[len(memory) - 1])
memory[5] = 55
"""


def test_another_process_reads_and_writes_the_same_bytes() -> None:
    memory, handle = take_shared_memory(70_000)
    try:
        memory[3], memory[69_999] = 33, 99
        command = [sys.executable, "-c", _OTHER_PROCESS, json.dumps(handle)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["33", "99"]
        assert memory[5] == 55
        assert memory[4] == 0
    finally:
        os.close(handle.fd)


def test_only_the_very_memory_is_mapped() -> None:
    memory, handle = take_shared_memory(4096)
    other, another = take_shared_memory(4096)
    wrong: list[tuple[MemoryHandle, str]] = [
        (handle._replace(boot="another boot"), "another machine"),
        (handle._replace(fd=another.fd), "something else"),
        (handle._replace(nbytes=8192), "something else"),
        (handle._replace(fd=1_000_000), "No such file"),
        (handle._replace(pid=2**22 + 1), "No such file"),
    ]
    for one, message in wrong:
        with pytest.raises(OSError, match=message):
            map_shared(one)
    mapped = map_shared(handle)
    for one in (handle, another):
        os.close(one.fd)
    # Who has mapped it keeps it, whatever becomes of the descriptor.
    memory[0] = 7
    assert mapped[0] == 7
    assert other[0] == 0
    with pytest.raises(OSError, match=r"something else|No such file"):
        map_shared(handle)


@given(slots=st.integers(1, 40), spread=st.integers(1, 5), slot_bytes=st.integers(1, 9))
def test_slots_go_round_the_ranks_and_never_overlap(slots: int, spread: int, slot_bytes: int) -> None:
    plan = ArenaPlan(slot_bytes, slots, (0,), spread)
    memories = [np.zeros(plan.rows * slot_bytes + 3, dtype=np.uint8) for _ in range(spread)]
    shared = SlotMemory(plan, *memories)
    for slot in range(slots):
        shared.row(slot)[:] = slot + 1
        assert memories[slot % spread].max() == slot + 1
    for slot in range(slots):
        assert bytes(shared.view(slot, slot_bytes)) == bytes([slot + 1]) * slot_bytes
    assert sum(int((memory > 0).sum()) for memory in memories) == slots * slot_bytes
    with pytest.raises(ContractError, match="the memory of"):
        SlotMemory(plan, *memories, memories[0])


@given(
    units=st.dictionaries(st.integers(0, 6), st.tuples(st.integers(1, 300), st.integers(1, 64)), min_size=1),
    spread=st.dictionaries(st.integers(0, 6), st.sampled_from([1, 2, 4, 8])),
    budget=st.integers(100_000, 10_000_000),
    by_tokens=st.booleans(),
)
def test_arenas_fit_into_every_rank(
    units: dict[int, tuple[int, int]], spread: dict[int, int], budget: int, by_tokens: bool
) -> None:
    plans = plan_arenas("host.blocks", budget, units, by_tokens, spread)
    assert sum(plan.rows * plan.slot_bytes for plan in plans) <= budget
    assert sorted(group for plan in plans for group in plan.groups) == sorted(units)
    for plan in plans:
        assert all((units[group][0], spread.get(group, 1)) == (plan.slot_bytes, plan.spread) for group in plan.groups)
        assert plan.rows * plan.spread == plan.slots
    # Of what is kept for the same tokens, each group has as many slots as the others, to within rounding.
    shares = sorted(
        plan.slots / sum(1 / (units[group][1] if by_tokens else 1) for group in plan.groups) for plan in plans
    )
    for fewer, more in pairwise(shares):
        assert more - fewer <= max(plan.spread for plan in plans) * max(tokens for _, tokens in units.values())
