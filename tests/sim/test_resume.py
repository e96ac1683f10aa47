"""Resumes on the simulated engine: positions, legs, restarts. Every byte that a forward reads is checked there."""

from __future__ import annotations

import random
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import lcm
from pathlib import Path
from typing import Any

import pytest

from tests.sim.engine import VOCAB, Group, SimEngine, WrongBytesError
from ucmcache.errors import ConfigError
from ucmcache.store.arena import Presence

HOST = {"host": {"blocks": "4MiB", "snapshots": "4MiB"}}
MIXES: dict[str, list[Group]] = {
    "full": [Group("full", 8)],
    "window": [Group("window", 8, 20), Group("full", 8)],
    "window wider than a block, two sizes": [Group("full", 16), Group("window", 8, 3)],
    "chunk": [Group("full", 8), Group("chunk", 8, 24)],
    "state": [Group("full", 8), Group("state", 8)],
    "three states": [Group("full", 16), Group("state", 16), Group("state", 16), Group("state", 16)],
    "latent": [Group("latent", 8)],
    "latent and state": [Group("latent", 16), Group("state", 16)],
    "latent beside full": [Group("full", 8), Group("latent", 8), Group("latent", 16)],
    "all": [Group("full", 8), Group("window", 8, 12), Group("state", 8), Group("latent", 8)],
}
# vLLM stops a prefill's chunks at multiples of the smallest block, so it does not make every state that such a model
# could resume from.
UNEVEN = [Group("full", 8), Group("window", 8, 12), Group("state", 16)]

Start = Callable[..., SimEngine]


@pytest.fixture
def start(hybrid: Path, plain: Path) -> Iterator[Start]:
    """Starts engines, and closes them at the end."""
    engines: list[SimEngine] = []

    def start_one(groups: Sequence[Group], extra: Mapping[str, Any] = HOST, **options: Any) -> SimEngine:
        model = hybrid if any(group.kind == "state" for group in groups) else plain
        engines.append(SimEngine(groups, model, extra, **options))
        return engines[-1]

    yield start_one
    for engine in engines:
        engine.close()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed * 1_000_003 + length)
    return [rng.randrange(VOCAB) for _ in range(length)]


def disk(path: Path) -> dict[str, Any]:
    return {**HOST, "backend": {"url": path.as_uri()}}


@pytest.mark.parametrize("order", ["v1", "v2"])
@pytest.mark.parametrize("mix", list(MIXES))
def test_three_legs_at_every_edge(start: Start, mix: str, order: str) -> None:
    groups = MIXES[mix]
    grid = lcm(*(group.block_tokens for group in groups))
    engine = start(groups, order=order)
    for length in (1, grid - 1, grid, grid + 1, 2 * grid - 1, 2 * grid, 2 * grid + 1, 11 * grid + 3):
        prompt = prompt_of(length)
        expected = SimEngine.expected(prompt, 5)
        assert engine.generate(f"cold {length}", prompt, 5) == expected
        before = dict(engine.counts)
        assert engine.reset_local()
        assert engine.generate(f"external {length}", prompt, 5) == expected
        resumed = engine.counts.get("adopted_tokens", 0) - before.get("adopted_tokens", 0)
        assert resumed == (length - 1) // grid * grid
        assert (engine.counts.get("loaded_bytes", 0) > before.get("loaded_bytes", 0)) == (resumed > 0)
        assert engine.generate(f"local {length}", prompt, 5) == expected
        assert engine.counts.get("adopted_tokens", 0) - before.get("adopted_tokens", 0) == resumed
    assert_at_rest(engine)


