"""X-Hybrid-96 against the figures, the worked examples and the five closed-loop checks of S1.

Worked example B, about ranks, is in test_ranks.py. Where S1's rule (the minimum of each group's deepest) differs from
requirements C2 (the deepest position that all have), the requirements hold.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.positions import state_positions
from tests.sim.engine import SimEngine, WrongBytesError
from tests.sim.test_resume import Start, assert_at_rest, start
from tests.sim.test_resume import prompt_of as tokens_of
from tests.sim.x_hybrid import (
    ENGINE_GROUPS,
    GROUPS,
    HASH_TOKENS,
    LAYERS,
    PARTS,
    STAGES,
    TABLE,
    TENSOR_RANKS,
    XHybrid,
    XHybridEngine,
    facts,
    prompt_of,
)
from ucmcache.coordinator.binding import bind
from ucmcache.coordinator.hit import Prompt, resolve_hit
from ucmcache.coordinator.spec import SPEC_TABLE, AccessUnit, Kind, RankRule, register
from ucmcache.errors import UnsupportedModelError
from ucmcache.keys import BlockKey, physical_id

__all__ = ["start"]

ROOT = Path(__file__).parents[2]


def test_ten_rows_and_ninety_six_layers() -> None:
    assert len(TABLE) == len(GROUPS) == 10
    assert sum(layers for _, _, layers in GROUPS) == sum(group.layers for group in ENGINE_GROUPS) == LAYERS
    rows = bind(facts(), TABLE)
    assert Counter(row.kind for row in rows) == {Kind.CHAIN: 3, Kind.SNAPSHOT: 2, Kind.NONE: 5}
    assert {row.spec.access_unit for row in rows} == set(AccessUnit)
    alike = {row.spec.spec_class: row.ranks_alike(TENSOR_RANKS) for row in rows if row.spec.votes}
    assert alike == {"XMla": 8, "XCsa": 8, "XSwa": 1, "XMamba2": 1, "XKda": 1}


def test_figure_13() -> None:
    """3,000 tokens; MLA 2,560, CSA 2,432 (whole blocks), SWA 3,000: l = 2,432; p* = 2,304."""
    model, prompt = XHybrid(), prompt_of(3000)
    model.keep_chain("XMla", prompt, 2560)
    model.keep_chain("XCsa", prompt, 2432)
    model.keep_chain("XSwa", prompt, 3000)
    model.keep_states("XMamba2", prompt, [1024, 2304, 2560])
    model.keep_states("XKda", prompt, [1024, 2048, 2304])
    assert model.coordinator.grid_tokens == 128
    hit = model.coordinator.lookup(prompt)
    assert (hit.chain_tokens, hit.resume_tokens) == (2432, 2304)
    assert hit.lost == {"not_offered": 128}
    # Skipped up to 2,304: every unit that this takes, and none beyond it.
    units = model.coordinator.needed(prompt, hit.resume_tokens)
    assert Counter(key.group for key, _ in units) == {0: 18, 1: 18, 2: 18, 3: 1, 4: 1}
    assert max(key.depth_tokens for key, _ in units) == 2304


def test_worked_example_a() -> None:
    """A prefix of 5,000 tokens, all chains whole, checkpoints every 1,024: p* = 4,096; cross attention has no vote."""
    model, prompt = XHybrid(), prompt_of(5000)
    for name in ("XMla", "XCsa", "XSwa"):
        model.keep_chain(name, prompt, 5000)
    model.keep_states("XMamba2", prompt, [1024, 2048, 3072, 4096])
    model.keep_states("XKda", prompt, [1024, 2048, 3072, 4096])
    hit = model.coordinator.lookup(prompt)
    assert (hit.chain_tokens, hit.resume_tokens) == (4992, 4096)


@pytest.mark.parametrize(("window", "from_block"), [(5000, 0), (1000, 24), (128, 31), (1, 32)])
def test_a_window_needs_only_what_it_touches(window: int, from_block: int) -> None:
    """S1 7.3: the hit of example A stands with the window's blocks alone, and falls without one of them."""
    model, prompt = XHybrid(window_tokens=window), prompt_of(5000)
    for name in ("XMla", "XCsa", "XSwa"):
        model.keep_chain(name, prompt, 5000)
    for name in ("XMamba2", "XKda"):
        model.keep_states(name, prompt, [4096])
    swa = model.rows["XSwa"].group
    needed = [key for key, _ in model.coordinator.needed(prompt, 4096) if key.group == swa]
    assert sorted(key.depth_tokens // 128 - 1 for key in needed) == list(range(from_block, 32))


def test_worked_example_c() -> None:
    """10,000 tokens, one checkpoint per 1,024: nine, and the end; each answers for its own position only."""
    model, prompt = XHybrid(tokens=1 << 15), prompt_of(10_000)
    for name in ("XMla", "XCsa", "XSwa"):
        model.keep_chain(name, prompt, 10_000)
    growth: list[int] = []
    kept = 0
    for position in range(128, 10_001, 128):  # the engine stops at every one
        trigger = model.coordinator.retention.trigger(position, prompt.num_tokens, 0, kept)
        if trigger is not None:
            kept = position
            for name in ("XMamba2", "XKda"):
                model.keep_states(name, prompt, [position])
        growth.append(len(state_positions(model.coordinator, prompt, 128)))
    expected = [*range(1024, 9217, 1024), 9984]
    assert state_positions(model.coordinator, prompt, 128) == expected
    assert all(position % 64 == 0 for position in expected)
    assert growth == [sum(position <= end for position in expected) for end in range(128, 10_001, 128)]
    for length in (1023, 1024, 1025, 5000, 9984, 9985, 10_000):
        shorter = prompt_of(length)
        deepest = max((position for position in expected if position < length), default=0)
        assert model.coordinator.lookup(shorter).resume_tokens == deepest


def test_the_deepest_that_all_have_and_not_the_least_of_each_ones_deepest() -> None:
    """C2: Mamba2 at {1024, 3072}, KDA at {1024, 2048}: S1's rule says 2,048, where Mamba2 has nothing."""
    model, prompt = XHybrid(), prompt_of(4097)
    for name in ("XMla", "XCsa", "XSwa"):
        model.keep_chain(name, prompt, 4096)
    model.keep_states("XMamba2", prompt, [1024, 3072])
    model.keep_states("XKda", prompt, [1024, 2048])
    hit = model.coordinator.lookup(prompt)
    assert (hit.chain_tokens, hit.resume_tokens) == (4096, 1024)


# -- the five closed-loop checks (S1 8.4) -----------------------------------------------------------------------------


def test_closed_loop_1_classification_is_complete() -> None:
    """What a layer keeps grows with the prefix, holds at one position, or is of no use later: there is no fourth."""
    assert {kind.name for kind in Kind} == {"CHAIN", "SNAPSHOT", "NONE"}
    for row in bind(facts(), TABLE):
        assert (row.kind is Kind.CHAIN) == (row.spec.reach is not None)
        assert row.spec.votes == (row.kind is not Kind.NONE)
    for name in TABLE:
        with pytest.raises(UnsupportedModelError, match=name):
            bind(facts(), {other: row for other, row in TABLE.items() if other != name})
    # With all of it kept up to 2,304 tokens: at any position before, at that one alone, or no matter where.
    model, whole = XHybrid(), prompt_of(2304)
    for name in ("XMla", "XCsa", "XSwa"):
        model.keep_chain(name, whole, 2304)
    for name in ("XMamba2", "XKda"):
        model.keep_states(name, whole, [2304])
    for row, length in itertools.product(model.rows.values(), (1, 128, 129, 640, 2304, 2305, 3000)):
        size = max(row.block_tokens, HASH_TOKENS)  # by itself, a state after any token would need a hash for any
        served = resolve_hit(
            prompt_of(length), [replace(row, block_tokens=size)], model.blocks, model.states
        ).resume_tokens
        chain, state = min((length - 1) // size * size, 2304), 2304 * (length > 2304)
        assert served == {Kind.CHAIN: chain, Kind.SNAPSHOT: state, Kind.NONE: 0}[row.kind]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=2, max_size=6, unique=True))
