"""Many conversations at once on small engines: every answer is right, and every byte that is read is checked."""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.sim.engine import VOCAB, SimEngine, blocks_of_one
from tests.sim.test_resume import MIXES, assert_at_rest

COUNT = int(os.environ.get("UCMCACHE_CONVERSATIONS", "30"))  # of each life; 200 make it a thousand
# Kind of model, ranks, order of hooks, scheduling; and what the sessions of it keep.
LIVES = [
    ("state", 1, "v1", False, "keep-current"),
    ("all", 2, "v2", True, "keep-current"),
    ("window", 1, "v2", False, "drop-current"),
    ("three states", 2, "v1", True, "drop-current"),
    ("full", 1, "v2", True, "keep-current"),
]
LONGEST_PROMPT, LONGEST_ANSWER = 160, 40


@dataclass
class Conversation:
    """One conversation: what has been said, and the request that is at work on it."""

    name: str
    text: list[int]
    turns_left: int
    salt: str | None
    request: str = ""
    turn: int = 0
    answer: int = 0


@dataclass
class Talks:
    """Conversations that go on side by side, are aborted and preempted, and survive restarts of their engine."""

    model: Path
    folder: Path
    life: tuple[str, int, str, bool, str]
    random: random.Random
    waiting: list[Conversation] = field(default_factory=list)
    at_work: list[Conversation] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    finished: int = 0

    def start(self) -> SimEngine:
        mix, ranks, order, asynchronous, mode = self.life
        step_tokens = self.random.choice([16, 64])
        return SimEngine(
            MIXES[mix],
            self.model,
            {
                "host": {"blocks": 300_000, "snapshots": 300_000},
                "backend": {"url": self.folder.as_uri()},
                "sessions": {"entries": self.random.choice([2, 6, 20]), "mode": mode},
            },
            # Little room: requests are preempted, and what they left is not in the engine any more.
            num_blocks=blocks_of_one(MIXES[mix], LONGEST_PROMPT + LONGEST_ANSWER, step_tokens * (1 + asynchronous)),
            max_step_tokens=step_tokens,
            max_seqs=4,
            ranks=ranks,
            order=order,
            asynchronous=asynchronous,
            policy="recompute",
        )

    def tokens(self, most: int) -> list[int]:
        return [self.random.randrange(VOCAB) for _ in range(self.random.randrange(1, most))]

    def begin(self, engine: SimEngine, one: Conversation) -> None:
        one.turn += 1
        one.request = f"{one.name}.{one.turn}"
        one.answer = self.random.randrange(1, LONGEST_ANSWER)
        engine.add(one.request, one.text, one.answer, cache_salt=one.salt)
        self.at_work.append(one)

    def ended(self, engine: SimEngine, one: Conversation) -> None:
        self.at_work.remove(one)
        if one.request in engine.reasons:
            answer = engine.outputs[one.request]
            assert answer == SimEngine.expected(one.text, one.answer), one.name
            # Most templates repeat what was said; some write it anew.
            said = answer if self.random.random() < 0.7 else self.tokens(6)
            one.text = [*one.text, *said, *self.tokens(10)]
            one.turns_left -= 1
        if one.turns_left > 0 and len(one.text) < LONGEST_PROMPT:
            self.waiting.insert(self.random.randrange(6), one)  # somebody answers soon, most of the time
        else:
            self.finished += 1

    def live(self, count: int) -> None:
        engine = self.start()
        shared = self.tokens(30)
        for number in range(count):
            text = [*(shared if self.random.random() < 0.4 else []), *self.tokens(40)]
            salt = self.random.choice([None, None, "salt"])
            self.waiting.append(Conversation(f"c{number}", text, self.random.randrange(2, 6), salt))
        while self.waiting or self.at_work:
            while self.waiting and len(self.at_work) < 4:
                self.begin(engine, self.waiting.pop(self.random.randrange(min(len(self.waiting), 8))))
            engine.step()
            for one in [one for one in self.at_work if one.request in engine.reasons]:
                self.ended(engine, one)
            dice = self.random.random()
            if dice < 0.02 and self.at_work:
                one = self.random.choice(self.at_work)
                engine.abort(one.request)
                self.ended(engine, one)
            elif dice < 0.03:
                engine.reset_local()
            elif dice < 0.034:
                engine.scheduler.reset_prefix_cache(reset_running_requests=False, reset_connector=True)
            elif dice < 0.04:
                engine.run()
                for one in list(self.at_work):
                    self.ended(engine, one)
                self.close(engine)
                engine = self.start()
        self.close(engine)

    def close(self, engine: SimEngine) -> None:
        assert_at_rest(engine)
        self.counts.update(engine.counts, preemptions=engine.preemptions)
        engine.close()


@pytest.mark.parametrize("life", LIVES, ids=lambda life: life[0])
def test_conversations(life: tuple[str, int, str, bool, str], hybrid: Path, plain: Path, tmp_path: Path) -> None:
    mix: Any = MIXES[life[0]]
    model = hybrid if any(group.kind == "state" for group in mix) else plain
    talks = Talks(model, tmp_path, life, random.Random(COUNT))
    talks.live(COUNT)
    assert talks.finished == COUNT
    assert talks.counts["adopted_tokens"] > 0 and talks.counts["preemptions"] > 0
    assert talks.counts["turn_restores"] > 0 and talks.counts["detaches"] > 0
    # What has left its lane has no frontier where that is dropped: then it takes luck to find one.
    assert talks.counts["frontier_appends"] > 0 or life[-1] == "drop-current"
