"""Request traces: read from files, or made from a seed."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ucmcache.coordinator.hit import Prompt

BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Trace:
    """Prompts in the order in which they arrive."""

    name: str
    prompts: Sequence[Prompt]

    @property
    def tokens(self) -> int:
        """Of all prompts together."""
        return sum(prompt.num_tokens for prompt in self.prompts)

    @property
    def distinct_blocks(self) -> int:
        """Blocks that an unlimited store would end up with."""
        return len({one for prompt in self.prompts for one in prompt.hashes})

    def head(self, requests: int) -> "Trace":
        """The first requests only."""
        return Trace(self.name, self.prompts[:requests])


def read_mooncake(path: Path) -> Trace:
    """A trace of the Mooncake project: one JSON object a line, `hash_ids` chained, so equal ids are equal prefixes."""
    return Trace(path.stem.removeprefix("mooncake_"), [_prompt(json.loads(line)) for line in path.open()])


def _prompt(request: dict[str, list[int]]) -> Prompt:
    tokens = int(str(request["input_length"]))
    # The last block's hash is of an unfilled one, unless the prompt ends on a block.
    full = request["hash_ids"][: tokens // BLOCK_TOKENS]
    return Prompt(tokens, [one.to_bytes(8, "little") for one in full], BLOCK_TOKENS)


def generate(requests: int = 8000, seed: int = 2026) -> Trace:
    """Agents that take many turns, prompts that fork, and system prompts of Zipf popularity, interleaved."""
    draw = random.Random(seed)
    names = iter(range(1 << 62))
    systems = [_blocks(names, draw.randrange(1, 24)) for _ in range(60)]
    weights = [1 / (rank + 1) for rank in range(len(systems))]
    live: list[list[int]] = []
    prompts: list[Prompt] = []
    while len(prompts) < requests:
        kind = draw.random()
        if kind < 0.25 or not live:
            talk = [*draw.choices(systems, weights)[0], *_blocks(names, draw.randrange(1, 12))]
        elif kind < 0.35:  # a fork: the same beginning goes another way
            base = draw.choice(live)
            talk = [*base[: draw.randrange(1, len(base) + 1)], *_blocks(names, draw.randrange(1, 6))]
        else:  # the next turn; who spoke lately is likelier to speak again
            index = min(int(draw.expovariate(1 / 60)), len(live) - 1)
            base = live.pop(-1 - index)
            talk = [*base, *_blocks(names, draw.randrange(1, 5))]
        if len(talk) > 250:
            continue
        live.append(talk)
        if len(live) > 900:
            live.pop(0)
        tail = draw.randrange(BLOCK_TOKENS)
        prompts.append(Prompt(len(talk) * BLOCK_TOKENS + tail, [n.to_bytes(8, "little") for n in talk], BLOCK_TOKENS))
    return Trace("generated", prompts)


def _blocks(names: Iterator[int], count: int) -> list[int]:
    return [next(names) for _ in range(count)]
