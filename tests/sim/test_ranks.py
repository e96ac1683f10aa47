"""Rank rules on the simulated engine: what ranks hold alike is kept once, and any rank can do another's work."""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.sim.engine import Group, SimEngine
from tests.sim.test_resume import Start, assert_at_rest, disk, prompt_of, start
from ucmcache.store.backend import Bucket
from ucmcache.store.testing import FlakyBackend

__all__ = ["start"]

LATENT, SHARDED = [Group("latent", 8)], [Group("full", 8)]
BLOCKS = 12
PROMPT = prompt_of(8 * BLOCKS + 3)


def served(engine: SimEngine, name: str = "external", prompt: Sequence[int] = PROMPT) -> int:
    """Tokens adopted by one more request for the prompt, with the engine's own cache empty."""
    before = engine.counts.get("adopted_tokens", 0)
    assert engine.reset_local()
    assert engine.generate(name, prompt) == SimEngine.expected(prompt, 4)
    return engine.counts.get("adopted_tokens", 0) - before


@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 1), (4, 1), (4, 2)])
def test_what_ranks_hold_alike_is_kept_once_for_each_stage(
    start: Start, tmp_path: Path, ranks: int, stages: int
) -> None:
    engine = start(LATENT, disk(tmp_path), ranks=ranks, stages=stages)
    engine.generate("cold", PROMPT)
    engine.run()
    unit_bytes = engine.ranks[0].connector._worker.facts.groups[0].unit_bytes
    assert engine.counts["saved_bytes"] == BLOCKS * unit_bytes * stages
    files = Counter(file.parents[1].name for file in tmp_path.rglob("*.kv"))
    assert files == {f"r{stage * ranks // stages}": BLOCKS for stage in range(stages)}
    assert served(engine) == 8 * BLOCKS
    assert_at_rest(engine)


def test_heads_that_ranks_share_are_kept_once_for_each_share(start: Start, tmp_path: Path) -> None:
    """Two KV heads over four ranks, and states that all ranks have: the engine says so, and no row has to."""
    groups = [Group("full", 8, shards=2), Group("state", 8, shards=1), Group("full", 8)]
    engine = start(groups, {**disk(tmp_path), "retention": {"interval_tokens": None}}, ranks=4)
    engine.generate("cold", PROMPT)
    engine.run()
    files = Counter(file.parents[1].name for file in tmp_path.rglob("*.kv"))
    states = engine.counts["saved_states"]
    assert files == {"r0": 2 * BLOCKS + states, "r1": BLOCKS, "r2": 2 * BLOCKS, "r3": BLOCKS}
    assert served(engine) == 8 * BLOCKS
    assert_at_rest(engine)
    engine.close()
    assert served(start(groups, disk(tmp_path), ranks=4), "after restart") == 8 * BLOCKS


def test_a_group_with_one_layer_that_differs_is_a_piece_of_each_rank(start: Start, tmp_path: Path) -> None:
    """Where layers of a group differ, vLLM gives the scheduler the first one's spec: it must not go by that."""
    groups = [Group("mixed", 8), Group("latent", 8)]
    engine = start(groups, disk(tmp_path), ranks=2)
    engine.generate("cold", PROMPT)
    engine.run()
    files = Counter(file.parents[1].name for file in tmp_path.rglob("*.kv"))
    assert files == {"r0": 2 * BLOCKS, "r1": BLOCKS}
    assert served(engine) == 8 * BLOCKS
    assert_at_rest(engine)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_same_memory_keeps_more_of_it(start: Start, ranks: int) -> None:
    def slots(groups: Sequence[Group]) -> int:
        return int(start(groups, ranks=ranks).side.coordinator.blocks.arenas[0].plan.slots)

    assert slots(SHARDED) * ranks <= slots(LATENT) < (slots(SHARDED) + 1) * ranks


