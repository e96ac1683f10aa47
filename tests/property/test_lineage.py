"""What each kept state saves, against a brute-force search; and who goes first, against a plain list."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucmcache.coordinator.hit import Prompt
from ucmcache.coordinator.lineage import Lineage
from ucmcache.coordinator.retention import Retention, Trigger
from ucmcache.store.eviction import GreedyDual

GRID = 16
# A path is a string over two letters, one per grid block: many share beginnings.
PATHS = st.text("ab", min_size=1, max_size=7)


def prompt_of(path: str) -> Prompt:
    hashes = [path[: i + 1].encode() for i in range(len(path))]
    return Prompt(len(path) * GRID + 1, hashes, GRID)


@dataclass
class Model:
    """The kept states as a plain dict, path -> trigger."""

    kept: dict[str, Trigger]

    def anchors(self) -> dict[str, str]:
        """Each state's deepest kept state before it that is no guess."""
        sure = [one for one, trigger in self.kept.items() if not trigger.is_guess]
        return {
            path: max((one for one in sure if path.startswith(one) and one != path), key=len, default="")
            for path in self.kept
        }

    def paths(self) -> Counter[bytes]:
        """On how many states' own paths each prefix is."""
        ends = (path[:end] for path, anchor in self.anchors().items() for end in range(len(anchor) + 1, len(path) + 1))
        return Counter(end.encode() for end in ends)

    def worth(self, path: str) -> float:
        behind = len(self.anchors()[path])
        weight = {Trigger.INTERVAL: 0.02, Trigger.JUNCTION: 2.0}.get(self.kept[path], 1.0)
        return float(((len(path) - behind) * GRID) ** 0.75 * weight)


ACTIONS = st.one_of(
    st.tuples(st.just("add"), PATHS, st.sampled_from(Trigger)),
    st.tuples(st.just("remove"), PATHS, st.none()),
    st.tuples(st.just("demote"), PATHS, st.none()),
)


@settings(max_examples=1500, deadline=None)
@given(st.lists(ACTIONS, max_size=30))
def test_worths_are_true_whoever_comes_and_goes(actions: list[tuple[str, str, Trigger | None]]) -> None:
    paths: Counter[bytes] = Counter()  # prefix -> how many states' own paths it is on

    def on_path(prefixes: Sequence[bytes], more: int) -> None:
        paths.update(dict.fromkeys(prefixes, more))
        assert min(paths.values(), default=0) >= 0

    lineage, model = Lineage(GRID, on_path), Model({})
    told: dict[bytes, float] = {}
    for action, path, trigger in actions:
        if action == "add" and trigger is not None:
            # What is known to be wanted stays so.
            if path not in model.kept or model.kept[path].is_guess:
                model.kept[path] = trigger
            changed = lineage.add(prompt_of(path), len(path) * GRID, trigger)
        elif action == "remove":
            model.kept.pop(path, None)
            changed = lineage.remove(path.encode())
            told.pop(path.encode(), None)
        else:
            if path in model.kept:
                model.kept[path] = Trigger.INTERVAL
            changed = lineage.demote(path.encode())
        told |= changed
        # Who listens to the changes alone knows every worth.
        assert told == {one.encode(): pytest.approx(model.worth(one)) for one in model.kept}
        assert len(lineage) == len(model.kept)
        assert +paths == model.paths()
        for one in model.kept:
            assert lineage.is_leaf(one.encode()) == (one not in model.anchors().values())


def test_a_first_read_is_told_once() -> None:
    lineage = Lineage(GRID, lambda prefixes, more: None)
    lineage.add(prompt_of("aab"), 3 * GRID, Trigger.JUNCTION)
    assert lineage.read(b"aab") == (Trigger.JUNCTION, True)
    assert lineage.read(b"aab") == (Trigger.JUNCTION, False)
    assert lineage.read(b"aa") is None
    lineage.clear()
    assert (lineage.read(b"aab"), len(lineage)) == (None, 0)


SLOTS = 6
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "touch", "remove", "revalue", "victims"]),
        st.integers(0, SLOTS - 1),
        st.integers(0, 40),
        st.sets(st.integers(0, SLOTS - 1)),
    ),
    max_size=60,
)


@settings(max_examples=1500, deadline=None)
@given(STEPS)
def test_greedy_dual_gives_up_the_lowest(steps: list[tuple[str, int, int, set[int]]]) -> None:
    policy = GreedyDual(SLOTS)
    level = 0.0
    held: dict[int, list[float]] = {}  # slot -> worth, uses, base
    for action, slot, number, pinned in steps:
        if action == "add" and slot not in held:
            policy.add(slot)
            held[slot] = [0.0, 0, level]
        elif action == "touch":
            policy.touch(slot)
            if slot in held:
                worth, uses, _ = held[slot]
                held[slot] = [worth, min(uses + 1, 8), level]
        elif action == "revalue":
            policy.revalue(slot, float(number))
            if slot in held and held[slot][0] != number:
                held[slot] = [float(number), *held[slot][1:]]
        elif action == "remove" and slot in held:
            policy.remove(slot)
            del held[slot]
        elif action == "victims":
            count = number % 4

            def rank(one: int) -> float:
                worth, uses, base = held[one]
                return base + worth * (1 + uses)

            free = {one for one in held if one not in pinned}
            got = policy.victims(count, lambda one, pinned=pinned: one not in pinned)  # type: ignore[misc]
            for one in pinned:  # in use for this time only
                policy.idle(one)
            assert [rank(one) for one in got or ()] == sorted(map(rank, free))[:count]
            assert set(got or ()) <= free
            if got:
                level = max(level, rank(got[-1]))
            for one in got or ():
                policy.remove(one)
                del held[one]


@pytest.mark.parametrize(
    ("position", "prompt", "junction", "last", "expected"),
    [
        (64, 64, 0, 0, Trigger.PROMPT_END),  # what a longer prompt resumes from
        (48, 64, 0, 0, Trigger.PROMPT_END),  # what the same prompt resumes from
        (48, 65, 0, 32, None),
        (64, 70, 64, 0, Trigger.JUNCTION),
        (80, 64, 0, 64, Trigger.OUTPUT_END),
        (32, 200, 0, 0, Trigger.INTERVAL),
        (48, 200, 0, 32, None),
        (64, 200, 0, 32, Trigger.INTERVAL),
        (80, 200, 0, 48, Trigger.INTERVAL),  # not at the multiple itself, if that was no end of a step
    ],
)
def test_triggers(position: int, prompt: int, junction: int, last: int, expected: Trigger | None) -> None:
    assert Retention(32, GRID).trigger(position, prompt, junction, last) is expected


def test_without_an_interval_every_state_is_kept() -> None:
    assert Retention(None, GRID).trigger(48, 200, 0, 48) is Trigger.INTERVAL
