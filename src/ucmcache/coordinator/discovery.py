"""What the backend holds, found out beside the engine: by a listing at start, and by asking for the prompts that come.

Other engines write to the same backend, and objects go from it; so what is known of it is never more than a reason to
try. A listing takes as long as it takes; until it has ended, and later for what others have written, a prompt's own
units are asked for before the prompt is computed.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ucmcache.coordinator.binding import BoundRow
from ucmcache.coordinator.hit import Prompt, resolve_hit
from ucmcache.keys import UnitKey, group_tag, id_of, split_id
from ucmcache.store.arena import Presence
from ucmcache.store.backend import Backend, Bucket
from ucmcache.store.pipeline import READ_BACKOFF_S, Call, Pipeline

logger = logging.getLogger(__name__)

_THREADS = 2  # one that lists, one that asks
_LISTED_AT_ONCE = 1024  # few enough that a call for them is never taken to hang


class Listing(NamedTuple):
    """Ids that the backend holds."""

    namespace: bytes
    ids: Sequence[bytes]


class Answer(NamedTuple):
    """What the backend has of a request's prompt: the units of the deepest position that it can be resumed at."""

    namespace: bytes
    request_id: str
    units: Sequence[UnitKey]
    cause: str = ""  # why the backend gave no answer
    error: Exception | None = None


class Discovery:
    """Asks on threads of its own; nothing here waits for the backend.

    `buckets` tells where the parts of a group's units are: a unit counts as held where all are. `units` names those
    that a resume needs. A backend that fails or hangs is left alone as for reads and writes.
    """

    def __init__(
        self,
        backend: Backend,
        rows: Sequence[BoundRow],
        seeds: Mapping[int, bytes],
        buckets: Mapping[int, Sequence[int]],
        units: Callable[[Prompt, int], Sequence[UnitKey]],
        whole_chains: frozenset[int],
        deadline_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        log_namespaces: Callable[[Mapping[bytes, Mapping[str, str]]], None] = lambda found: None,
    ) -> None:
        self._backend = backend
        self._rows = rows
        self._seeds = seeds
        self._buckets = buckets
        self._units = units
        self._whole_chains = whole_chains
        self._log_namespaces = log_namespaces
        self._pipeline = Pipeline(deadline_s, threads=_THREADS)
        self._found: deque[Listing | Answer] = deque()  # appended to by the threads
        self._clock = clock
        self._deadline_s = deadline_s
        self._asked = self._answered = 0
        self._asked_s = 0.0
        self.is_listing = False

    @property
    def answers(self) -> bool:
        """Whether asking is of any use now."""
        return self._pipeline.answers

    @property
    def is_asked(self) -> bool:
        """Whether answers are to be expected soon."""
        return self._asked > self._answered and self._clock() - self._asked_s < self._deadline_s

    def list_all(self, namespace: bytes) -> None:
        """Begin to list what there is of a namespace."""
        self.is_listing = True
        self._pipeline.submit([Call(self._describe, lambda cause, error: None, backoff_s=READ_BACKOFF_S)])
        self._list(namespace, self._everywhere(namespace))

    def ask(self, namespace: bytes, request_id: str, prompt: Prompt) -> None:
        """Find out what there is of a prompt; the answer is among the next `found`."""
        self._asked += 1
        self._asked_s = self._clock()
        asked = replace(prompt, hashes=tuple(prompt.hashes))  # the engine's own list grows
        answer: list[UnitKey] = []

        def run() -> str:
            answer[:] = self._held(namespace, asked)
            return ""

        def done(cause: str, error: Exception | None) -> None:
            self._found.append(Answer(namespace, request_id, () if cause else answer, cause, error))

        self._pipeline.submit([Call(run, done, is_read=True, backoff_s=READ_BACKOFF_S)])

    def found(self, most: int) -> Iterator[Listing | Answer]:
        """What was found out since the last call, at most so many."""
        self._pipeline.watch()
        for _ in range(min(most, len(self._found))):
            found = self._found.popleft()
            self._answered += isinstance(found, Answer)
            yield found

    def wait(self, timeout_s: float) -> None:
        """Give the backend a moment to answer; for when there is nothing else to do."""
        self._pipeline.wait_idle(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Ask nothing any more."""
        self.is_listing = False
        if not self._pipeline.close(timeout_s):
            self._backend.close()

    def _describe(self) -> str:
        self._log_namespaces(self._backend.namespaces())
        return ""

    def _everywhere(self, namespace: bytes) -> Iterator[bytes]:
        """Ids of units whose parts are all there, and b"" for others, so that whoever reads this never waits long."""
        buckets = {group_tag(namespace, self._seeds[group]): set(found) for group, found in self._buckets.items()}
        parts: Counter[bytes] = Counter()
        for bucket in sorted(set().union(*buckets.values())):
            for id in self._backend.bucket(namespace, bucket).scan():
                needed = buckets.get(split_id(id)[1], set())
                if bucket in needed:
                    parts[id] += len(needed) > 1
                    yield id if len(needed) == 1 or parts[id] == len(needed) else b""

    def _list(self, namespace: bytes, rest: Iterator[bytes]) -> None:
        """One part of the listing; it asks for the next itself."""
        ids: list[bytes] = []

        def run() -> str:
            ids.extend(islice(rest, _LISTED_AT_ONCE))
            return ""

        def done(cause: str, error: Exception | None) -> None:
            if ids:
                self._found.append(Listing(namespace, [id for id in ids if id]))
            if cause:
                logger.warning("ucmcache: the backend cannot be listed (%s: %s); prompts are asked for", cause, error)
            if cause or len(ids) < _LISTED_AT_ONCE or not self.is_listing:
                self.is_listing = False
            else:
                self._list(namespace, rest)

        self._pipeline.submit([Call(run, done)])

    def _held(self, namespace: bytes, prompt: Prompt) -> Sequence[UnitKey]:
        first = {
            row.group: prompt.prefix(row.block_tokens)
            for row in self._rows
            if row.group in self._whole_chains and row.block_tokens <= prompt.hashed_tokens
        }
        places = {
            group: (group_tag(namespace, self._seeds[group]), [self._backend.bucket(namespace, one) for one in buckets])
            for group, buckets in self._buckets.items()
        }
        asked = _Asked(places, first)
        hit = resolve_hit(prompt, self._rows, asked, asked)
        return self._units(prompt, hit.resume_tokens) if hit.resume_tokens > prompt.local_tokens else ()


class _Asked:
    """What resolve_hit asks of a store, answered by the backend itself; each unit is asked for once."""

    def __init__(self, places: Mapping[int, tuple[bytes, Sequence[Bucket]]], first: Mapping[int, bytes]) -> None:
        self._places = places  # by group: the end of its units' ids, and where their parts are
        self._known: dict[bytes, bool] = {}
        # Most prompts are new, and show it by their first block.
        self._is_new = any(not self._has(group, prefix) for group, prefix in first.items())

    def presences(self, groups: Sequence[int], prefixes: Sequence[bytes]) -> NDArray[np.uint8]:
        codes = np.full((len(groups), len(prefixes)), Presence.ABSENT, np.uint8)
        if not self._is_new:
            for row, group in enumerate(groups):
                for column, prefix in enumerate(prefixes):
                    if self._has(group, prefix):
                        codes[row, column] = Presence.READY
        return codes

    def fate(self, group: int, prefix: bytes) -> str | None:
        return None

    def _has(self, group: int, prefix: bytes) -> bool:
        tag, buckets = self._places[group]
        id = id_of(prefix, tag)
        if id not in self._known:
            self._known[id] = all(bucket.contains(id) for bucket in buckets)
        return self._known[id]
