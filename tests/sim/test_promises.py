"""The promise rule: only verified bytes in host memory are promised, and nobody waits for them past the deadline."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from tests.sim.engine import VOCAB, SimEngine
from tests.sim.test_resume import HOST, MIXES, assert_at_rest
from ucmcache.store import record
from ucmcache.store.breaker import Breaker
from ucmcache.store.testing import FlakyBackend, SlowBackend

PROMPT = [i * 7 % VOCAB for i in range(70)]


@pytest.fixture
def stored(hybrid: Path, tmp_path: Path) -> dict[str, Any]:
    """Configuration of a backend that holds PROMPT."""
    extra = {**HOST, "backend": {"url": tmp_path.as_uri()}}
    engine = SimEngine(MIXES["all"], hybrid, extra)
    assert engine.generate("cold", PROMPT) == SimEngine.expected(PROMPT, 4)
    assert_at_rest(engine)
    engine.close()
    return extra


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Event]:
    """Reads from the backend wait for this."""
    opened = Event()
    read = record.read_into

    def held(*args: Any) -> bool:
        opened.wait(30)
        return read(*args)

    monkeypatch.setattr(record, "read_into", held)
    yield opened
    opened.set()


def test_a_lookup_answers_ask_again_until_the_bytes_are_here(hybrid: Path, stored: dict[str, Any], gate: Event) -> None:
    engine = SimEngine(MIXES["all"], hybrid, {**stored, "promise_deadline": "1h"})
    engine.add("one", PROMPT)
    for _ in range(20):
        engine.step()
    request = engine.requests["one"]
    assert engine.scheduler.connector.get_num_new_matched_tokens(request, 0) == (None, False)
    assert engine.counts.get("promised_tokens", 0) == 0
    gate.set()
    engine.run()
    assert engine.counts["promised_tokens"] == engine.counts["adopted_tokens"] == 64
    assert engine.outputs["one"] == SimEngine.expected(PROMPT, 4)
    assert_at_rest(engine)
    engine.close()


def test_past_the_deadline_the_request_recomputes(hybrid: Path, stored: dict[str, Any], gate: Event) -> None:
    engine = SimEngine(MIXES["all"], hybrid, {**stored, "promise_deadline": "50ms"})
    engine.add("late", PROMPT)
    while "late" not in engine.reasons:
        engine.step()
    assert engine.outputs["late"] == SimEngine.expected(PROMPT, 4)
    assert engine.counts["late_lookups"] == 1
    assert "promised_tokens" not in engine.counts
    assert engine.counts["lost_tokens/late"] == 64
    # What arrives after all is of use to the next one.
    gate.set()
    engine.run()
    engine.reset_local()
    assert engine.generate("next", PROMPT) == SimEngine.expected(PROMPT, 4)
    assert engine.counts["adopted_tokens"] == 64
    engine.close()


def test_others_run_while_one_waits(hybrid: Path, stored: dict[str, Any], gate: Event) -> None:
    engine = SimEngine(MIXES["all"], hybrid, {**stored, "promise_deadline": "1h"})
    engine.add("waits", PROMPT)
    other = [3] * 40
    engine.add("runs", other)
    for _ in range(30):
        engine.step()
    assert engine.outputs["runs"] == SimEngine.expected(other, 4)
    assert "waits" not in engine.reasons
    engine.abort("waits")
    gate.set()
    assert_at_rest(engine)
    engine.close()


def test_a_slow_backend_costs_time_only(hybrid: Path, stored: dict[str, Any]) -> None:
    engine = SimEngine(MIXES["all"], hybrid, stored)
    side = engine.ranks[0].connector._worker
    side._backend = SlowBackend(side._backend, delay_s=0.02)
    assert engine.generate("slow", PROMPT) == SimEngine.expected(PROMPT, 4)
    assert engine.counts["adopted_tokens"] == 64
    assert_at_rest(engine)
    engine.close()


def test_lookups_are_idempotent_and_take_no_pins(hybrid: Path, stored: dict[str, Any]) -> None:
    engine = SimEngine(MIXES["all"], hybrid, stored)
    engine.generate("warm up", PROMPT)
    engine.reset_local()
    engine.add("asked", PROMPT)
    connector, request = engine.scheduler.connector, engine.requests["asked"]
    answers = {connector.get_num_new_matched_tokens(request, 0) for _ in range(1000)}
    assert answers == {(64, True)}
    assert engine.side.coordinator.blocks.pinned_slots == engine.side.coordinator.states.pinned_slots == 0
    engine.run()
    assert engine.outputs["asked"] == SimEngine.expected(PROMPT, 4)
    engine.close()


def test_reading_can_be_switched_off_by_a_request(hybrid: Path, stored: dict[str, Any]) -> None:
    engine = SimEngine(MIXES["all"], hybrid, stored)
    engine.add("no reading", PROMPT)
    engine.requests["no reading"].skip_reading_prefix_cache = True
    engine.run()
    assert engine.outputs["no reading"] == SimEngine.expected(PROMPT, 4)
    assert "read_bytes" not in engine.counts
    engine.close()


def test_two_that_wait_do_not_push_out_each_other(hybrid: Path, tmp_path: Path) -> None:
    """Host memory holds what one of them needs: each gets it, or computes; neither waits for its deadline."""
    prompts = [[(i * 7 + k) % VOCAB for i in range(165)] for k in (1, 2)]
    backend = {"backend": {"url": tmp_path.as_uri()}}
    first = SimEngine(MIXES["all"], hybrid, {**HOST, **backend})
    for i, prompt in enumerate(prompts):
        first.generate(f"cold {i}", prompt)
    assert_at_rest(first)
    first.close()
    tight = {"host": {"blocks": 45_000, "snapshots": "1MiB"}, **backend, "promise_deadline": "1h"}
    engine = SimEngine(MIXES["all"], hybrid, tight)
    for i, prompt in enumerate(prompts):
        engine.add(f"warm {i}", prompt)
    engine.run()
    for i, prompt in enumerate(prompts):
        assert engine.outputs[f"warm {i}"] == SimEngine.expected(prompt, 4)
    assert engine.counts["adopted_tokens"] >= 160
    assert_at_rest(engine)
    engine.close()


def test_a_lease_ends_with_the_deadline(hybrid: Path, stored: dict[str, Any], gate: Event) -> None:
    """A request that nobody asks about any more (no room in the engine) does not keep host memory for ever."""
    engine = SimEngine(MIXES["all"], hybrid, {**stored, "promise_deadline": "1h"})
    side, now = engine.side, [0.0]
    side._clock = side._staging._clock = lambda: now[0]
    gate.set()
    engine.add("one", PROMPT)
    for _ in range(200):
        engine.step()
        if side.coordinator.blocks.pinned_slots:
            break
    assert side.coordinator.blocks.pinned_slots > 0
    now[0] = 3601.0
    side._staging._expire_leases()
    assert not side._staging._lease_ends_s
    engine.run()
    assert engine.outputs["one"] == SimEngine.expected(PROMPT, 4)
    assert_at_rest(engine)
    engine.close()


def test_a_backend_that_keeps_failing_is_left_alone_and_found_again(hybrid: Path, stored: dict[str, Any]) -> None:
    """After five failures in a row nobody waits for it or calls it; ten seconds later one call finds it well."""
    engine = SimEngine(MIXES["all"], hybrid, {**stored, "promise_deadline": "1h"})
    now, calls, broken = [0.0], [0], [True]

    def fails(operation: str) -> bool:
        calls[0] += operation in ("put", "get_into")
        return broken[0] and operation in ("put", "get_into")

    worker = engine.ranks[0].connector._worker
    worker._backend = FlakyBackend(worker._backend, fails)
    worker._pipeline.breaker = Breaker(clock=lambda: now[0])

    def adopted(name: str, prompt: list[int]) -> int:
        before = engine.counts.get("adopted_tokens", 0)
        assert engine.generate(name, prompt) == SimEngine.expected(prompt, 4)
        engine.run()
        assert engine.reset_local()
        return engine.counts.get("adopted_tokens", 0) - before

    assert adopted("while it fails", [(t + 3) % VOCAB for t in PROMPT]) == 0
    assert worker._pipeline.breaker.openings == 1
    made = calls[0]
    # Nothing of it is asked for, and nobody waits: what is kept goes into host memory alone.
    assert adopted("while it is left alone", PROMPT) == 0
    assert calls[0] == made
    assert engine.counts["failures/write:breaker"] > 0
    assert engine.counts["breaker_openings"] == 1
    # It is well again; the first call that is let through shows it.
    broken[0], now[0] = False, 10.5
    assert adopted("the first after that", [(t + 1) % VOCAB for t in PROMPT]) == 0
    assert calls[0] > made
    wiped = [arena.evict(slot) for arena in engine.side.coordinator.blocks.arenas for slot in range(arena.plan.slots)]
    assert any(wiped)
    read = engine.counts.get("read_bytes", 0)
    assert adopted("from the backend again", PROMPT) == 64
    assert engine.counts["read_bytes"] > read
    assert_at_rest(engine)
    engine.close()
