"""Lineage: which kept state a prefix would be resumed from if a state were not there, and so what each state saves.

A state saves the tokens between it and the deepest kept state before it. That changes as others come and go: a state
whose ancestor leaves saves more, one that gets a nearer ancestor saves less. States kept on a guess (the interval's, or
ends that a longer one has replaced) are nobody's ancestor here: else they would take the worth of those that are known
to be asked for (docs/adr/0008).

With the state, each path holds the blocks between its anchor and itself (docs/adr/0010).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ucmcache.coordinator.hit import Prompt
from ucmcache.coordinator.retention import Trigger

# Of exponents from 0.5 to 1 all are far ahead of 0, which would be recency alone. A junction has been asked for twice
# before there is a state; a guess never. Chosen by benchmarks/policies.py on two traces, held by a third.
_EXPONENT = 0.75
_WEIGHTS = {Trigger.PROMPT_END: 1.0, Trigger.OUTPUT_END: 1.0, Trigger.JUNCTION: 2.0, Trigger.INTERVAL: 0.02}

_ROOT = b""


@dataclass(slots=True)
class _State:
    position_tokens: int
    trigger: Trigger
    anchor: bytes  # the deepest kept state before this one, guesses aside; b"" for none
    path: Sequence[bytes]  # hashes at the steps behind the anchor, the last its own
    read: bool = False
    # By the first hash of their path: the states whose anchor this one is.
    followers: dict[bytes, set[bytes]] = field(default_factory=dict)


def _new_root() -> _State:
    return _State(0, Trigger.PROMPT_END, _ROOT, ())


class Lineage:
    """The states that are kept, by prefix, as a tree. Single-threaded.

    Guaranteed by the caller: positions are multiples of `step_tokens`, and every state that leaves is removed.
    `on_path` hears of prefixes that more states' own paths are on than before, and of how many more; fewer if negative.
    """

    def __init__(self, step_tokens: int, on_path: Callable[[Sequence[bytes], int], None]) -> None:
        self._step = step_tokens
        self._on_path = on_path
        self._states = {_ROOT: _new_root()}

    def __iter__(self) -> Iterator[bytes]:
        return (prefix for prefix in self._states if prefix != _ROOT)

    def __contains__(self, prefix: bytes) -> bool:
        return prefix in self._states and prefix != _ROOT

    def __len__(self) -> int:
        return len(self._states) - 1

    def add(self, prompt: Prompt, position_tokens: int, trigger: Trigger) -> Mapping[bytes, float]:
        """A state is kept; returns the worth of each prefix for which it changed."""
        prefix = prompt.prefix(position_tokens)
        known = self._states.get(prefix)
        if known is not None:
            if known.trigger.is_guess and not trigger.is_guess:
                known.trigger = trigger
                return self._rooted(prefix)
            return {}
        hashes = prompt.prefixes(0, position_tokens, self._step)
        anchor, after = _ROOT, 0
        for i in range(len(hashes) - 2, -1, -1):
            found = self._states.get(hashes[i])
            if found is not None and not found.trigger.is_guess:
                anchor, after = hashes[i], i + 1
                break
        self._states[prefix] = _State(position_tokens, trigger, anchor, tuple(hashes[after:]))
        self._follow(prefix)
        self._on_path(self._states[prefix].path, 1)
        return {prefix: self.worth(prefix)} if trigger.is_guess else self._rooted(prefix)

    def remove(self, prefix: bytes) -> Mapping[bytes, float]:
        """A state left; returns the worth of each prefix for which it changed."""
        state = self._states.get(prefix)
        if state is None or prefix == _ROOT:
            return {}
        changed = self._uproot(prefix)
        self._unfollow(prefix)
        del self._states[prefix]
        self._on_path(state.path, -1)
        return changed

    def demote(self, prefix: bytes) -> Mapping[bytes, float]:
        """A state turned out to be a guess like others; returns the worth of each prefix for which it changed."""
        state = self._states.get(prefix)
        if state is None or state.trigger.is_guess or prefix == _ROOT:
            return {}
        state.trigger = Trigger.INTERVAL
        return {**self._uproot(prefix), prefix: self.worth(prefix)}

    def worth(self, prefix: bytes) -> float:
        """What the state of a prefix saves, in tokens to the power of 0.75."""
        return float(self.saved_tokens(prefix) ** _EXPONENT * _WEIGHTS[self._states[prefix].trigger])

    def saved_tokens(self, prefix: bytes) -> int:
        """Tokens between a prefix's state and the deepest kept state before it, guesses aside."""
        state = self._states[prefix]
        return state.position_tokens - self._states[state.anchor].position_tokens

    def anchor(self, prefix: bytes) -> bytes:
        """Prefix of the deepest kept state before this one, guesses aside; b"" for none."""
        return self._states[prefix].anchor

    def is_leaf(self, prefix: bytes) -> bool:
        """Whether a state is kept that no other's path begins at."""
        state = self._states.get(prefix)
        return state is not None and not state.followers

    def steps(self, prefix: bytes) -> int:
        """Length of the path that a state's own blocks are on."""
        return len(self._states[prefix].path)

    def read(self, prefix: bytes) -> tuple[Trigger, bool] | None:
        """A request resumes from a state: why it was kept, and whether it was never read before. None if not kept."""
        state = self._states.get(prefix)
        if state is None:
            return None
        first, state.read = not state.read, True
        return state.trigger, first

    def clear(self) -> None:
        """Nothing is kept any more."""
        self._states = {_ROOT: _new_root()}

    def _rooted(self, prefix: bytes) -> Mapping[bytes, float]:
        """Make a state the anchor of those behind it on its own path."""
        state = self._states[prefix]
        changed = {prefix: self.worth(prefix)}
        length = len(state.path)
        for follower in list(self._states[state.anchor].followers.get(state.path[0], ())):
            other = self._states[follower]
            if len(other.path) > length and other.path[length - 1] == prefix:
                self._unfollow(follower)
                other.anchor, other.path = prefix, other.path[length:]
                self._follow(follower)
                changed[follower] = self.worth(follower)
        # At once: a prefix that many prompts share has many followers.
        self._on_path(state.path, 1 - len(changed))
        return changed

    def _uproot(self, prefix: bytes) -> Mapping[bytes, float]:
        """Hand a state's followers to its own anchor."""
        state = self._states[prefix]
        followers = [one for group in state.followers.values() for one in group]
        self._on_path(state.path, len(followers))
        changed = {}
        for follower in followers:
            other = self._states[follower]
            self._unfollow(follower)
            other.anchor, other.path = state.anchor, (*state.path, *other.path)
            self._follow(follower)
            changed[follower] = self.worth(follower)
        return changed

    def _follow(self, prefix: bytes) -> None:
        state = self._states[prefix]
        self._states[state.anchor].followers.setdefault(state.path[0], set()).add(prefix)

    def _unfollow(self, prefix: bytes) -> None:
        state = self._states[prefix]
        followers = self._states[state.anchor].followers
        followers[state.path[0]].discard(prefix)
        if not followers[state.path[0]]:
            del followers[state.path[0]]
