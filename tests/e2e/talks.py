"""Conversations in an engine's process; each function takes JSON and returns JSON."""

from __future__ import annotations

import random
from typing import Any

from tests.e2e.scenarios import _ended, _engine, blocks_not_given_back, tokens

CUTS = (5, 12, 21)  # tokens of the answer that are there after each turn
ANSWER = 30


def prompts_of(block: int, count: int) -> list[list[int]]:
    """Beginnings of conversations: at every edge of a block, inside the first one, and at odd places."""
    lengths = [block - 1, block, block + 1, 20, block + 64, 2 * block - 5, 1, 2 * block + 1, block // 2 + 3]
    return [tokens(lengths[i % len(lengths)] + i // len(lengths), seed=1000 + i) for i in range(count)]


def others_of(block: int, count: int) -> list[list[int]]:
    """What follows a prompt where its answer is not what was said: nothing of it is in any answer."""
    return [tokens(9, seed=2000 + i) for i in range(count)]


def talks(arguments: dict[str, Any]) -> dict[str, Any]:
    """Conversations in turns, each from where the one before ended, with side requests and aborts in between."""
    engine = _engine(arguments)
    prompts, answers = prompts_of(engine.block_tokens, arguments["count"]), arguments["answers"]
    rng, rows = random.Random(1), []
    for begin, end in zip((0, *CUTS), CUTS, strict=False):
        order = list(range(len(prompts)))
        rng.shuffle(order)
        for i in order:
            engine.reset_local()
            if rng.random() < 0.3:
                name = engine.add(tokens(rng.randrange(5, 60), seed=rng.randrange(10**6)), 8)
                for _ in range(rng.randrange(1, 5)):
                    engine.step()
                engine.abort(name)
            text = [*prompts[i], *answers[i][:begin]]
            rows.append({"talk": i, "begin": begin, "text": len(text), **engine.generate(text, end - begin)})
    restores = []
    for i, other in enumerate(others_of(engine.block_tokens, len(prompts))):
        engine.reset_local()
        text = [*prompts[i], *answers[i][: CUTS[-2]], *other]
        restores.append({"talk": i, "at": len(text) - len(other), **engine.generate(text, 8)})
    result = {"block": engine.block_tokens, "rows": rows, "restores": restores}
    side = engine.connector._scheduler
    result["held"] = side._sessions.registry.held.size.total
    side._sessions.registry.reset()
    result["pinned"] = side.coordinator.blocks.pinned_slots + side.coordinator.states.pinned_slots
    result |= {"lost_blocks": blocks_not_given_back(engine), "counts": dict(engine.counts)}
    return _ended(engine, result)


def after_a_restart(arguments: dict[str, Any]) -> dict[str, Any]:
    """Each conversation goes on in another process."""
    engine = _engine(arguments)
    engine.read_index()
    rows = []
    for prompt, answer in zip(prompts_of(engine.block_tokens, arguments["count"]), arguments["answers"], strict=True):
        text = [*prompt, *answer[: CUTS[-1]]]
        rows.append({"text": len(text), **engine.generate(text, ANSWER - CUTS[-1])})
    return _ended(engine, {"rows": rows})


def reference(arguments: dict[str, Any]) -> dict[str, Any]:
    """What an engine without a connector says: each whole answer, and what follows the other ends."""
    engine = _engine(arguments, connector=False)  # which splits its prefills as one with a connector does
    block = arguments["block"]
    prompts = prompts_of(block, arguments["count"])

    def cold(prompt: list[int], count: int) -> list[int]:
        engine.reset_local()
        found: list[int] = engine.generate(prompt, count)["tokens"]
        return found

    answers = [cold(prompt, ANSWER) for prompt in prompts]
    others = [
        cold([*prompt, *answer[: CUTS[-2]], *other], 8)
        for prompt, answer, other in zip(prompts, answers, others_of(block, len(prompts)), strict=True)
    ]
    return _ended(engine, {"answers": answers, "others": others})
