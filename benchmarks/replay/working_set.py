"""How much room a trace wants, by stack distances: blocks on one axis, states on the other.

A unit's stack distance is the number of distinct units used since it was used itself, with itself: the smallest LRU
store that still has it. What was read without a limit stays readable where all its blocks and its state do.
"""

from collections.abc import Sequence

import numpy as np

from replay.run import Event
from replay.traces import BLOCK_TOKENS, Trace


class Stack:
    """Stack distances of names, with a Fenwick tree over the times of use. O(log uses) a call."""

    def __init__(self, uses: int) -> None:
        self._counts = [0] * (uses + 1)
        self._last: dict[bytes, int] = {}
        self._now = 0

    def use(self, name: bytes) -> None:
        """The name is used now; at most `uses` times in all."""
        before = self._last.get(name)
        if before is not None:
            self._add(before, -1)
        self._now += 1
        self._last[name] = self._now
        self._add(self._now, 1)

    def distance(self, name: bytes) -> int:
        """Names used since this one was, with itself; it must have been used."""
        at, earlier = self._last[name] - 1, 0
        while at > 0:
            earlier += self._counts[at]
            at -= at & -at
        return len(self._last) - earlier

    def _add(self, at: int, amount: int) -> None:
        while at < len(self._counts):
            self._counts[at] += amount
            at += at & -at


def working_set(
    trace: Trace, events: Sequence[Event], block_budgets: Sequence[int], state_budgets: Sequence[int]
) -> list[list[float]]:
    """Share of prompt tokens resumed past, one list per state budget with one value per block budget.

    `events` are those of a replay without limits. Somewhat pessimistic: a request that loses its state, or one block
    before it, counts as resumed nowhere.
    """
    blocks = Stack(sum(len(prompt.hashes) for prompt in trace.prompts))
    states = Stack(sum(1 + len(event.written) for event in events))
    reads: list[tuple[int, int, int]] = []  # tokens, blocks and states that it takes
    for prompt, event in zip(trace.prompts, events, strict=True):
        if event.resume_tokens:
            needed = prompt.prefixes(0, event.resume_tokens, BLOCK_TOKENS)
            depth = max(blocks.distance(name) for name in needed)
            reads.append((event.resume_tokens, depth, states.distance(event.read)))
            states.use(event.read)
        for name in reversed(prompt.hashes):  # the tail first, as the stores are used
            blocks.use(name)
        for name in event.written:
            states.use(name)
    tokens, depths, distances = np.array(reads, dtype=np.int64).reshape(-1, 3).T
    return [
        [float(tokens[(depths <= room) & (distances <= slots)].sum() / trace.tokens) for room in block_budgets]
        for slots in state_budgets
    ]
