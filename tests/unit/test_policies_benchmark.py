"""What benchmarks/policies.py adds to the replay: stack distances, the offline ceiling, regret, and its command."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import policies
from replay.baselines import Belady, Lru
from replay.run import END, SHIPPED, UNLIMITED, Keep, Outcome, replay
from replay.traces import Trace, generate
from replay.working_set import Stack, working_set


@given(st.lists(st.integers(0, 6), max_size=40))
def test_a_stack_distance_is_the_number_of_names_since(uses: list[int]) -> None:
    stack = Stack(len(uses))
    for now, name in enumerate(uses):
        if name in uses[:now]:
            last = max(i for i in range(now) if uses[i] == name)
            assert stack.distance(bytes([name])) == len(set(uses[last:now]))
        stack.use(bytes([name]))


@pytest.fixture(scope="module")
def trace() -> Trace:
    return generate(600, seed=5)


def _reads(outcome: Outcome) -> dict[bytes, list[int]]:
    reads: dict[bytes, list[int]] = {}
    for number, event in enumerate(outcome.events):
        reads.setdefault(event.read, []).append(number)
    return reads


@pytest.mark.parametrize("keep", [END, SHIPPED], ids=lambda keep: keep.name)
def test_who_knows_the_future_resumes_more(trace: Trace, keep: Keep) -> None:
    whole = replay(trace, keep, UNLIMITED)
    offline = replay(trace, keep, 60, partial(Belady, reads=_reads(whole)))
    assert replay(trace, keep, 60, Lru).resumed_tokens < offline.resumed_tokens <= whole.resumed_tokens


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.sets(st.integers(0, 5)), st.integers(1, 3))
def test_belady_gives_up_what_it_may_or_nothing(reads: list[int], pinned: set[int], count: int) -> None:
    future = {bytes([name]): [i for i, read in enumerate(reads) if read == name] for name in set(reads)}
    policy = Belady(6, future)
    assert policy.victims(count, lambda slot: True) is None
    for slot in range(6):
        policy.name_of[slot] = bytes([slot])
        policy.add(slot)
    policy.now = len(reads) // 2
    victims = policy.victims(count, lambda slot: slot not in pinned)
    free = set(range(6)) - pinned
    if len(free) < count:
        assert victims is None
        return

    def next_read(slot: int) -> int:
        return next((i for i in future.get(bytes([slot]), ()) if i > policy.now), len(reads))

    assert victims is not None
    assert len(set(victims)) == count
    assert min(map(next_read, victims)) >= max((next_read(slot) for slot in free - set(victims)), default=0)


def test_with_all_room_the_working_set_is_what_was_resumed(trace: Trace) -> None:
    whole = replay(trace, SHIPPED, UNLIMITED)
    grid = working_set(trace, whole.events, [50, 500, UNLIMITED], [20, 200, UNLIMITED])
    assert grid[-1][-1] == pytest.approx(whole.hit)
    for line in (*grid, *zip(*grid, strict=True)):  # more room of either kind never resumes less
        assert list(line) == sorted(line)


def test_what_is_regretted_was_evicted_and_its_tokens_are_among_the_lost(trace: Trace) -> None:
    tight = replay(trace, SHIPPED, 60)
    assert 0 < tight.regretted.total() <= tight.evicted.total() <= tight.written.total()
    assert all(tight.regretted[trigger] <= tight.evicted[trigger] for trigger in tight.evicted)
    assert 0 < tight.regretted_tokens <= tight.chain_tokens - tight.resumed_tokens
    whole = replay(trace, SHIPPED, UNLIMITED)
    assert not whole.evicted
    assert not whole.regretted


def test_the_report_names_no_folder_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/x/policies.py", "--traces", "/x/traces", "--json", "out/a.json", "--quick"])
    assert policies._command() == "python benchmarks/policies.py --traces traces --json out/a.json --quick"
    monkeypatch.setattr(sys, "argv", ["/x/policies.py", "--traces=/x/traces"])
    assert "/x" not in policies._command()
