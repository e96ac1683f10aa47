"""Sessions on the simulated engine: conversations resume at the very token; every byte that is read is checked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import lcm
from pathlib import Path
from typing import Any

import pytest

from tests.sim.engine import VOCAB, Group, SimEngine
from tests.sim.test_resume import HOST, MIXES, UNEVEN, prompt_of
from ucmcache.errors import ConfigError

Start = Callable[..., SimEngine]
ALL = {**MIXES, "uneven": UNEVEN}


def sessions(entries: int = 8, mode: str = "keep-current", **more: Any) -> dict[str, Any]:
    return {**HOST, "sessions": {"entries": entries, "mode": mode, **more}}


@pytest.fixture
def start(hybrid: Path, plain: Path) -> Iterator[Start]:
    """Starts engines with sessions, and closes them at the end."""
    engines: list[SimEngine] = []

    def start_one(groups: Sequence[Group], extra: Mapping[str, Any] | None = None, **options: Any) -> SimEngine:
        model = hybrid if any(group.kind == "state" for group in groups) else plain
        engines.append(SimEngine(groups, model, sessions() if extra is None else extra, **options))
        return engines[-1]

    yield start_one
    for engine in engines:
        engine.close()


class Talk:
    """A conversation on one engine, which forgets its own cache before each turn."""

    def __init__(self, engine: SimEngine, name: str, salt: str | None = None) -> None:
        self.engine, self.name, self.salt = engine, name, salt
        self.turns = 0

    def turn(self, prompt: Sequence[int], answer: int = 5) -> tuple[int, list[int]]:
        """Tokens that were resumed, and the answer, which is what the model says whatever was resumed."""
        engine, before = self.engine, self.engine.counts.get("adopted_tokens", 0)
        engine.run()
        assert engine.reset_local()
        self.turns += 1
        name = f"{self.name} {self.turns}"
        engine.add(name, prompt, answer, cache_salt=self.salt)
        engine.run()
        assert engine.outputs[name] == SimEngine.expected(prompt, answer)
        return engine.counts.get("adopted_tokens", 0) - before, engine.outputs[name]


def close_all(engine: SimEngine) -> None:
    """Nothing is held when no session is."""
    engine.run()
    side = engine.side
    side._sessions.registry.reset()
    assert side._sessions.registry.held.size.total == 0
    engine.run()
    assert side.jobs_in_flight == 0
    assert engine.tokens_accounted_for()
    assert side.coordinator.blocks.pinned_slots == side.coordinator.states.pinned_slots == 0
    assert not side._sessions.checkpoints._holders
    assert engine.reset_local()
    assert engine.free_blocks() == engine.kv_cache_config.num_blocks - 1


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("order", ["v1", "v2"])
@pytest.mark.parametrize("mix", list(ALL))
def test_turns_resume_at_the_very_token(start: Start, mix: str, order: str, asynchronous: bool) -> None:
    groups = ALL[mix]
    grid = lcm(*(group.block_tokens for group in groups))
    engine = start(groups, order=order, asynchronous=asynchronous, num_blocks=400)
    for length in (1, 3, grid - 1, grid, grid + 1, 2 * grid - 1, 5 * grid + 3):
        talk, first = Talk(engine, f"length {length}"), prompt_of(length, seed=7)
        resumed, answer = talk.turn(first)
        assert resumed < length
        # An assistant-ended prompt goes on behind the answer, whose last token nobody has computed yet.
        further = [*first, *answer, 1, 2, 3]
        resumed, answer = talk.turn(further)
        assert resumed == length + 4, length
        # And a template that writes the answer anew goes back to the end of the prompt.
        resumed, _ = talk.turn([*further, (answer[0] + 1) % VOCAB, 7, 7])
        assert resumed == len(further), length
    counts = engine.side.take_counts()
    assert not counts.get("fenced_writers")
    close_all(engine)


@pytest.mark.parametrize("entries", [0, 1, 2, 3])
def test_abab(start: Start, entries: int) -> None:
    """A side request takes the one lane there is; what each hop resumes at, on a model whose grid is out of reach."""
    engine = start([Group("full", 64), Group("state", 64)], sessions(entries), max_seqs=1)
    talks = {name: Talk(engine, name) for name in "ab"}
    texts = {"a": prompt_of(40, 1), "b": prompt_of(30, 2)}
    found = []
    for name in "abab":
        prompt = texts[name]
        resumed, answer = talks[name].turn(prompt)
        found.append(resumed)
        texts[name] = [*prompt, *answer, 5, 6]
    assert found == [0, 0, 44 if entries else 0, 34 if entries > 1 else 0]


def test_refused_where_the_engine_makes_no_hashes(hybrid: Path) -> None:
    def mutate(config: Any) -> None:
        config.cache_config.enable_prefix_caching = False

    with pytest.raises(ConfigError, match=r"sessions\.entries is 8.*--enable-prefix-caching"):
        SimEngine(MIXES["state"], hybrid, sessions(), mutate=mutate)


EDGES = [Group("full", 16), Group("window", 8, 20), Group("state", 16)]


@pytest.mark.parametrize("frontier", [-1, 0, 1])
@pytest.mark.parametrize("turn", [-1, 0, 1])
@pytest.mark.parametrize("blocks", [1, 3])
def test_around_every_edge(start: Start, blocks: int, turn: int, frontier: int) -> None:
    """The end of the prompt, and the last token, on a block boundary, one before and one after."""
    engine = start(EDGES)
    talk, first = Talk(engine, "edge"), prompt_of(16 * blocks + turn, seed=3)
    resumed, answer = talk.turn(first, answer=16 - turn + frontier + 1)
    assert resumed == 0
    frontier_tokens = 16 * (blocks + 1) + frontier
    resumed, _ = talk.turn([*first, *answer, 4])
    assert resumed == frontier_tokens
    # What the first turn left was given up for what the second did; on the grid there may be something.
    resumed, _ = talk.turn([*first, *answer, VOCAB - 1, 3, 3])
    assert resumed % 16 == 0 and resumed <= frontier_tokens + 1
    close_all(engine)


def test_a_prompt_and_an_answer_inside_the_first_block(start: Start) -> None:
    engine = start([Group("full", 64), Group("state", 64)])
    talk = Talk(engine, "short")
    resumed, answer = talk.turn([1, 2, 3], answer=4)
    assert resumed == 0
    assert talk.turn([1, 2, 3, *answer, 9])[0] == 6
    assert Talk(engine, "other end").turn([1, 2, 3, (answer[0] + 1) % VOCAB])[0] == 0  # a later turn took its place
    close_all(engine)


def test_all_but_the_last_token_is_not_the_same(start: Start) -> None:
    """Two conversations that differ in one token, the last; and the same tokens under another salt."""
    engine = start([Group("full", 64), Group("state", 64)])
    shared = prompt_of(40)
    talks = {token: Talk(engine, f"ends in {token}") for token in (1, 2)}
    for token, talk in talks.items():
        assert talk.turn([*shared, token])[0] == 0
    for token, talk in talks.items():
        assert talk.turn([*shared, token, 3])[0] == 41
    assert Talk(engine, "a third").turn([*shared, 4, 3])[0] == 0
    salted = Talk(engine, "salted", salt="other")
    assert salted.turn([*shared, 1, 3])[0] == 0
    assert salted.turn([*shared, 1, 3, 3])[0] == 42
    close_all(engine)


@pytest.mark.parametrize("mode", ["keep-current", "drop-current"])
def test_what_a_dropped_current_costs(start: Start, mode: str) -> None:
    """S2's G1 to G4: user-ended and assistant-ended prompts, behind a side request and without one."""
    engine = start([Group("full", 64), Group("state", 64)], sessions(2, mode), max_seqs=1)
    found: dict[str, int] = {}
    for number, (shape, assistant_ended, aside) in enumerate(
        [("G1", False, True), ("G2", True, True), ("G3", True, True), ("G4", True, False)]
    ):
        talk, first = Talk(engine, shape), prompt_of(40, seed=20 + number)
        _, answer = talk.turn(first, answer=12)
        if aside:
            Talk(engine, f"title of {shape}").turn(prompt_of(9, seed=40 + number))
        said = answer if assistant_ended else [(answer[0] + 1) % VOCAB, *answer[1:]]
        found[shape], _ = talk.turn([*first, *said, 7, 8])
    dropped = mode == "drop-current"
    # From the boundary at 40 to the frontier at 51 are eleven tokens more; without a side request the lane has both.
    assert found == {"G1": 40, "G2": 40 if dropped else 51, "G3": 40 if dropped else 51, "G4": 51}
    close_all(engine)


