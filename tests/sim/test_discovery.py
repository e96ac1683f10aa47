"""Several engines on one backend, an index that is still being read, and how far a save has come."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.sim.engine import VOCAB, SimEngine
from tests.sim.test_resume import HOST, MIXES, assert_at_rest
from ucmcache.coordinator.hit import Prompt
from ucmcache.store.testing import FlakyBackend, HungBackend, SlowBackend
from ucmcache.store.units import Durability

PROMPT = [i * 7 % VOCAB for i in range(70)]


def engine_on(folder: Path, model: Path, mix: str = "all", **backend: Any) -> SimEngine:
    return SimEngine(MIXES[mix], model, {**HOST, "backend": {"url": folder.as_uri(), **backend}})


def adopted(engine: SimEngine, name: str, prompt: list[int] = PROMPT) -> int:
    before = engine.counts.get("adopted_tokens", 0)
    assert engine.generate(name, prompt) == SimEngine.expected(prompt, 4)
    engine.run()
    assert engine.reset_local()
    return engine.counts.get("adopted_tokens", 0) - before


def wipe(engine: SimEngine) -> None:
    """Forget all of host memory."""
    for store in (engine.side.coordinator.blocks, engine.side.coordinator.states):
        for arena in store.arenas:
            for slot in range(arena.plan.slots):
                arena.evict(slot)


@pytest.mark.parametrize("mix", sorted(MIXES))
def test_what_another_engine_stored_is_found_without_a_restart(hybrid: Path, tmp_path: Path, mix: str) -> None:
    reader, writer = engine_on(tmp_path, hybrid, mix), engine_on(tmp_path, hybrid, mix)
    reader.read_index()
    first = adopted(writer, "cold")
    assert first == 0
    expected = adopted(writer, "warm")
    found = adopted(reader, "another's")
    assert found == expected > 0
    assert reader.counts["read_bytes"] > 0
    for engine in (reader, writer):
        assert_at_rest(engine)
        engine.close()


def test_a_prompt_that_was_asked_for_is_not_asked_for_again_until_that_expires(hybrid: Path, tmp_path: Path) -> None:
    reader, writer = engine_on(tmp_path, hybrid, existence_ttl="1h"), engine_on(tmp_path, hybrid)
    reader.read_index()
    asked: list[str] = []
    ask = reader.side._discovery.ask

    def noted(namespace: bytes, request_id: str, prompt: Prompt) -> None:
        asked.append(request_id)
        ask(namespace, request_id, prompt)

    reader.side._discovery.ask = noted
    assert adopted(reader, "first") == 0
    wipe(reader)
    for file in tmp_path.rglob("*.kv"):
        file.unlink()
    # Behind our back: the index still says stored, which costs one read and no more.
    assert adopted(reader, "second") == 0
    assert asked == ["first"]
    reader.side._asked.clear()  # as after the hour
    wipe(reader)
    for file in tmp_path.rglob("*.kv"):
        file.unlink()
    assert adopted(writer, "cold") == 0
    adopted(reader, "third")
    for engine in (reader, writer):
        assert_at_rest(engine)
        engine.close()


def test_nobody_is_asked_where_nobody_else_writes(hybrid: Path, tmp_path: Path) -> None:
    reader, writer = engine_on(tmp_path, hybrid, existence_ttl=None), engine_on(tmp_path, hybrid)
    reader.read_index()
    adopted(writer, "cold")
    assert adopted(reader, "another's") == 0
    assert reader.side._discovery._asked == 0
    for engine in (reader, writer):
        engine.close()


def test_a_backend_that_hangs_costs_lookups_their_deadline_once(hybrid: Path, tmp_path: Path) -> None:
    adopted(engine_on(tmp_path, hybrid), "cold")
    extra = {**HOST, "promise_deadline": "200ms", "backend": {"url": tmp_path.as_uri(), "deadline": "100ms"}}
    engine = SimEngine(MIXES["all"], hybrid, extra)
    engine.read_index()
    discovery, worker = engine.side._discovery, engine.ranks[0].connector._worker
    hung = [
        HungBackend(one._backend, lambda operation: operation not in ("bucket", "close")) for one in (discovery, worker)
    ]
    discovery._backend, worker._backend = hung
    began_s = time.monotonic()
    for number in range(6):
        prompt = [(t + number) % VOCAB for t in PROMPT]
        engine.add(f"r{number}", prompt)
        while f"r{number}" in engine.requests:
            engine.step()
        assert engine.outputs[f"r{number}"] == SimEngine.expected(prompt, 4)
    assert time.monotonic() - began_s < 5.0
    assert sum(one.waiting for one in hung) <= 4
    began_s = time.monotonic()
    engine.close()
    assert time.monotonic() - began_s < 5.0
    for one in hung:
        one.release()


def test_a_backend_slower_than_computing_is_left_alone_and_comes_back(hybrid: Path, tmp_path: Path) -> None:
    adopted(engine_on(tmp_path, hybrid), "cold")
    engine = engine_on(tmp_path, hybrid, when_slow="recompute")
    now = [1000.0]
    engine.side._gate._clock = lambda: now[0]
    worker = engine.ranks[0].connector._worker
    fast = worker._backend
    worker._backend = SlowBackend(fast, 0.02)
    for number in range(8):  # what it computes is measured, and what it reads
        adopted(engine, f"new {number}", [(t * 3 + number) % VOCAB for t in PROMPT])
    assert adopted(engine, "measured") == 64
    for number in range(4):
        wipe(engine)
        adopted(engine, f"slow {number}")
    assert engine.counts["slow_lookups"] >= 2
    left_alone = engine.counts["slow_lookups"]
    worker._backend = fast
    for _ in range(20):
        now[0] += 10.0
        wipe(engine)
        assert adopted(engine, f"try {now[0]}") == 64
    assert engine.counts["slow_lookups"] == left_alone
    engine.run()
    assert_at_rest(engine)
    engine.close()


def test_how_far_a_save_has_come(hybrid: Path, tmp_path: Path) -> None:
    engine = engine_on(tmp_path, hybrid)
    engine.add("cold", PROMPT)
    hashes = [bytes(one) for one in engine.requests["cold"].block_hashes]
    engine.run()
    side, worker = engine.side, engine.ranks[0].connector._worker
    blocks = side.coordinator.blocks
    prompt = Prompt(len(PROMPT), hashes, side._hash_block_tokens)
    keys = [key for key, _ in side.coordinator.needed(prompt, 64)]
    assert worker.wait_durable(keys, 10.0) == []
    assert {side.coordinator.store_of(key).durability(key) for key in keys} == {Durability.DURABLE}
    other = keys[0]._replace(prefix=b"x" * 32)
    assert worker.wait_durable([*keys, other], 10.0) == [other]
    assert blocks.durability(other) is None
    # In host memory only: the writes fail.
    worker._backend = FlakyBackend(worker._backend, lambda operation: operation == "put")
    engine.add("more", [5] * 70)
    prompt = Prompt(70, [bytes(one) for one in engine.requests["more"].block_hashes], side._hash_block_tokens)
    while "more" in engine.requests:
        engine.step()
    more = [key for key, _ in side.coordinator.needed(prompt, 32)][:3]
    assert worker.wait_durable(more, 10.0) == more
    assert blocks.durability(more[0]) is Durability.STAGED
    engine.run()
    engine.close()


def test_what_is_used_from_host_memory_stays_in_the_backend(hybrid: Path, tmp_path: Path) -> None:
    engine = engine_on(tmp_path, hybrid)
    adopted(engine, "cold")
    old_ns = 10**18
    for file in tmp_path.rglob("*.kv"):
        times = file.stat()
        digits = (times.st_atime_ns % 10**9, times.st_mtime_ns % 10**9)
        os.utime(file, ns=(old_ns + digits[0], old_ns + digits[1]))
    assert adopted(engine, "warm") == 64
    assert engine.counts.get("read_bytes", 0) == 0
    engine.close()
    used = [file for file in tmp_path.rglob("*.kv") if file.stat().st_atime_ns > old_ns + 10**9]
    assert used