def assert_at_rest(engine: SimEngine) -> None:
    """Nothing is in flight, pinned or leaked."""
    engine.run()
    side = engine.side
    if side._sessions is not None:
        assert side._sessions.registry.held.size.blocks <= side._config.host.blocks_bytes // 2
        side._sessions.registry.reset()
        assert side._sessions.registry.held.size.total == 0 and not side._sessions.checkpoints._holders
        engine.run()
    assert side.jobs_in_flight == 0
    assert engine.tokens_accounted_for()
    assert side.coordinator.blocks.pinned_slots == side.coordinator.states.pinned_slots == 0
    # No request is left, so what is needed is needed by kept states alone.
    coordinator = side.coordinator
    paths = sum(coordinator.joint.lineage.steps(prefix) for prefix in coordinator.joint.lineage)
    for group in coordinator.joint.whole:
        assert sum(coordinator.blocks._needs[group].values()) == paths
    assert engine.reset_local()
    assert engine.free_blocks() == engine.kv_cache_config.num_blocks - 1


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("mix", list(MIXES))
def test_a_restart_resumes_from_disk(start: Start, tmp_path: Path, mix: str, ranks: int) -> None:
    groups = MIXES[mix]
    grid = lcm(*(group.block_tokens for group in groups))
    prompt = prompt_of(9 * grid + 5)
    first = start(groups, disk(tmp_path), ranks=ranks)
    assert first.generate("cold", prompt) == SimEngine.expected(prompt, 4)
    first.run()
    first.close()
    second = start(groups, disk(tmp_path), ranks=ranks)
    assert second.generate("after restart", prompt) == SimEngine.expected(prompt, 4)
    assert second.counts["adopted_tokens"] == 9 * grid
    assert second.counts["read_bytes"] > 0
    assert_at_rest(second)


def test_uneven_blocks_resume_where_the_engine_made_a_state(start: Start) -> None:
    engine = start(UNEVEN, max_step_tokens=32)
    for length in (40, 47, 65, 100):
        prompt = prompt_of(length)
        before = engine.counts.get("adopted_tokens", 0)
        engine.generate(f"cold {length}", prompt)
        engine.reset_local()
        assert engine.generate(f"external {length}", prompt) == SimEngine.expected(prompt, 4)
        assert engine.counts["adopted_tokens"] - before >= length // 32 * 32
        engine.reset_local()


def test_the_next_turn_resumes_past_the_first_prompt(start: Start) -> None:
    engine = start(MIXES["state"])
    prompt = prompt_of(20)
    answer = engine.generate("turn 1", prompt, 30)
    turn_2 = [*prompt, *answer, *prompt_of(6, seed=2)]
    assert engine.reset_local()
    assert engine.generate("turn 2", turn_2) == SimEngine.expected(turn_2, 4)
    # 20 + 30 tokens, of which the last was sampled but never computed: 49 // 8 * 8.
    assert engine.counts["adopted_tokens"] == 48


@pytest.mark.parametrize(("prompt", "sampled", "blocks"), [(6, 2, 1), (6, 3, 2), (8, 1, 2), (4, 1, 1), (3, 1, 0)])
def test_a_sampled_token_that_was_never_computed_is_not_stored(
    start: Start, prompt: int, sampled: int, blocks: int
) -> None:
    """Field case A1: a generation that ends on a block boundary must not store the slot that no forward wrote."""
    engine = start([Group("full", 4), Group("state", 4)])
    engine.generate("one", prompt_of(prompt), sampled)
    assert engine.counts.get("saved_blocks", 0) == blocks
    assert engine.counts.get("saved_states", 0) == blocks


