"""CheckpointDirectory: at which positions of a prompt there may be states, on the grid and off it.

An index of what the SnapshotStore holds, never a second authority beside it: whoever gets a position from here asks the
store, so a state that has left needs no invalidation, and nothing is lost with the process.
"""

from __future__ import annotations

from collections.abc import Iterator

from ucmcache.coordinator.hit import Prompt
from ucmcache.keys import exact_parts, exact_prefix_head, parent_head


class CheckpointDirectory:
    """Prefixes that end off the grid, found by what a prompt can tell of itself: the hash before, and the tail.

    A lookup takes one dict lookup per hash of the prompt, however many prefixes there are.
    """

    def __init__(self) -> None:
        self._heads: dict[bytes, set[bytes]] = {}  # by the parent's head: heads of exact prefixes

    def __len__(self) -> int:
        return sum(map(len, self._heads.values()))

    def add(self, prefix: bytes) -> None:
        """There are states for an exact prefix, of which the head is enough."""
        head = exact_prefix_head(prefix)
        self._heads.setdefault(exact_parts(head)[0], set()).add(head)

    def discard(self, prefix: bytes) -> None:
        """There are none any more."""
        head = exact_prefix_head(prefix)
        parent = exact_parts(head)[0]
        heads = self._heads.get(parent, set())
        heads.discard(head)
        if not heads:
            self._heads.pop(parent, None)

    def clear(self) -> None:
        """There are none at all."""
        self._heads.clear()

    def positions(self, prompt: Prompt, above_tokens: int) -> Iterator[tuple[int, bytes]]:
        """Positions above `above_tokens` and before the last token, from the deepest on, with their exact prefixes."""
        unit, most = prompt.hash_block_tokens, prompt.num_tokens - 1
        if not self._heads or most <= above_tokens:
            return
        first = above_tokens // unit
        last = min(len(prompt.hashes), (most - 1) // unit)
        # A prompt may have tens of thousands of hashes, of which hardly any has something behind it.
        begin = max(first - 1, 0)
        parents = enumerate(prompt.hashes[begin:last], begin + 1)
        known = [i for i, parent in parents if parent_head(parent) in self._heads]
        if not first and parent_head(b"") in self._heads:
            known.insert(0, 0)
        for i in reversed(known):
            heads = self._heads.get(parent_head(prompt.prefix(i * unit)), set())
            for tail_tokens in sorted({exact_parts(head)[1] for head in heads}, reverse=True):
                position = i * unit + tail_tokens
                fits = position == most if prompt.only_last else above_tokens < position <= most
                if fits and tail_tokens <= unit:
                    prefix = prompt.exact_prefix(position)
                    if prefix and exact_prefix_head(prefix) in heads:
                        yield position, prefix