def test_closed_loop_2_identity_is_complete(branches: list[tuple[int, int]]) -> None:
    """Kind of group, position and prefix are all in a name: prompts that part anywhere never share one beyond that."""
    rows = [row for row in bind(facts(), TABLE) if row.spec.votes]
    prompts = [prompt_of(64 * length, unlike_from=64 * cut) for length, cut in branches]
    units: dict[tuple[bytes, bytes], tuple[int, int]] = {}
    for row, prompt in itertools.product(rows, prompts):
        for end in range(128, prompt.hashed_tokens + 1, 128):
            key = (row.seed, prompt.prefix(end))
            assert units.setdefault(key, (row.group, end)) == (row.group, end)
    # In a backend, with the hashes that an engine would have.
    assert len({physical_id(b"n" * 16, seed, sha256(prefix).digest()) for seed, prefix in units}) == len(units)


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(1, 30)), st.sets(st.integers(1, 30)), st.integers(1, 30), st.integers(0, 30))
def test_no_state_answers_for_another_prefix(mamba: set[int], kda: set[int], cut: int, chains: int) -> None:
    """Position right, content wrong: a prompt that parted from another at `cut` resumes at or before it."""
    model, prompt = XHybrid(), prompt_of(31 * 128)
    for name in ("XMla", "XCsa", "XSwa"):
        model.keep_chain(name, prompt, chains * 128)
    model.keep_states("XMamba2", prompt, [128 * position for position in sorted(mamba)])
    model.keep_states("XKda", prompt, [128 * position for position in sorted(kda)])
    other = prompt_of(31 * 128, unlike_from=cut * 128)
    both = {position for position in mamba & kda if position <= min(chains, cut)}
    assert model.coordinator.lookup(other).resume_tokens == 128 * max(both, default=0)
    assert state_positions(model.coordinator, other, 128) == [128 * one for one in sorted(mamba & kda) if one <= cut]