def test_shared_prefix_with_different_suffixes(start: Start) -> None:
    engine = start(MIXES["all"])
    shared = prompt_of(80)
    for i in range(4):
        prompt = [*shared, *prompt_of(21, seed=i)]
        assert engine.generate(f"r{i}", prompt) == SimEngine.expected(prompt, 4)
        engine.reset_local()
    assert engine.counts["adopted_tokens"] >= 3 * 64


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("mix", ["state", "three states", "all"])
def test_the_second_way_past_a_junction_leaves_a_state_there(
    start: Start, tmp_path: Path, mix: str, restarted: bool
) -> None:
    """Only our store knows the shared prefix; the first request to part from it makes the engine leave a state."""
    sparse = {**disk(tmp_path), "retention": {"interval_tokens": 8192}}
    engine = start(MIXES[mix], sparse, max_step_tokens=512)
    shared, junction = prompt_of(90), 90 // (grid := lcm(*(group.block_tokens for group in MIXES[mix]))) * grid
    resumed = []
    for i in range(4):
        prompt = [*shared, *prompt_of(47, seed=i)]
        before = engine.counts.get("adopted_tokens", 0)
        assert engine.generate(f"r{i}", prompt) == SimEngine.expected(prompt, 4)
        resumed.append(engine.counts.get("adopted_tokens", 0) - before)
        assert_at_rest(engine)
        if restarted and i < 3:
            engine.close()
            engine = start(MIXES[mix], sparse, max_step_tokens=512)
    assert resumed == [0, 0, junction, junction]
    if not restarted:
        assert engine.counts["lost_tokens/not_offered"] == junction
        # The prompts' ends, the junction, and no state without a reason.
        assert engine.counts["state_saves/junction"] == 1
        assert engine.counts["state_saves/prompt_end"] == 4
        assert "state_saves/interval" not in engine.counts
        assert engine.counts["state_first_reads/junction"] == 1
        assert engine.counts["state_saved_tokens/junction"] == 2 * junction


def test_no_hit_across_salts(start: Start) -> None:
    engine = start(MIXES["all"])
    prompt = prompt_of(100)
    for salt, hits in (("a", False), ("b", False), (None, False), ("a", True), (None, True)):
        before = engine.counts.get("adopted_tokens", 0)
        engine.add(f"salt {salt} {hits}", prompt, cache_salt=salt)
        engine.run()
        assert (engine.counts.get("adopted_tokens", 0) > before) == hits
        engine.reset_local()


def test_aborts_in_every_state_leave_nothing_behind(start: Start, tmp_path: Path) -> None:
    engine = start(MIXES["all"], disk(tmp_path), max_step_tokens=32)
    prompt = prompt_of(100)
    for steps in range(12):
        for again in range(2):
            name = f"abort after {steps}, {again}"
            engine.add(name, prompt, 6)
            for _ in range(steps):
                engine.step()
            if name in engine.requests:
                engine.abort(name)
            engine.run()
            engine.reset_local()
    assert_at_rest(engine)
    assert engine.generate("after", prompt) == SimEngine.expected(prompt, 4)


def test_preemption_under_a_small_kv_space(start: Start) -> None:
    engine = start(MIXES["state"], num_blocks=30, max_step_tokens=48)
    prompts = [prompt_of(40 + 7 * i, seed=i) for i in range(6)]
    for i, prompt in enumerate(prompts):
        engine.add(f"r{i}", prompt, 24)
    engine.run()
    for i, prompt in enumerate(prompts):
        assert engine.outputs[f"r{i}"] == SimEngine.expected(prompt, 24)
    assert engine.preemptions > 0
    assert_at_rest(engine)


def test_a_small_host_budget_evicts_and_stays_right(start: Start, tmp_path: Path) -> None:
    tiny = {"host": {"blocks": 12 * 512 * 2, "snapshots": 4096}, "backend": {"url": tmp_path.as_uri()}}
    engine = start(MIXES["state"], tiny)
    prompts = [prompt_of(60, seed=i) for i in range(5)]
    for i in range(25):
        prompt = prompts[i * 3 % 5]
        assert engine.generate(f"r{i}", prompt) == SimEngine.expected(prompt, 4)
        engine.reset_local()
    assert engine.counts["evicted_units"] > 0
    assert engine.counts["adopted_tokens"] > 0
    assert_at_rest(engine)


