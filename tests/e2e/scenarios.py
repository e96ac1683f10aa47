"""What happens inside an engine's process; each function takes JSON and returns JSON."""

from __future__ import annotations

import importlib
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.e2e.engine import Engine, transfer_config

VOCAB = 500
OUTPUT = 12


def tokens(count: int, seed: int) -> list[int]:
    """Random token ids."""
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(count)]


def edge_prompts(block: int) -> list[list[int]]:
    """Prompts at every edge of a block, a long one, and two that share a prefix."""
    lengths = [block - 1, block, block + 1, 2 * block - 1, 2 * block, 2 * block + 1, 4 * block + 17]
    prompts = [tokens(length, seed=length) for length in lengths]
    shared = tokens(2 * block + 5, seed=77)
    return [*prompts, [*shared, *tokens(30, seed=1)], [*shared, *tokens(block + 30, seed=2)]]


def _engine(arguments: dict[str, Any], connector: bool = True, **options: Any) -> Engine:
    extra = {"host": {"blocks": "128MiB", "snapshots": "128MiB"}, **arguments.get("extra", {})}
    transfer = transfer_config(extra, arguments.get("policy", "fail")) if connector else None
    return Engine(arguments["model"], transfer, **{**arguments.get("options", {}), **options})


def _ended(engine: Engine, result: dict[str, Any]) -> dict[str, Any]:
    """Stop the engine, and say how long that took and how many threads storage had."""
    result["storage_threads"] = sum(thread.name.startswith("ucmcache") for thread in threading.enumerate())
    began_s = time.monotonic()
    engine.shutdown()
    result["shutdown_s"] = time.monotonic() - began_s
    return result


def legs(arguments: dict[str, Any]) -> dict[str, Any]:
    """Cold, external, local for every edge prompt; then a second turn; then eight at once."""
    engine = _engine(arguments)
    block = engine.block_tokens
    rows: list[dict[str, Any]] = []
    for prompt in edge_prompts(block):
        row: dict[str, Any] = {"prompt": len(prompt)}
        loaded = 0
        for leg in ("cold", "external", "local"):
            if leg != "local":
                engine.reset_local()
            row[leg] = engine.generate(prompt, OUTPUT)
            row[leg]["bytes"] = engine.counts["loaded_bytes"] - loaded
            loaded = engine.counts["loaded_bytes"]
        rows.append(row)
    first, answer = conversation(engine)
    engine.reset_local()
    second = engine.generate(next_turn(first, answer, block), OUTPUT)
    engine.reset_local()
    continued = engine.generate(continuation(first, answer, block), OUTPUT)
    engine.reset_local()
    crowd = engine.generate_all(crowd_prompts(block), OUTPUT)
    result = {
        "block": block,
        "rows": rows,
        "first": first,
        "answer": answer,
        "turn": second,
        "continued": continued,
        "crowd": crowd,
        "counts": dict(engine.counts),
        "jobs": engine.connector._scheduler.jobs_in_flight,
        "lost_blocks": blocks_not_given_back(engine),
    }
    return _ended(engine, result)


def first_prompt(block: int) -> list[int]:
    """What a conversation begins with."""
    return tokens(block + 40, seed=5)


def conversation(engine: Engine) -> tuple[list[int], list[int]]:
    """A first turn whose answer fills a block beyond the prompt's."""
    first = first_prompt(engine.block_tokens)
    return first, engine.generate(first, engine.block_tokens + OUTPUT)["tokens"]


def next_turn(first: list[int], answer: list[int], block: int) -> list[int]:
    """The second turn: the first, what was answered up to a little beyond a block's end, and something new."""
    return [*first, *answer[: block - 20], *tokens(25, seed=6)]


def continuation(first: list[int], answer: list[int], block: int) -> list[int]:
    """Text that the engine generated itself, cut one token behind a block's end: it must go on as it did then."""
    return [*first, *answer[: 2 * block - len(first) + 1]]


def crowd_prompts(block: int) -> list[list[int]]:
    """Eight prompts for one batch, each with something to resume from and none adding to another's prefix.

    So all of them start in one step, with a connector as without: some models' numbers depend on the batch.
    """
    return [*edge_prompts(block)[2:], first_prompt(block)]


