"""Nothing is left behind: pins, slots and memory after many lookups, aborts, failed loads and evictions."""

from __future__ import annotations

import gc
import os
import random
from pathlib import Path

from tests.sim.engine import VOCAB, SimEngine
from tests.sim.test_resume import HOST, MIXES, assert_at_rest
from ucmcache.errors import BackendError
from ucmcache.keys import BlockKey
from ucmcache.store.arena import ArenaPlan
from ucmcache.store.block import BlockStore
from ucmcache.store.testing import FlakyBackend


def slots(engine: SimEngine) -> tuple[int, int]:
    """Pinned slots, and those that are neither free nor hold something that can be given up."""
    stores = (engine.side.coordinator.blocks, engine.side.coordinator.states)
    pinned = sum(store.pinned_slots for store in stores)
    arenas = [arena for store in stores for arena in store.arenas]
    stuck = sum(arena.plan.slots - arena.free_slots - arena._evictable_slots for arena in arenas)
    return pinned, stuck


def test_a_thousand_lookups_aborts_and_failed_loads_leave_nothing(hybrid: Path, tmp_path: Path) -> None:
    chance = random.Random(4)
    engine = SimEngine(MIXES["all"], hybrid, {**HOST, "backend": {"url": tmp_path.as_uri()}})
    worker = engine.ranks[0].connector._worker
    worker._backend = FlakyBackend(worker._backend, lambda operation: operation != "bucket" and chance.random() < 0.1)
    prompts = [[(i * 7 + seed) % VOCAB for i in range(40 + seed)] for seed in range(12)]
    fails = [False]

    def broken(copies: object) -> object:
        if fails[0] and chance.random() < 0.3:
            raise BackendError("the copy failed because it was told to")
        return load(copies)

    for number in range(1000):
        name, prompt = f"r{number}", chance.choice(prompts)
        engine.add(name, prompt, 2)
        if number == 1:
            load = worker._transfer.load
            worker._transfer.load = broken
            fails[0] = True
        for _ in range(chance.randrange(4)):
            engine.step()
            if name in engine.requests and engine.requests[name].status.name == "WAITING":
                engine.scheduler.connector.get_num_new_matched_tokens(engine.requests[name], 0)
        if name not in engine.outputs and chance.random() < 0.4:
            engine.abort(name)
        if number % 50 == 49:
            engine.run()
            engine.reset_local()
    fails[0] = False
    engine.run()
    assert_at_rest(engine)
    assert slots(engine) == (0, 0)
    assert engine.side.jobs_in_flight == 0 and not engine.side._requests and worker._pipeline.pending == 0
    assert any(name.startswith("failures/load") for name in engine.counts)
    engine.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_does_not_grow_over_two_thousand_cycles() -> None:
    store = BlockStore([ArenaPlan(64, 256, (0,))], {0: b"g" * 16}, b"n" * 16)
    number = 0

    def cycle() -> None:
        nonlocal number
        for _ in range(64):
            number += 1
            key = BlockKey(0, number.to_bytes(32, "big"), 16)
            [slot] = store.reserve([key]) or [-1]
            store.commit(0, slot)
            store.set_stored(key, True)
            store.set_stored(key, False)

    # Until what is remembered of evictions is full.
    for _ in range(1200):
        cycle()
    gc.collect()
    before = resident_bytes()
    for _ in range(2000):
        cycle()
    gc.collect()
    assert resident_bytes() < before * 1.05
    assert len(store._here) <= 256 and len(store._stored) == 0