@pytest.mark.parametrize("mix", ["state", "all", "latent and state"])
def test_full_host_memory_strands_no_state(start: Start, mix: str) -> None:
    """Blocks and states compete for little room, in steps of several requests: whatever is kept can be resumed from."""
    extra = {"host": {"blocks": 60_000, "snapshots": 5_000}, "retention": {"interval_tokens": None}}
    engine = start(MIXES[mix], extra, num_blocks=400, max_step_tokens=48, max_seqs=4)
    rng = random.Random(11)
    texts = [prompt_of(160, seed) for seed in range(6)]
    for i in range(60):
        text = rng.choice(texts)
        engine.add(f"r{i}", [*text[: rng.randrange(8, 161)], *prompt_of(rng.randrange(1, 40), i)], 3)
        for _ in range(rng.randrange(4)):
            engine.step()
        if i % 10 == 9:
            assert_at_rest(engine)
            assert_nothing_stranded(engine)
    assert engine.counts["evicted_units"] > 100
    assert engine.counts["adopted_tokens"] > 0


def assert_nothing_stranded(engine: SimEngine) -> None:
    """Every kept state has all blocks before it."""
    coordinator = engine.side.coordinator
    for prefix in coordinator.joint.lineage:
        at = prefix
        while at:
            state = coordinator.joint.lineage._states[at]
            for group in coordinator.joint.whole:
                assert (coordinator.blocks.presence(group, state.path) == Presence.READY).all(), (prefix, at)
            at = state.anchor
        for group, prefixes in coordinator.joint.windows_of.get(prefix, ()):
            assert (coordinator.blocks.presence(group, prefixes) == Presence.READY).all()


