"""Real engines at the edges: no chunked prefill, synchronous loads, damage between runs, preemption, aborts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.process import run
from tests.e2e.scenarios import lone_prompts

pytestmark = pytest.mark.e2e
Checkpoint = Callable[[str], Path]


def test_mla_on_cpu_promises_all_but_the_last_token_or_nothing(checkpoint: Checkpoint, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {
        "model": str(checkpoint("deepseek-v2")),
        "extra": {"backend": {"url": (tmp_path / "store").as_uri(), "when_slow": "load"}},
    }
    first = run("mla", {**arguments, "fresh": True})
    second = run("mla", {**arguments, "answers": first["answers"]})
    plain = run("mla_reference", {**arguments, **{name: first[name] for name in ("answers", "block")}})
    block = first["block"]
    for result in (first, second):
        assert all(promise in (0, length - 1) for length, promise in result["promises"])
        lengths = [row["prompt"] for row in result["rows"]]
        assert {edge + offset for edge in (block, 2 * block) for offset in (-1, 0, 1)} <= set(lengths)
        hits = [row for row in result["rows"] if row["external"]]
        # Whenever the last token but one ends a block that the conversation filled.
        assert [row["prompt"] for row in hits] == [length for length in lengths if length % block == 1]
        assert len(hits) == 6
        for row in hits:
            assert row["external"] == row["prompt"] - 1
            assert row["tokens"] == row["expected"], row["prompt"]  # the continuation control
        for other, expected in zip(result["others"], plain["others"], strict=True):
            assert other["external"] == 0
            assert other["tokens"] == expected["tokens"]
        assert result["lost_blocks"] == 0
        assert result["counts"]["loaded_bytes"] > 0
    assert first["mismatches"] == []
    assert second["counts"]["read_bytes"] > 0


def test_eight_mla_requests_resume_at_once(checkpoint: Checkpoint, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {
        "model": str(checkpoint("deepseek-v2")),
        "extra": {"backend": {"url": (tmp_path / "store").as_uri(), "when_slow": "load"}},
    }
    first = run("eight_at_once", arguments)
    second = run("eight_at_once", {**arguments, "answers": first["answers"]})
    for result in (first, second):
        assert len(result["rows"]) == 8
        for row in result["rows"]:
            assert row["external"] == row["prompt"] - 1
            assert row["tokens"] == row["expected"], row["prompt"]
        assert result["lost_blocks"] == 0
    assert second["counts"]["read_bytes"] > 0


def test_a_synchronous_load_is_wrong_on_a_recurrent_model(checkpoint: Checkpoint) -> None:
    """So that nobody "optimises" loads back to synchronous ones: docs/adr/0002."""
    arguments: dict[str, Any] = {"model": str(checkpoint("qwen3-next"))}
    right = run("synchronous", {**arguments, "synchronous": False})
    wrong = run("synchronous", {**arguments, "synchronous": True})
    for result in (right, wrong):
        assert result["warm"]["external"] == result["block"]
    assert right["warm"]["tokens"] == right["cold"]["tokens"] == wrong["cold"]["tokens"]
    assert wrong["warm"]["tokens"] != wrong["cold"]["tokens"]


def flip_a_bit(files: list[Path], where: float) -> None:
    data = bytearray(files[0].read_bytes())
    data[int(where * (len(data) - 1))] ^= 4
    files[0].write_bytes(data)


def cut(files: list[Path], nbytes: int) -> None:
    files[0].write_bytes(files[0].read_bytes()[: files[0].stat().st_size - nbytes])


def swap(files: list[Path]) -> None:
    for one, other in pairwise(files):
        if one.stat().st_size == other.stat().st_size:
            content = one.read_bytes()
            one.write_bytes(other.read_bytes())
            other.write_bytes(content)
            return
    raise AssertionError("no two files of one size")


def unreadable(files: list[Path]) -> None:
    # As another user's: the engine that follows runs without the right to override permissions.
    files[0].parent.chmod(0)


def not_a_folder(files: list[Path]) -> None:
    shutil.rmtree(files[0].parent)
    files[0].parent.write_text("not a folder")


def foreign(files: list[Path]) -> None:
    files[0].write_bytes(b"\x80\x04\x95 something else entirely")


# What is done to a prompt's files, and how it is counted. A file that is gone before the start is a plain miss; a
# folder that cannot be listed or written is passed over at the start, and counted when it is next written to.
DAMAGES: dict[str, tuple[Callable[[list[Path]], object], str | None]] = {
    "deleted": (lambda files: files[0].unlink(), None),
    "truncated": (lambda files: cut(files, 100), "failures/stage:length"),
    "emptied": (lambda files: cut(files, files[0].stat().st_size), "failures/stage:length"),
    "a bit in the header": (lambda files: flip_a_bit(files, 0.0001), "failures/stage:"),
    "a bit in the middle": (lambda files: flip_a_bit(files, 0.5), "failures/stage:checksum"),
    "the last bit": (lambda files: flip_a_bit(files, 1.0), "failures/stage:checksum"),
    "swapped": (swap, "failures/stage:key"),
    "unreadable": (unreadable, "failures/write:BackendError"),
    "not a folder": (not_a_folder, "failures/write:BackendError"),
    "foreign": (foreign, "failures/stage:length"),
    "none": (lambda files: None, None),
}
WITHOUT_OVERRIDE = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search", "--inh-caps", "-all"]


@pytest.mark.parametrize("shape", ["qwen3-next", "llama"])
def test_damage_between_runs_costs_only_time(shape: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    store = tmp_path / "store"
    arguments: dict[str, Any] = {
        "model": str(checkpoint(shape)),
        "extra": {"backend": {"url": store.as_uri(), "when_slow": "load"}},
        "folder": str(store),
        "prompts": len(DAMAGES),
    }
    cold = run("fill", arguments)
    whole = tmp_path / "whole"
    store.rename(whole)
    for policy in ("fail", "recompute"):
        shutil.copytree(whole, store)
        for row, (damage, _) in zip(cold["rows"], DAMAGES.values(), strict=True):
            damage([Path(file) for file in row["files"]])
        warm = run("use", {**arguments, "policy": policy}, prefix=WITHOUT_OVERRIDE)
        for (name, (_, counter)), before, row in zip(DAMAGES.items(), cold["rows"], warm["rows"], strict=True):
            assert row["tokens"] == row["second"]["tokens"] == before["tokens"], (policy, name)
            assert row["reason"] == row["second"]["reason"] == "length", (policy, name)
            failed = {key: n for key, n in row["counts"].items() if key.startswith("failures")}
            assert counter is None or any(key.startswith(counter) for key in failed), (policy, name, failed)
            if name == "none":
                assert (row["external"], failed) == (2 * cold["block"], {})
            # No file is tried twice, and each failure costs a lookup or two, never a loop.
            staged = sum(n for key, n in failed.items() if key.startswith("failures/stage"))
            assert staged <= len(before["files"]), (policy, name)
            assert row["steps"] < 1000, (policy, name)
            # Saved anew by the first run, the second resumes in full.
            assert row["second"]["external"] == 2 * cold["block"], (policy, name)
        assert warm["lost_blocks"] == 0
        for folder in store.rglob("*"):
            if folder.is_dir():
                folder.chmod(0o700)
        shutil.rmtree(store)


@pytest.mark.parametrize("shape", ["llama", "gemma3", "gpt-oss", "lfm2", "qwen3-next", "deepseek-v2"])
def test_preempted_alone_the_tokens_are_those_of_an_engine_without_a_cache(shape: str, checkpoint: Checkpoint) -> None:
    arguments: dict[str, Any] = {"model": str(checkpoint(shape)), "options": {"max_model_len": 1024}}
    result = run("preempted_alone", arguments)
    plain_options = dict(arguments["options"])
    if shape not in ("llama", "deepseek-v2"):
        # vLLM itself keeps a state at every block then, so that it can resume where we do.
        plain_options["prefix_cache_retention_interval"] = result["block"]
    plain = run("not_preempted", {**arguments, "options": plain_options, "rows": result["rows"]})
    for prompt, one, expected in zip(lone_prompts(result["block"]), result["rows"], plain["rows"], strict=True):
        computed = len(prompt) + one["cut"]
        deepest = (computed - 1) // result["block"] * result["block"]
        if shape == "deepseek-v2" and deepest != computed - 1:
            deepest = 0  # without chunked prefill, all but the last token or nothing
        assert one["preemptions"] == 1
        assert one["adopted"] == deepest, computed
        assert one["tokens"][: one["cut"]] == expected["whole"][: one["cut"]], computed
        # An MLA hit of n-1 goes on where the engine was; anything else is the engine's own resume from there.
        rest = expected["whole"][one["cut"] :] if shape == "deepseek-v2" and deepest else expected["rest"]
        assert one["tokens"][one["cut"] :] == rest, computed
        assert shape == "deepseek-v2" or expected["local"] == deepest, computed
    assert any(one["adopted"] for one in result["rows"])
    assert (result["jobs"], result["lost_blocks"], result["failures"]) == (0, 0, [])


# Blocks of the KV space, tokens to generate.
PRESSURE = {
    "llama": (14, 200),
    "gemma3": (24, 200),
    "gpt-oss": (24, 200),
    "lfm2": (24, 200),
    "qwen3-next": (18, 300),
    "deepseek-v2": (40, 100),
}
# vLLM's own LFM2 and MLA on CPU answer differently in a batch than alone; asserted below, so that this ends when they
# no longer do.
BATCH_DEPENDENT = {"lfm2", "deepseek-v2"}


@pytest.mark.parametrize("shape", list(PRESSURE))
def test_preemption_and_aborts(shape: str, checkpoint: Checkpoint) -> None:
    blocks, outputs = PRESSURE[shape]
    arguments: dict[str, Any] = {
        "model": str(checkpoint(shape)),
        "blocks": blocks,
        "outputs": outputs,
        # Without chunked prefill (MLA on CPU), a step must hold the longest prompt.
        "options": {"max_num_batched_tokens": 512, "max_model_len": 512 if shape == "deepseek-v2" else 1536},
    }
    result = run("pressure", arguments)
    plain = run("calm", {**arguments, "crowd": result["crowd"]})
    assert sum(len(one["preempted"]) for one in result["crowd"]) > 0
    for one, parts in zip(result["crowd"], plain["crowd"], strict=True):
        cuts = [0, *one["preempted"], outputs]
        assert len(one["tokens"]) == outputs
        for (start, end), expected in zip(pairwise(cuts), parts, strict=True):
            if shape not in BATCH_DEPENDENT:
                assert one["tokens"][start:end] == expected[: end - start]
    alone = [parts[0] for parts in plain["crowd"]]
    assert (plain["together"] != alone) == (shape in BATCH_DEPENDENT)
    assert {one["free"] for one in result["aborted"]} == {result["baseline"]}
    seen = {state for one in result["aborted"] for state in one["states"]}
    assert {"WAITING", "RUNNING", "WAITING_FOR_REMOTE_KVS"} <= seen
    assert result["after"]["external"] == 3 * result["block"]
    # An MLA hit of n-1 goes on in the decode path, for which a cold prefill is no control (the continuation is).
    assert shape == "deepseek-v2" or result["after"]["tokens"] == plain["after"]["tokens"]
    assert result["jobs"] == 0