def blocks_not_given_back(engine: Engine) -> int:
    """Blocks missing from the pool after a reset: 0 unless something leaks."""
    engine.reset_local()
    return int(engine.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1 - engine.free_blocks())


def again(arguments: dict[str, Any]) -> dict[str, Any]:
    """After a restart: every edge prompt from disk, then locally, and the second turn."""
    engine = _engine(arguments)
    rows = []
    for prompt in edge_prompts(engine.block_tokens):
        engine.reset_local()
        # What this process itself kept must not answer for the disk.
        disk = engine.generate(prompt, OUTPUT)
        rows.append({"prompt": len(prompt), "disk": disk, "local": engine.generate(prompt, OUTPUT)})
    talk = (arguments["first"], arguments["answer"], engine.block_tokens)
    turn = engine.generate(next_turn(*talk), OUTPUT)
    engine.reset_local()
    continued = engine.generate(continuation(*talk), OUTPUT)
    result = {
        "rows": rows,
        "turn": turn,
        "continued": continued,
        "counts": dict(engine.counts),
        "metrics": {
            metric.name: metric.value
            for metric in engine.llm.get_metrics()
            if metric.name.startswith("vllm:ucmcache_") and not metric.labels.get("cause")
        },
    }
    return _ended(engine, result)


def reference(arguments: dict[str, Any]) -> dict[str, Any]:
    """The engine without a connector, its own prefix cache never reset.

    The numbers of some models depend on where a prefill is split, so the fair comparison for a resume is the engine's
    own resume at the same token. A prompt that shares nothing with an earlier one is computed cold.
    """
    if arguments["keeps_states_sparsely"]:
        arguments["options"]["prefix_cache_retention_interval"] = arguments["block"]
    engine = _engine(arguments, connector=False)
    block = engine.block_tokens
    result: dict[str, Any] = {"rows": [engine.generate(prompt, OUTPUT) for prompt in edge_prompts(block)]}
    first, result["answer"] = conversation(engine)
    result["turn"] = engine.generate(next_turn(first, result["answer"], block), OUTPUT)
    result["crowd"] = engine.generate_all(crowd_prompts(block), OUTPUT)
    engine.shutdown()
    return result


def mla(arguments: dict[str, Any]) -> dict[str, Any]:
    """Where the engine cannot continue a prefill from cached context: n-1 tokens or none, and what each gives."""
    from ucmcache.connector.scheduler import SchedulerSide
    from ucmcache.connector.transfer import HostTransfer

    saved: dict[tuple[int, int], bytes] = {}
    mismatches: list[int] = []
    save, load = HostTransfer.save, HostTransfer.load
    promises: list[tuple[int, int]] = []
    lookup = SchedulerSide.lookup

    def watched_save(transfer: HostTransfer, copies: Any, *rest: Any) -> Any:
        ticket = save(transfer, copies, *rest)
        for copy in copies:
            saved[copy.group, copy.slot] = transfer._slots[copy.group].row(copy.slot).tobytes()
        return ticket

    def watched_load(transfer: HostTransfer, copies: Any) -> Any:
        ticket = load(transfer, copies)
        for copy in copies:
            block = b"".join(run.blocks[copy.block].tobytes() for run in transfer._runs[copy.group])
            if arguments.get("fresh") and block != saved[copy.group, copy.slot]:
                mismatches.append(copy.block)
        return ticket

    def watched_lookup(side: SchedulerSide, request: Any, local_tokens: int) -> int | None:
        answer = lookup(side, request, local_tokens)
        if answer is not None:
            promises.append((request.num_tokens, answer))
        return answer

    setattr(HostTransfer, "save", watched_save)
    setattr(HostTransfer, "load", watched_load)
    setattr(SchedulerSide, "lookup", watched_lookup)
    engine = _engine(arguments, max_num_batched_tokens=4096)
    block = engine.block_tokens
    # From block - 1 on over the first two ends of blocks, over two later ones, and far behind.
    starts = (4, 160, 400)
    answers = arguments.get("answers") or {
        str(start): engine.generate(tokens(start, seed=start), 60)["tokens"] for start in starts
    }
    rows = []
    for start in starts:
        answer = answers[str(start)]
        for generated in range(block - 5, 2 * block + 5):
            engine.poison_free()
            prompt = [*tokens(start, seed=start), *answer[:generated]]
            # Only a hit of n-1 goes on as the engine did; a prefill from token 0 is its own run.
            count = 20 if len(prompt) % block == 1 else 1
            rows.append(
                {
                    "prompt": len(prompt),
                    "expected": answer[generated:][:count],
                    **engine.generate(prompt, count),
                }
            )
    engine.poison_free()
    # Two prompts that share the first blocks of what is kept, with other suffixes: never a hit within.
    shared = [*tokens(160, seed=160), *answers["160"][: block + 3]]
    others = [engine.generate([*shared, *tokens(count, seed=count)], OUTPUT) for count in (31, block + 31)]
    result = {
        "block": block,
        "rows": rows,
        "others": others,
        "promises": promises,
        "mismatches": mismatches,
        "counts": dict(engine.counts),
        "answers": answers,
        "lost_blocks": blocks_not_given_back(engine),
    }
    engine.shutdown()
    return result