def test_closed_loop_3_decision_is_one_pure_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same question gives the same answer, changes nothing, and asks each group about each prefix once."""
    model, prompt = XHybrid(), prompt_of(3000)
    for name, tokens in (("XMla", 2560), ("XCsa", 2432), ("XSwa", 3000)):
        model.keep_chain(name, prompt, tokens)
    for name in ("XMamba2", "XKda"):
        model.keep_states(name, prompt, [1024, 2304])
    asked: Counter[tuple[int, bytes]] = Counter()
    for store in (model.blocks, model.states):
        answer = store.presences

        def presences(groups: Sequence[int], prefixes: Sequence[bytes], *, answer: Any = answer) -> Any:
            asked.update((group, prefix) for group in groups for prefix in prefixes)
            return answer(groups, prefixes)

        monkeypatch.setattr(store, "presences", presences)
    coordinator = model.coordinator
    hits = [resolve_hit(prompt, coordinator.rows, model.blocks, coordinator.states) for _ in range(3)]
    assert hits == [hits[0]] * 3
    assert (hits[0].chain_tokens, hits[0].resume_tokens) == (2432, 2304)
    # Once for each of three answers, and once more where the cause of a loss is looked for.
    assert max(asked.values()) <= 6
    asked.clear()
    assert not resolve_hit(prompt_of(2305), coordinator.rows, model.blocks, coordinator.states).lost
    assert set(asked.values()) == {1}
    assert {group for group, _ in asked} == {row.group for row in coordinator.rows}
    assert model.blocks.pinned_slots == model.states.pinned_slots == 0


@pytest.mark.usefixtures("rows_of_the_model")
def test_closed_loop_4_what_was_loaded_is_the_requests_own(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From promise to load a request's units are pinned, then it has copies. All else is wiped at each step."""
    engine = XHybridEngine(hybrid, ROOMY, num_blocks=100, max_step_tokens=256)
    prompt = tokens_of(1100)
    expected = SimEngine.expected(prompt, 8)
    assert engine.generate("cold", prompt, 8) == expected
    assert engine.reset_local()
    schedule, pinned = engine.scheduler.schedule, []

    def schedule_and_wipe() -> Any:
        output = schedule()
        coordinator = engine.side.coordinator
        pinned.append(coordinator.blocks.pinned_slots + coordinator.states.pinned_slots)
        wipe(engine)
        return output

    monkeypatch.setattr(engine.scheduler, "schedule", schedule_and_wipe)
    engine.add("warm", prompt, 8)
    for _ in range(50):
        engine.step()
        if counted(engine, "loaded_tokens"):
            break
    assert max(pinned) == 8 + 8 + 4 + 2  # blocks of the two whole chains and of the window, states
    assert len(engine.outputs["warm"]) < 8
    engine.run()
    assert engine.outputs["warm"] == expected
    assert counted(engine, "adopted_tokens") == 1024
    assert_at_rest(engine)
    engine.close()


