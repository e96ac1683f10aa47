"""The replay behind benchmarks/policies.py: every policy keeps the eviction contract, and the ceilings are ceilings."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from policies import POLICIES
from replay.run import DENSE, END, END_JUNCTION, SHIPPED, UNLIMITED, replay
from replay.traces import generate

SLOTS = 7
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "touch", "remove", "victims"]),
        st.integers(0, SLOTS - 1),
        st.sets(st.integers(0, SLOTS - 1), max_size=3),
    ),
    max_size=60,
)


@pytest.mark.parametrize("name", list(POLICIES))
@settings(max_examples=150, deadline=None)
@given(steps=STEPS)
def test_every_policy_gives_up_only_what_it_may(name: str, steps: list[tuple[str, int, set[int]]]) -> None:
    policy = POLICIES[name](SLOTS)
    held: set[int] = set()
    for action, slot, pinned in steps:
        if action == "add" and slot not in held:
            if hasattr(policy, "name_of"):
                policy.name_of[slot] = bytes([slot % 4])
            policy.add(slot)
            held.add(slot)
        elif action == "touch" and slot in held:
            policy.touch(slot)
        elif action == "remove" and slot in held:
            policy.remove(slot)
            held.discard(slot)
        elif action == "victims":
            count = slot % 3 + 1
            victims = policy.victims(count, lambda one, pinned=pinned: one not in pinned)  # type: ignore[misc]
            for one in pinned:  # in use for this time only
                policy.idle(one)
            if len(held - pinned) < count:
                # A few, or nothing: a store asks only where there are enough.
                assert victims is None or len(victims) <= len(held - pinned)
            else:
                assert victims is not None
                assert len(victims) == count
            victims = victims or []
            assert len(set(victims)) == len(victims)
            assert set(victims) <= held - pinned
            for one in victims:
                policy.remove(one)
                held.discard(one)


def test_more_triggers_and_more_room_resume_more() -> None:
    trace = generate(600, seed=5)
    dense, shipped, junction, end = (
        replay(trace, keep, UNLIMITED).resumed_tokens for keep in (DENSE, SHIPPED, END_JUNCTION, END)
    )
    everything = replay(trace, DENSE, UNLIMITED)
    # With every state kept, all that the chains agree on is resumed.
    assert dense == everything.chain_tokens >= shipped >= junction >= end > 0
    tight = replay(trace, SHIPPED, 60)
    assert 0 < tight.resumed_tokens < shipped
    for outcome in (everything, tight):
        assert outcome.chain_tokens == outcome.resumed_tokens + sum(outcome.lost.values())
    assert replay(trace, SHIPPED, UNLIMITED, block_slots=trace.distinct_blocks // 4).resumed_tokens < shipped
