"""Sessions on the simulated engine: conversations resume at the very token; every byte that is read is checked."""

from __future__ import annotations

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
    assert not side._sessions._holders
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