def wipe(engine: SimEngine) -> None:
    """Evict whatever is not in use, and overwrite where it was."""
    coordinator = engine.side.coordinator
    for arena in (*coordinator.blocks.arenas, *coordinator.states.arenas):
        for slot in range(arena.plan.slots):
            if arena.evict(slot):
                for worker in engine.ranks:
                    worker.connector._worker._slots[arena.plan.groups[0]].row(slot)[:] = 0xEE


def test_closed_loop_5_a_new_kind_is_a_row() -> None:
    """No class of vLLM's connector interface but one, and no spec class or model is named outside of the table."""
    connectors, named = [], []
    for file in sorted((ROOT / "src").rglob("*.py")):
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and "KVConnectorBase_V1" in map(ast.unparse, node.bases):
                connectors.append(node.name)
            if isinstance(node, ast.Constant) and re.fullmatch(r"\w+Spec", str(node.value)):
                named.append(file.name)
    assert connectors == ["UcmCacheConnector"]
    assert set(named) == {"spec.py"}


# -- the whole model through a simulated engine -----------------------------------------------------------------------

HOST = {"host": {"blocks": "48MiB", "snapshots": "48MiB"}}


@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (4, STAGES)])
def test_ninety_six_layers_cold_resumed_evicted_and_restarted(
    start: Start, tmp_path: Path, ranks: int, stages: int
) -> None:
    extra = {**HOST, "backend": {"url": tmp_path.as_uri()}, "retention": {"interval_tokens": 64}}
    options = {"ranks": ranks, "stages": stages, "max_step_tokens": 96, "num_blocks": 120}
    engine = start(ENGINE_GROUPS, extra, **options)
    prompt = tokens_of(200)
    longer = [*prompt, *SimEngine.expected(prompt, 4), *tokens_of(30, seed=9)]
    for name, text in (("cold", prompt), ("external", prompt), ("longer", longer)):
        assert engine.generate(name, text) == SimEngine.expected(text, 4)
        assert engine.reset_local()
    assert engine.counts["adopted_tokens"] == 2 * 192
    engine.run()
    assert_at_rest(engine)
    engine.close()
    small = {**extra, "host": {"blocks": "6MiB", "snapshots": "3MiB"}}
    restarted = start(ENGINE_GROUPS, small, **options)
    for i, text in enumerate((prompt, tokens_of(180, seed=3), tokens_of(190, seed=4), longer)):
        assert restarted.generate(f"restarted {i}", text) == SimEngine.expected(text, 4)
        assert restarted.reset_local()
    assert restarted.counts["read_bytes"] > 0
    assert restarted.counts["adopted_tokens"] == 192 + 224
    assert_at_rest(restarted)


def test_keys_of_the_ten_rows_differ_in_kind() -> None:
    """One prefix, ten groups: as many seeds."""
    rows = bind(facts(), TABLE)
    assert len({row.seed for row in rows}) == 10
    assert {row.rank_rule for row in rows if row.spec.votes} == set(RankRule)
    positions = np.array([128, 2304], dtype=np.int64)
    assert all((row.first_needed(positions) <= positions).all() for row in rows)


# -- the same with all its ranks: TP=8, PP=2, blocks of 128 and 64 tokens ----------------------------------------------

ROOMY = {"host": {"blocks": "64MiB", "snapshots": "2MiB"}}


@pytest.fixture
def rows_of_the_model() -> Iterator[None]:
    """The ten rows, registered as an integrator's module does it, for one test."""
    before = dict(SPEC_TABLE)
    for row in TABLE.values():
        register(row)
    yield
    SPEC_TABLE.clear()
    SPEC_TABLE.update(before)


def counted(engine: SimEngine, name: str) -> int:
    return int(engine.counts.get(name, 0))


