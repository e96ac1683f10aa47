"""SessionSide: conversations that resume at the very token where they stopped (requirements G1-G7).

A request leaves two checkpoints, at the end of its prompt and at the last token that it computed, which are held as
long as its session is kept.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ucmcache.config import SessionSettings, parse_duration_s
from ucmcache.connector.checkpoints import Checkpoint, Checkpoints
from ucmcache.connector.jobs import Ledger
from ucmcache.connector.messages import StepPlan
from ucmcache.connector.metrics import Counters
from ucmcache.connector.ranks import Ranks
from ucmcache.connector.requests import Tracked
from ucmcache.coordinator.coordinator import Coordinator
from ucmcache.coordinator.hit import Prompt
from ucmcache.registry.lanes import LaneLayout
from ucmcache.registry.registry import Kept, Lease, Limits, SessionRegistry, Size

_PARAMETERS = "ucmcache"  # the key of ours in a request's kv_transfer_params
_NAME_CHARS = 200
_EXPIRY_S = 1.0  # between looks for sessions past their time
_MOST_PARTS = 2  # of the host memory: what sessions may hold of it is one


@dataclass(slots=True, eq=False)
class Hold:
    """What a session holds: the handle that its `Kept` carries."""

    turn: Checkpoint | None
    frontier: Checkpoint | None


class SessionSide:
    """The sessions of one engine. Single-threaded, on the scheduler's side.

    Guaranteed by the caller: hooks in the order of a request's life; after `finish`, `plan` is called before the
    request's blocks can be computed into by another. Promised: a request is never refused, nor is its answer ever
    another, for the sake of a session.
    """

    def __init__(
        self,
        settings: SessionSettings,
        coordinator: Coordinator,
        jobs: Ledger,
        ranks: Ranks,
        counters: Counters,
        *,
        lanes: int,
        host_bytes: tuple[int, int],
        has_backend: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._coordinator = coordinator
        self._jobs = jobs
        self._counters = counters
        self._clock = clock
        self._keeps_current = settings.mode == "keep-current"
        blocks_bytes, snapshots_bytes = (nbytes // _MOST_PARTS for nbytes in host_bytes)
        self.registry = SessionRegistry(
            LaneLayout(lanes, settings.entries, settings.mode),
            Limits(settings.ttl_s, settings.quota_bytes, blocks_bytes, snapshots_bytes),
            uuid.uuid4().bytes,
            self._release,
            clock,
            self._release_current,
        )
        self.checkpoints = Checkpoints(
            coordinator, jobs, ranks, counters, has_backend=has_backend, admits=self.registry.admits, clock=clock
        )
        self._unnamed = 0
        self._told = Size()
        self._expire_s = 0.0

    # -- requests -----------------------------------------------------------------------------------------------------

    @staticmethod
    def concerns(tracked: Tracked, scheduled: int) -> bool:
        """Whether a step of `scheduled` tokens is one that `step` is to hear of: hardly any of a decode is."""
        request = tracked.request
        if tracked.lane is None:
            return not tracked.is_laneless
        return bool(request.num_computed_tokens < request.num_prompt_tokens)

    def step(
        self,
        plan: StepPlan,
        tracked: Tracked,
        prompt: Callable[[], Prompt],
        scheduled: int,
        table: Callable[[], Sequence[Sequence[int]] | None],
    ) -> None:
        """A request computes `scheduled` more tokens in the step that `plan` is for."""
        request = tracked.request
        start = request.num_computed_tokens
        if tracked.lane is None:
            tracked.lane = self._begin(tracked, prompt())
            tracked.is_laneless = tracked.lane is None
        if tracked.lane is None or not start < request.num_prompt_tokens == start + scheduled:
            return
        blocks = table()
        if blocks is not None:
            self._drop(tracked)
            tracked.turn = self.checkpoints.capture(
                tracked.lane, tracked.epoch, prompt(), start + scheduled, blocks, plan=plan
            )

    def stop(self, tracked: Tracked) -> None:
        """A request leaves its lane, and starts over later, or never does."""
        if tracked.lane is not None:
            self.registry.finish(tracked.lane, None)
        tracked.lane, tracked.is_laneless = None, False
        self._drop(tracked)

    def finish(self, tracked: Tracked, prompt: Prompt, table: Sequence[Sequence[int]]) -> None:
        """A request is over; its blocks are the engine's again when this returns, but for those that are copied yet."""
        request, lease, turn = tracked.request, tracked.lane, tracked.turn
        position = request.num_computed_tokens
        if lease is None:
            return
        frontier = None
        # With more steps in flight than one, tokens are computed on that nobody knows.
        if 0 < position <= request.num_tokens and tracked.epoch == self._jobs.epoch:
            # One that is dropped with its lane is not to be found in the backend either.
            frontier = self.checkpoints.capture(
                lease, tracked.epoch, prompt, position, table, persists=self._keeps_current
            )
        tracked.lane = tracked.turn = None
        if turn is not None and turn.is_dead:
            turn = None
        if frontier is None and turn is None:
            self.registry.finish(lease, None)
            return
        turn_tokens = turn.position_tokens if turn is not None else 0
        tokens = np.fromiter(request.all_token_ids[: position if frontier else turn_tokens], np.int32)
        positions = [one.position_tokens for one in (turn, frontier) if one is not None]
        turn_size = self.checkpoints.size([turn_tokens] if turn is not None else [])
        self.registry.finish(
            lease,
            Kept(
                tokens,
                min(turn_tokens, len(tokens)),
                _isolation(request),
                frontier.prefix if frontier is not None else turn.prefix if turn is not None else b"",
                turn.prefix if turn is not None else b"",
                getattr(request, "cache_salt", None) or "",
                self.checkpoints.size(positions),
                turn_size,
                Hold(turn, frontier),
                has_current=frontier is not None,
            ),
        )

    def _begin(self, tracked: Tracked, prompt: Prompt) -> Lease | None:
        request = tracked.request
        isolation = _isolation(request)
        name, pin_s = self._named(request)
        prefix_at = partial(self._coordinator.positions.prefix, prompt)
        match = self.registry.match(request.all_token_ids, isolation, prefix_at)
        if name is not None:
            name = f"{isolation.hex()}/{name}"
            match = match if match is not None and match.session == name else None
        elif match is not None:
            name = match.session
        lease = self.registry.begin(name, match, pin_s) if name is not None else None
        if lease is None:  # a new conversation, or one that branches off from one that is running
            self._unnamed += 1
            lease = self.registry.begin(f"#{self._unnamed}", None, pin_s)
        return lease

    def _named(self, request: Any) -> tuple[str | None, float]:
        """The session that a client names, if it does, and for how long its next checkpoint is wanted."""
        asked = getattr(request, "kv_transfer_params", None)
        if not asked:
            return None, 0.0
        try:
            parameters = asked.get(_PARAMETERS)
            if parameters is None:
                return None, 0.0
            name, pin = parameters.get("session"), parameters.get("pin")
            if name is not None and not (isinstance(name, str) and 0 < len(name) <= _NAME_CHARS):
                raise ValueError(f"session is {name!r:.80}; accepted is a text of 1 to {_NAME_CHARS} characters")
            return name, 0.0 if pin is None else parse_duration_s(pin)
        except (AttributeError, ValueError) as error:
            # A client's mistake costs it nothing but the name.
            self._counters.failure("session", error, "parameters")
            return None, 0.0

    # -- one step -----------------------------------------------------------------------------------------------------

    def plan(self, plan: StepPlan) -> None:
        """What finished requests have left, and what is whole by now."""
        now_s = self._clock()
        if now_s >= self._expire_s:
            self._expire_s = now_s + _EXPIRY_S
            self.registry.expire()
        self.checkpoints.plan(plan)

    def busy(self) -> bool:
        """Whether the engine should take another step for the sake of a session."""
        return self.checkpoints.busy()

    def abandon(self, tracked: Tracked) -> None:
        """What a request has computed so far is of no use any more, and so is what it computes on."""
        tracked.lane, tracked.is_laneless = None, True
        self._drop(tracked)

    def reset(self) -> None:
        """Nothing that was computed so far is of use any more."""
        self.registry.reset()
        self.checkpoints.end_unsettled()

    def take_counts(self) -> Mapping[str, int]:
        """What happened since the last call, and by how much what is held has changed."""
        counts, held = dict(self.registry.counts), self.registry.held.size
        self.registry.counts.clear()
        if held != self._told:
            change, self._told = held.plus(self._told, -1), held
            counts |= {"session_kv_bytes": change.blocks + change.tails, "session_state_bytes": change.states}
        return counts

    # -- inside -------------------------------------------------------------------------------------------------------

    def _release(self, kept: Kept) -> None:
        hold = kept.hold
        if isinstance(hold, Hold):
            for checkpoint in (hold.turn, hold.frontier):
                if checkpoint is not None:
                    self.checkpoints.end(checkpoint)

    def _release_current(self, kept: Kept) -> None:
        if isinstance(kept.hold, Hold) and kept.hold.frontier is not None:
            self.checkpoints.end(kept.hold.frontier)

    def _drop(self, tracked: Tracked) -> None:
        if tracked.turn is not None:
            self.checkpoints.end(tracked.turn)
            tracked.turn = None


def _isolation(request: Any) -> bytes:
    """Whatever must be equal beside the tokens, as far as it is not in the prefixes that are compared later."""
    lora = getattr(request, "lora_request", None)
    return repr((getattr(request, "cache_salt", None), getattr(lora, "lora_path", None))).encode()