def test_a_synchronous_load_of_a_state_is_wrong(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why loads are asynchronous (docs/adr/0002): a synchronous one comes after the engine copied the state onward."""
    engine = start(MIXES["state"])
    prompt = prompt_of(50)
    engine.generate("cold", prompt)
    engine.reset_local()
    connector = engine.scheduler.connector
    lookup = connector.get_num_new_matched_tokens
    monkeypatch.setattr(connector, "get_num_new_matched_tokens", lambda *args: (lookup(*args)[0], False))
    with pytest.raises(WrongBytesError, match="state at 48"):
        engine.generate("synchronous", prompt)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_every_layout(start: Start, layout: str) -> None:
    engine = start(MIXES["all"], layout=layout)
    prompt = prompt_of(100)
    assert engine.generate("cold", prompt) == SimEngine.expected(prompt, 4)
    engine.reset_local()
    assert engine.generate("external", prompt) == SimEngine.expected(prompt, 4)
    assert engine.counts["adopted_tokens"] == 96


def test_without_chunked_prefill_all_but_the_last_token_or_nothing(start: Start) -> None:
    engine = start([Group("full", 8)], chunked_prefill=False, max_step_tokens=4096)
    for length in range(1, 50):
        prompt = prompt_of(length)
        engine.generate(f"cold {length}", prompt)
        engine.reset_local()
        before = engine.counts.get("promised_tokens", 0)
        assert engine.generate(f"warm {length}", prompt) == SimEngine.expected(prompt, 4)
        promised = engine.counts.get("promised_tokens", 0) - before
        assert promised == (length - 1 if length > 8 and length % 8 == 1 else 0)
        engine.reset_local()


def test_a_reset_engine_goes_on_under_an_identity_of_its_own(start: Start, tmp_path: Path) -> None:
    """Weights may have changed in place, which nothing else tells: nothing crosses a reset in either direction."""
    engine = start(MIXES["all"], disk(tmp_path))
    before, after = prompt_of(100), prompt_of(100, seed=1)
    engine.generate("before", before)
    engine.run()
    files = {path: path.read_bytes() for path in tmp_path.rglob("*.kv")}
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert engine.generate("the same after", before) == SimEngine.expected(before, 4)
    assert "adopted_tokens" not in engine.counts
    engine.generate("after", after)
    engine.run()
    engine.reset_local()
    engine.generate("after, again", after)
    assert engine.counts["adopted_tokens"] == 96  # it still serves itself
    assert_at_rest(engine)
    engine.close()
    assert {path: path.read_bytes() for path in files} == files  # and harms nobody else
    other = start(MIXES["all"], disk(tmp_path))
    other.generate("after, elsewhere", after)
    assert "adopted_tokens" not in other.counts
    other.generate("before, elsewhere", before)
    assert other.counts["adopted_tokens"] == 96


@pytest.mark.parametrize("steps", range(9))
def test_what_was_computed_before_a_reset_is_not_kept_after_it(start: Start, tmp_path: Path, steps: int) -> None:
    """A reset while a request waits, loads, prefills or decodes: nothing that it goes on to compute is kept."""
    engine = start(MIXES["all"], disk(tmp_path), max_step_tokens=32)
    prompt = prompt_of(100)
    engine.generate("known", prompt)
    engine.reset_local()
    engine.add("running", [*prompt[:70], *prompt_of(60, seed=3)], 12)
    for _ in range(steps):
        engine.step()
    started = engine.requests["running"].num_computed_tokens > 0
    engine.scheduler.reset_prefix_cache(reset_connector=True)
    saved = engine.counts.get("saved_blocks", 0)
    engine.run()
    if started:
        assert engine.counts.get("saved_blocks", 0) == saved
        assert engine.side.coordinator.blocks.free_slots == sum(
            arena.plan.slots for arena in engine.side.coordinator.blocks.arenas
        )
    assert_at_rest(engine)


def test_decode_states_are_kept_under_asynchronous_scheduling(start: Start) -> None:
    """There a step is planned before its last token is known, so the state's name comes a step after the state."""
    for asynchronous in (False, True):
        engine = start(MIXES["state"], asynchronous=asynchronous)
        prompt = prompt_of(20)
        answer = engine.generate("turn 1", prompt, 30)
        assert answer == SimEngine.expected(prompt, 30)
        turn_2 = [*prompt, *answer, *prompt_of(6, seed=2)]
        assert engine.reset_local()
        assert engine.generate("turn 2", turn_2) == SimEngine.expected(turn_2, 4)
        assert engine.counts["adopted_tokens"] == 48
        assert_at_rest(engine)


def test_a_step_without_its_end_costs_only_its_saves(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some pipeline stages never call wait_for_save under speculative decoding: their saves fail, nothing leaks."""
    engine = start(UNEVEN, ranks=2)
    monkeypatch.setattr(engine.ranks[0].connector, "wait_for_save", lambda: None)
    prompt = prompt_of(100)
    for name in ("one", "two"):
        assert engine.generate(name, prompt) == SimEngine.expected(prompt, 4)
        engine.reset_local()
    engine.generate("another", prompt_of(5))  # the step in which the last one's saves are found not to have begun
    assert "saved_blocks" not in engine.counts
    assert_at_rest(engine)


def test_host_memory_that_cannot_be_had_is_refused_at_start(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise MemoryError("nothing left to pin")

    monkeypatch.setattr("ucmcache.connector.worker.take_memory", fail)
    with pytest.raises(ConfigError, match=r"nothing left to pin.*lower host\.blocks or host\.snapshots"):
        start(MIXES["all"])


def test_a_failed_set_up_is_no_cache(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("no streams")

    monkeypatch.setattr("ucmcache.connector.worker.HostTransfer", fail)
    engine = start(MIXES["all"])
    prompt = prompt_of(100)
    for name in ("one", "two"):
        assert engine.generate(name, prompt) == SimEngine.expected(prompt, 4)
        engine.reset_local()
    assert engine.counts["failures/setup:RuntimeError"] == 1
    assert "adopted_tokens" not in engine.counts
    assert_at_rest(engine)


def test_a_closed_engine_gives_its_memory_back(start: Start) -> None:
    def resident_bytes() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize()

    before = resident_bytes()
    engine = start(MIXES["state"], {"host": {"blocks": "192MiB", "snapshots": "64MiB"}})
    opened = resident_bytes()
    assert opened - before > 200 << 20  # taken whole, before anything is kept
    engine.close()
    assert opened - resident_bytes() > 200 << 20