@pytest.mark.usefixtures("rows_of_the_model")
def test_figure_13_in_an_engine_of_sixteen_ranks(hybrid: Path) -> None:
    """What a request for 3,000 tokens left is cut back to figure 13; the next one resumes at 2,304, byte for byte."""
    engine = XHybridEngine(hybrid, ROOMY, num_blocks=100, max_step_tokens=256)
    tokens = tokens_of(3000)
    engine.add("cold", tokens)
    hashes = engine.requests["cold"].block_hashes
    engine.run()
    assert engine.reset_local()
    prompt, coordinator = Prompt(3000, list(hashes[: 3000 // 64]), 64), engine.side.coordinator
    # Checkpoints where steps of 256 tokens ended, and at the prompt's end.
    assert state_positions(coordinator, prompt, 128) == [*range(256, 2817, 256), 2944]
    for position in (2560, 2816, 2944):
        assert coordinator.states.give_up(prompt.prefix(position))
    for group, held in ((0, 2560), (1, 2432)):
        (arena,) = (arena for arena in coordinator.blocks.arenas if group in arena.plan.groups)
        for end in range(held + 128, 2945, 128):
            slot = coordinator.blocks.slot(BlockKey(group, prompt.prefix(end), end))
            assert slot is not None
            assert arena.evict(slot)
    hit = coordinator.lookup(prompt)
    assert (hit.chain_tokens, hit.resume_tokens, hit.lost) == (2432, 2304, {"not_offered": 128})
    assert "adopted_tokens" not in engine.counts
    assert engine.generate("resumed", tokens) == SimEngine.expected(tokens, 4)
    assert (counted(engine, "chain_tokens"), counted(engine, "adopted_tokens")) == (2432, 2304)
    assert_at_rest(engine)
    engine.close()


@pytest.mark.usefixtures("rows_of_the_model")
def test_sixteen_ranks_cold_resumed_evicted_and_restarted(hybrid: Path, tmp_path: Path) -> None:
    disk = {**ROOMY, "backend": {"url": tmp_path.as_uri()}}
    engine = XHybridEngine(hybrid, disk, num_blocks=160, max_step_tokens=256)
    texts = [tokens_of(1100, seed=seed) for seed in range(4)]
    for i, text in enumerate(texts):
        assert engine.generate(f"cold {i}", text) == SimEngine.expected(text, 4)
    assert engine.reset_local()
    # Together in one batch, each from its own bytes; then a turn more.
    for i, text in enumerate(texts):
        engine.add(f"resumed {i}", text)
    engine.run()
    assert all(engine.outputs[f"resumed {i}"] == SimEngine.expected(text, 4) for i, text in enumerate(texts))
    assert counted(engine, "adopted_tokens") == 4 * 1024
    longer = [*texts[0], *SimEngine.expected(texts[0], 4), *tokens_of(300, seed=9)]
    assert engine.reset_local()
    assert engine.generate("longer", longer) == SimEngine.expected(longer, 4)
    assert counted(engine, "adopted_tokens") == 5 * 1024
    assert_at_rest(engine)
    engine.close()
    # Latents and compressed latents once a stage, the rest once a rank.
    files = Counter((file.parents[1].name, file.parents[2].name) for file in tmp_path.rglob("*.kv"))
    blocks, states = 4 * 8 + 2, counted(engine, "saved_states")
    assert sorted(files.values()) == [blocks + states] * 14 + [3 * blocks + states] * 2
    # A restarted engine finds all of it, with host memory for two of the texts: what does not fit is read again.
    little = {**disk, "host": {"blocks": "8MiB", "snapshots": "512KiB"}}
    restarted = XHybridEngine(hybrid, little, num_blocks=160, max_step_tokens=256)
    read: list[int] = []
    for again in range(2):
        for i, text in enumerate((*texts, longer)):
            assert restarted.generate(f"restarted {again} {i}", text) == SimEngine.expected(text, 4)
            assert restarted.reset_local()
        read.append(counted(restarted, "read_bytes") - sum(read))
    assert counted(restarted, "adopted_tokens") == 2 * (4 * 1024 + 1280)
    assert counted(restarted, "evicted_units") > 0
    assert min(read) > 0
    assert_at_rest(restarted)
    restarted.close()


@pytest.mark.usefixtures("rows_of_the_model")
@pytest.mark.parametrize("part", range(len(PARTS)), ids=[part.name for part in PARTS])
def test_a_wrong_byte_in_any_kind_of_layer_is_seen(hybrid: Path, part: int) -> None:
    """So the engine above can fail: one byte of one layer of one rank."""
    engine = XHybridEngine(hybrid, ROOMY, num_blocks=40, max_step_tokens=256)
    engine.add("one", tokens_of(600), 4)
    while engine.requests["one"].num_computed_tokens < 600:  # no multiple of 16, so that a group of tokens is open
        engine.step()
    column = {"state": 599 // 64, "chain": 3}.get(PARTS[part].kind, 0)
    block = engine.scheduler.kv_cache_manager.get_block_ids("one")[PARTS[part].group][column]
    engine.ranks[13].pages[part, 0][block, -1, -1, -1] ^= np.uint64(1 << 56)
    with pytest.raises(WrongBytesError, match=f"rank 13, {PARTS[part].name}"):
        engine.run()
    engine.close()