def test_ranks_write_in_rotation(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: Counter[int] = Counter()
    engine = start(LATENT, disk(tmp_path), ranks=4)
    for rank, worker in enumerate(engine.ranks):
        result = worker.connector._worker._result

        def count(job: int, phase: Any, cause: str = "", *, rank: int = rank, result: Any = result) -> None:
            copied[rank] += phase.value == "copied"
            result(job, phase, cause)

        monkeypatch.setattr(worker.connector._worker, "_result", count)
    engine.generate("cold", PROMPT)
    assert copied == dict.fromkeys(range(4), BLOCKS // 4)


@pytest.mark.parametrize("broken", [(0,), (1, 3), (0, 1, 2)])
@pytest.mark.parametrize("what", ["copy", "write"])
def test_a_rank_that_fails_is_stood_in_for(
    start: Start, tmp_path: Path, broken: tuple[int, ...], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(LATENT, disk(tmp_path), ranks=4)
    break_ranks(engine, broken, what, monkeypatch)
    engine.generate("cold", PROMPT)
    engine.run()
    assert engine.counts["taken_over_units"] > 0
    assert served(engine) == 8 * BLOCKS
    assert len(list(tmp_path.rglob("*.kv"))) == BLOCKS
    assert_at_rest(engine)
    engine.close()
    restarted = start(LATENT, disk(tmp_path), ranks=4)
    assert served(restarted, "after restart") == 8 * BLOCKS
    assert restarted.counts["read_bytes"] > 0


@pytest.mark.parametrize("what", ["copy", "write"])
def test_nobody_stands_in_for_a_piece_of_its_own(
    start: Start, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(SHARDED, disk(tmp_path), ranks=4)
    break_ranks(engine, (2,), what, monkeypatch)
    engine.generate("cold", PROMPT)
    engine.run()
    assert "taken_over_units" not in engine.counts
    assert served(engine) == (0 if what == "copy" else 8 * BLOCKS)  # from host memory, where all have theirs
    assert_at_rest(engine)
    engine.close()
    assert served(start(SHARDED, disk(tmp_path), ranks=4), "after restart") == 0


def test_all_ranks_failing_is_a_miss(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(LATENT, disk(tmp_path), ranks=4)
    break_ranks(engine, range(4), "copy", monkeypatch)
    engine.generate("cold", PROMPT)
    engine.run()
    assert engine.counts["taken_over_units"] == 3 * BLOCKS
    assert served(engine) == 0
    assert_at_rest(engine)


def break_ranks(engine: SimEngine, broken: Sequence[int], what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every copy out, or every write, of some ranks fail."""
    for rank in broken:
        side = engine.ranks[rank].connector._worker
        if what == "write":
            side._backend = FlakyBackend(side._backend, lambda operation: operation == "put")
            continue
        make = side._make_arenas

        def made(setup: Any, *, make: Callable[[Any], None] = make, side: Any = side) -> None:
            make(setup)

            def fail(copies: Any) -> None:
                raise RuntimeError("the copy engine is gone")

            monkeypatch.setattr(side._transfer, "save", fail, raising=True)

        monkeypatch.setattr(side, "_make_arenas", made)


def test_ranks_out_of_reach_keep_a_copy_each(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def far_away(handle: Any) -> None:
        raise OSError(errno.EHOSTUNREACH, "the memory belongs to a process of another machine")

    monkeypatch.setattr("ucmcache.connector.assembly.map_shared", far_away)
    engine = start(LATENT, disk(tmp_path), ranks=2)
    assert "so each keeps its own" in caplog.text
    engine.generate("cold", PROMPT)
    assert served(engine) == 8 * BLOCKS
    engine.run()
    assert Counter(file.parents[1].name for file in tmp_path.rglob("*.kv")) == {"r0": BLOCKS, "r1": BLOCKS}
    assert_at_rest(engine)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_nobody_stands_in_after_a_reset(
    start: Start, tmp_path: Path, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was computed before a reset must not be written under the identity that follows it."""
    engine = start(LATENT, disk(tmp_path), ranks=2)
    break_ranks(engine, (0,), "write", monkeypatch)
    engine.add("before", PROMPT)
    while not engine.requests["before"].num_computed_tokens:
        engine.step()
    for _ in range(steps - 1):
        engine.step()
    old = engine.side._setup.namespace.hex()
    engine.side.reset()
    engine.run()
    assert {file.parents[2].name for file in tmp_path.rglob("*.kv")} <= {f"ns-{old}"}
    assert_at_rest(engine)


@pytest.mark.parametrize(
    ("groups", "share"), [(SHARDED, 0.9**4), (LATENT, 1 - 0.1**4)], ids=["all needed", "any serves"]
)
def test_worked_example_b(
    start: Start, tmp_path: Path, groups: list[Group], share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S1 4.5: of four ranks each fails a tenth of its dumps; 65.6 % of the blocks are there after all, or 99.99 %."""
    monkeypatch.setattr("ucmcache.connector.worker.WRITE_BACKOFF_S", ())
    draw = random.Random(65)
    engine = start(groups, disk(tmp_path), ranks=4, max_step_tokens=512, num_blocks=500)
    failed: dict[tuple[int, bytes], bool] = {}

    class Dump:
        """A rank's bucket that fails a tenth of what it is given, always the same tenth."""

        def __init__(self, bucket: Bucket, rank: int) -> None:
            self._bucket, self._rank = bucket, rank

        def put(self, id: bytes, parts: Sequence[Any]) -> int:
            if failed.setdefault((self._rank, id), draw.random() < 0.1):
                raise OSError(errno.EIO, "the dump failed")
            return self._bucket.put(id, parts)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._bucket, name)

    for rank, worker in enumerate(engine.ranks):
        side = worker.connector._worker
        find = side._record

        def dump(key: Any, setup: Any, *, find: Any = find, rank: int = rank) -> Any:
            bucket, name = find(key, setup)
            return Dump(bucket, rank), name

        side._record = dump
    number, blocks = 40, 50
    for i in range(number):
        engine.generate(f"r{i}", prompt_of(8 * blocks + 1, seed=i), 1)
    engine.run()
    engine.close()
    # What a restarted engine finds is what its completion path called stored.
    restarted = start(groups, disk(tmp_path), ranks=4)
    restarted.read_index()
    stored = len(restarted.side.coordinator.blocks._stored)
    assert stored / (number * blocks) == pytest.approx(share, abs=0.03 if share < 0.9 else 0.001)