def mla_ranks(arguments: dict[str, Any]) -> dict[str, Any]:
    """MLA on several ranks: text that the engine generated itself, cut one token behind a block's end, goes on as then.

    `answers` of an earlier process are resumed from disk.
    """
    engine = _engine(arguments, max_num_batched_tokens=4096, enable_prefix_caching=False)
    block = engine.block_tokens
    starts = (4, 160)
    before = arguments.get("answers")
    answers = before or {
        str(start): engine.generate(tokens(start, seed=start), 2 * block + 20)["tokens"] for start in starts
    }
    engine.finish()
    rows = []
    for start in starts:
        for length in range((start // block + 1) * block + 1, start + len(answers[str(start)]), block):
            engine.poison_free()
            text = [*tokens(start, seed=start), *answers[str(start)]]
            rows.append({"prompt": length, "expected": text[length:][:20], **engine.generate(text[:length], 20)})
    result = {
        "block": block,
        "rows": rows,
        "answers": answers,
        "counts": dict(engine.counts),
        "jobs": engine.connector._scheduler.jobs_in_flight,
    }
    engine.shutdown()
    return result


def mla_reference(arguments: dict[str, Any]) -> dict[str, Any]:
    """Without a connector: the prompts with other suffixes, cold."""
    engine = _engine(arguments, connector=False, max_num_batched_tokens=4096)
    shared = [*tokens(160, seed=160), *arguments["answers"]["160"][: arguments["block"] + 3]]
    others = [engine.generate([*shared, *tokens(count, seed=count)], OUTPUT) for count in (31, arguments["block"] + 31)]
    engine.shutdown()
    return {"others": others}


def eight_at_once(arguments: dict[str, Any]) -> dict[str, Any]:
    """Eight conversations in one batch, and all eight resumed in one batch, each from one token behind a block's end.

    Their batches are alike in every step, so the tokens are, too, on a model whose numbers depend on the batch.
    """
    # Requests that ask the backend what it has of them would be admitted one after the other.
    arguments["extra"]["backend"]["existence_ttl"] = None
    engine = _engine(arguments, max_num_batched_tokens=4096)
    engine.read_index()
    block = engine.block_tokens
    generated = 12
    firsts = [tokens((1 + i % 4) * block + 1 - generated, seed=600 + i) for i in range(8)]
    answers = arguments.get("answers") or [one["tokens"] for one in engine.generate_all(firsts, generated + OUTPUT)]
    prompts = [[*first, *answer[:generated]] for first, answer in zip(firsts, answers, strict=True)]
    if "answers" in arguments:
        # From disk they would get ready one after the other, and their batches would not be alike.
        for prompt in prompts:
            engine.generate(prompt, 1)
    engine.poison_free()
    resumed = engine.generate_all(prompts, OUTPUT)
    result = {
        "rows": [
            {**one, "prompt": len(prompt), "expected": answer[generated:]}
            for one, prompt, answer in zip(resumed, prompts, answers, strict=True)
        ],
        "answers": answers,
        "counts": dict(engine.counts),
        "lost_blocks": blocks_not_given_back(engine),
    }
    engine.shutdown()
    return result


def fill(arguments: dict[str, Any]) -> dict[str, Any]:
    """Compute prompts one by one; tells which files each one left in the store."""
    engine = _engine(arguments)
    folder = Path(arguments["folder"])
    rows = []
    for seed in range(arguments["prompts"]):
        before = set(folder.rglob("*.kv"))
        engine.reset_local()
        answer = engine.generate(tokens(2 * engine.block_tokens + 50, seed=1000 + seed), OUTPUT)
        engine.finish()
        rows.append({"tokens": answer["tokens"], "files": sorted(map(str, set(folder.rglob("*.kv")) - before))})
    result = {"rows": rows, "block": engine.block_tokens}
    engine.shutdown()
    return result


def use(arguments: dict[str, Any]) -> dict[str, Any]:
    """Compute the prompts of `fill` from what is in the store now, each twice, counting what was tried."""
    engine = _engine(arguments)
    rows = []
    for seed in range(arguments["prompts"]):
        engine.reset_local()
        before, steps = engine.counts.copy(), engine.steps
        prompt = tokens(2 * engine.block_tokens + 50, seed=1000 + seed)
        one = engine.generate(prompt, OUTPUT)
        rows.append(
            {
                **one,
                "steps": engine.steps - steps,
                "counts": {name: n - before[name] for name, n in engine.counts.items() if n != before[name]},
            }
        )
        engine.reset_local()
        rows[-1]["second"] = engine.generate(prompt, OUTPUT)
    result = {"rows": rows, "lost_blocks": blocks_not_given_back(engine)}
    engine.shutdown()
    return result


def pressure(arguments: dict[str, Any]) -> dict[str, Any]:
    """A KV space too small for the batch, then aborts after every number of steps."""
    engine = _engine(arguments, num_gpu_blocks_override=arguments["blocks"])
    block = engine.block_tokens
    preempted = watch_preemptions(engine)
    names = [engine.add(prompt, arguments["outputs"]) for prompt in pressure_prompts(block)]
    engine.finish()
    crowd = [{"tokens": engine.outputs[name], "preempted": preempted.get(engine.ids[name], [])} for name in names]
    engine.reset_local()
    baseline = engine.free_blocks()
    aborted = []
    prompt = tokens(3 * block + 1, seed=400)
    for attempt in range(2):
        for steps in range(8):
            name = engine.add(prompt, 4)
            states = {str(engine.scheduler.requests[engine.ids[name]].status)}
            for _ in range(steps):
                engine.step()
                if engine.ids[name] in engine.scheduler.requests:
                    states.add(str(engine.scheduler.requests[engine.ids[name]].status))
            engine.abort(name)
            engine.finish()
            engine.reset_local()
            aborted.append({"attempt": attempt, "steps": steps, "states": sorted(states), "free": engine.free_blocks()})
    after = engine.generate(prompt, OUTPUT)
    result = {
        "block": block,
        "crowd": crowd,
        "aborted": aborted,
        "baseline": baseline,
        "after": after,
        "jobs": engine.connector._scheduler.jobs_in_flight if engine.connector is not None else 0,
        "counts": dict(engine.counts),
    }
    engine.shutdown()
    return result


def pressure_prompts(block: int) -> list[list[int]]:
    """The first is the longest, so it is the last ones, still within their second block, that must make room for it."""
    return [tokens(block + 140 - 30 * i, seed=300 + i) for i in range(5)]


def calm(arguments: dict[str, Any]) -> dict[str, Any]:
    """What `pressure` computes, by an engine without a connector that has room for it.

    A preempted request is prefilled anew with all that it had generated; so it is here, from each such point.
    """
    engine = _engine(arguments, connector=False)
    block, outputs = engine.block_tokens, arguments["outputs"]
    prompts = pressure_prompts(block)
    crowd = []
    for prompt, one in zip(prompts, arguments["crowd"], strict=True):
        parts = []
        for start in (0, *one["preempted"]):
            engine.reset_local()
            parts.append(engine.generate([*prompt, *one["tokens"][:start]], outputs - start)["tokens"])
        crowd.append(parts)
    engine.reset_local()
    after = engine.generate(tokens(3 * block + 1, seed=400), OUTPUT)
    engine.reset_local()
    together = engine.generate_all(prompts, outputs)
    result = {"crowd": crowd, "after": after, "together": [one["tokens"] for one in together]}
    engine.shutdown()
    return result


GENERATED = 5  # tokens that a request has of its own when it is preempted alone


def lone_prompts(block: int) -> list[list[int]]:
    """Prompts that end GENERATED tokens before, at and behind the ends of the first two blocks."""
    ends = [edge + offset for edge in (block, 2 * block) for offset in (-1, 0, 1, 2, 7)]
    return [tokens(end - GENERATED, seed=500 + end) for end in ends]


def preempted_alone(arguments: dict[str, Any]) -> dict[str, Any]:
    """One request at a time, preempted when it has generated a few tokens; its blocks are poisoned.

    Nothing else is in its batch, before or after. So its tokens can be compared on models whose numbers depend on what
    they are computed together with.
    """
    engine = _engine(arguments)
    rows = []
    for prompt in lone_prompts(engine.block_tokens):
        name = engine.add(prompt, GENERATED + OUTPUT)
        request = engine.scheduler.requests[engine.ids[name]]
        while request.num_output_tokens < GENERATED:
            engine.step()
        adopted = engine.counts["adopted_tokens"]
        engine.preempt_all()
        cut = request.num_output_tokens
        engine.finish()
        rows.append(
            {
                "tokens": engine.outputs[name],
                "cut": cut,
                "preemptions": request.num_preemptions,
                "adopted": engine.counts["adopted_tokens"] - adopted,
            }
        )
        engine.reset_local()
    result = {
        "block": engine.block_tokens,
        "rows": rows,
        "jobs": engine.connector._scheduler.jobs_in_flight,
        "lost_blocks": blocks_not_given_back(engine),
        "failures": [name for name in engine.counts if name.startswith("failures")],
    }
    engine.shutdown()
    return result


def not_preempted(arguments: dict[str, Any]) -> dict[str, Any]:
    """What `preempted_alone` computes, without a connector: in one go, and in two requests cut at the same token.

    The second of the two resumes from the engine's own prefix cache, if the model has one.
    """
    engine = _engine(arguments, connector=False)
    rows = []
    for prompt, one in zip(lone_prompts(engine.block_tokens), arguments["rows"], strict=True):
        whole = engine.generate(prompt, GENERATED + OUTPUT)["tokens"]
        rest = engine.generate([*prompt, *whole[: one["cut"]]], GENERATED + OUTPUT - one["cut"])
        rows.append({"whole": whole, "rest": rest["tokens"], "local": rest["local"]})
    engine.shutdown()
    return {"rows": rows}


def watch_preemptions(engine: Engine) -> dict[str, list[int]]:
    """By the engine's request id: how many tokens it had generated at each preemption; filled as the engine runs."""
    seen: dict[str, list[int]] = {}
    preempt = engine.scheduler._preempt_request

    def watched(request: Any, *args: Any, **kwargs: Any) -> Any:
        seen.setdefault(request.request_id, []).append(request.num_output_tokens)
        return preempt(request, *args, **kwargs)

    engine.scheduler._preempt_request = watched
    return seen


def synchronous(arguments: dict[str, Any]) -> dict[str, Any]:
    """One prompt cold and resumed, with loads answered as synchronous or as they are."""
    from ucmcache.connector.worker import WorkerSide

    engine = _engine(arguments)
    if arguments["synchronous"]:
        lookup = engine.connector.get_num_new_matched_tokens
        engine.connector.get_num_new_matched_tokens = lambda *args: (lookup(*args)[0], False)
        # The engine wants to hear only of loads that it waits for.
        setattr(WorkerSide, "take_finished", lambda worker: (set(), set()))
    prompt = tokens(engine.block_tokens + 3, seed=1)
    cold = engine.generate(prompt, OUTPUT)
    engine.reset_local()
    result = {"cold": cold, "warm": engine.generate(prompt, OUTPUT), "block": engine.block_tokens}
    engine.shutdown()
    return result


def main(arguments: Sequence[str]) -> None:
    """Command line: scenario (of another module of this folder as module.name), JSON arguments, file for the result."""
    module, _, name = arguments[0].rpartition(".")
    found = vars(importlib.import_module(f"tests.e2e.{module}")) if module else globals()
    scenario: Callable[[dict[str, Any]], Any] = found[name]
    Path(arguments[2]).write_text(json.dumps(scenario(json.loads(arguments[1]))))


if __name__ == "__main__":
    main(sys.argv[1:])