def hold_back(engine: SimEngine) -> Callable[[], None]:
    """Copies are made, but nobody hears of it until the function that this returns is called."""
    waiting = [worker.connector._worker._transfer for worker in engine.ranks]
    for transfer in waiting:
        transfer.done = lambda ticket: False

    def let_go() -> None:
        for transfer in waiting:
            del transfer.done

    return let_go


@pytest.mark.parametrize("what", ["evicted", "reset", "re-owned"])
def test_a_late_writer_changes_nothing(start: Start, tmp_path: Path, what: str) -> None:
    """A copy that ends when its session has gone, or has gone on: not found, not written, counted."""
    extra = {**sessions(1), "backend": {"url": tmp_path.as_uri()}}
    engine = start([Group("full", 64), Group("state", 64)], extra, max_seqs=1)
    talk, prompt = Talk(engine, "paused"), prompt_of(40)
    talk.turn([9])  # starts what a worker starts with its first step
    others = set(engine.side._sessions.checkpoints._holders)
    let_go = hold_back(engine)
    engine.add("late", prompt, 4)
    while "late" not in engine.reasons:
        engine.step()
    registry = engine.side._sessions.registry
    (name,) = [name for name, one in registry._sessions.items() if one.kept is not None and len(one.kept.tokens) > 40]
    lease = registry._sessions[name].lease
    if what == "evicted":
        registry.close(name)
    elif what == "reset":
        engine.scheduler.reset_prefix_cache(reset_running_requests=False, reset_connector=True)
    else:
        registry.close(name)
        assert registry.begin(name) != lease
    files = sorted(tmp_path.rglob("*.kv"))
    let_go()
    engine.run()
    assert not registry.admits(lease)
    assert engine.counts["fenced_writers"] >= 4  # a state and a partial block, at the prompt's end and at the frontier
    assert sorted(tmp_path.rglob("*.kv")) == files
    assert set(engine.side._sessions.checkpoints._holders) <= others
    assert engine.counts.get("saved_states", 0) <= 4  # those of the first turn
    resumed, _ = talk.turn([*prompt, 1, 2])
    assert resumed == 0
    close_all(engine)


def test_no_two_engines_own_an_epoch(start: Start, tmp_path: Path) -> None:
    extra = {**sessions(2), "backend": {"url": tmp_path.as_uri()}}
    engines = [start([Group("full", 64), Group("state", 64)], extra) for _ in range(2)]
    leases = []
    for engine in engines:
        begin = engine.side._sessions.registry.begin

        def noted(*arguments: Any, begin: Any = begin) -> Any:
            leases.append(begin(*arguments))
            return leases[-1]

        engine.side._sessions.registry.begin = noted
        talk, prompt = Talk(engine, "both"), prompt_of(40)
        _, answer = talk.turn(prompt)
        talk.turn([*prompt, *answer, 1])
    owners = [(lease.engine, lease.epoch) for lease in leases]
    assert len(owners) == len(set(owners)) == 4
    assert len({engine for engine, _ in owners}) == 2


def test_a_session_that_nobody_comes_for_is_let_go(start: Start) -> None:
    engine = start([Group("full", 64), Group("state", 64)], sessions(4, ttl="1ms"))
    prompt = prompt_of(40)
    engine.add("named", prompt, 4)
    engine.requests["named"].kv_transfer_params = {"ucmcache": {"session": "mine", "pin": "1h"}}
    engine.add("unnamed", prompt_of(41), 4)
    engine.run()
    time.sleep(0.01)
    sessions_ = engine.side._sessions
    sessions_._expire_s = 0.0
    sessions_.registry.expire()
    assert [name.rpartition("/")[2] for name in sessions_.registry._sessions] == ["mine"]  # pinned
    assert engine.counts.get("expired_sessions", 0) + sessions_.registry.counts["expired_sessions"] >= 1
    close_all(engine)


def test_a_client_s_mistake_costs_it_the_name_only(start: Start) -> None:
    engine = start(EDGES)
    wrong: list[Any] = [{"session": 7}, {"session": "x" * 500}, {"session": "a", "pin": "soon"}, "no"]
    for number, parameters in enumerate([*({"ucmcache": one} for one in wrong), ["not", "an object"]]):
        prompt = prompt_of(20, seed=number)
        engine.add(f"bad {number}", prompt, 3)
        engine.requests[f"bad {number}"].kv_transfer_params = parameters
        engine.run()
        assert engine.outputs[f"bad {number}"] == SimEngine.expected(prompt, 3)
    assert engine.counts["failures/session:parameters"] == 5
    close_all(engine)


@pytest.mark.parametrize("quota", [None, "32KiB"])
def test_no_more_is_held_than_is_allowed(start: Start, quota: str | None) -> None:
    engine = start(EDGES, sessions(50, quota=quota), max_seqs=2)
    registry, most = engine.side._sessions.registry, 0
    for number in range(30):
        engine.add(f"n{number}", prompt_of(30 + number, seed=number), 4)
        while engine.requests:
            engine.step()
            most = max(most, registry.held.size.total)
    assert most > 0
    if quota is not None:
        assert most <= 32 << 10
        assert engine.counts.get("evicted_sessions", 0) > 0
    close_all(engine)
