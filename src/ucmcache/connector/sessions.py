"""SessionSide: conversations that resume at the very token where they stopped (requirements G1-G7).

A request leaves two checkpoints: at the end of its prompt, and at the last token that it computed. Each is what the
coordinator keeps at that position, with all blocks that a resume takes, held in host memory as long as its session is.
What is written for one carries a lease, and changes nothing once the registry does not admit it any more.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ucmcache.config import SessionSettings, parse_duration_s
from ucmcache.connector.jobs import Job, Ledger
from ucmcache.connector.messages import Phase, SaveJob, StepPlan, UnitCopy
from ucmcache.connector.metrics import Counters
from ucmcache.connector.ranks import Ranks
from ucmcache.connector.requests import Tracked
from ucmcache.coordinator.coordinator import Coordinator, Placed
from ucmcache.coordinator.hit import Prompt
from ucmcache.coordinator.spec import Kind
from ucmcache.keys import SnapshotKey, UnitKey, engine_group, is_exact
from ucmcache.registry.lanes import LaneLayout
from ucmcache.registry.registry import Kept, Lease, Limits, SessionRegistry, Size
from ucmcache.store.arena import Presence

NULL_BLOCK = 0
_PARAMETERS = "ucmcache"  # the key of ours in a request's kv_transfer_params
_NAME_CHARS = 200
_SETTLE_S = 10.0  # an engine is not kept awake for longer for the sake of a checkpoint
_EXPIRY_S = 1.0  # between looks for sessions past their time
_MOST_PARTS = 2  # of the host memory: what sessions may hold of it is one


@dataclass(slots=True, eq=False)
class Checkpoint:
    """What is kept at one position of a request, from its first copy until its session lets it go."""

    position_tokens: int
    prefix: bytes
    prompt: Prompt | None  # until it is held
    lease: Lease
    epoch: int
    since_s: float
    persists: bool  # in the backend, if there is one
    copying: int = 0  # units whose copy is on its way
    pins: list[tuple[UnitKey, int]] = field(default_factory=list)
    is_dead: bool = False


@dataclass(slots=True, eq=False)
class Hold:
    """What a session holds: the handle that its `Kept` carries."""

    turn: Checkpoint | None
    frontier: Checkpoint | None


class SessionSide:
    """The sessions of one engine. Single-threaded, on the scheduler's side.

    Guaranteed by the caller: hooks in the order of a request's life; after `finish`, `plan` is called before the
    request's blocks can be computed into by another. Promised: each pin and each engine block that is taken is given
    back once; a request is never refused, nor is its answer ever another, for the sake of a session.
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
        self._ranks = ranks
        self._counters = counters
        self._clock = clock
        self._has_backend = has_backend
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
        self.pool: Any = None  # the engine's block pool
        self._state_groups = {row.group for row in coordinator.rows if row.kind is Kind.SNAPSHOT}
        self._queued: list[SaveJob] = []  # for the next plan
        self._settling: list[Checkpoint] = []  # not held yet
        self._holders: Counter[bytes] = Counter()  # by exact prefix: checkpoints that stand for it
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
            tracked.lane = self._begin(tracked)
            tracked.is_laneless = tracked.lane is None
        if tracked.lane is None or not start < request.num_prompt_tokens == start + scheduled:
            return
        blocks = table()
        if blocks is not None:
            self._drop(tracked)
            tracked.turn = self._capture(
                tracked.lane, tracked.epoch, prompt(), start + scheduled, blocks, plan.saves, is_final=False
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
            persists = self._keeps_current
            frontier = self._capture(
                lease, tracked.epoch, prompt, position, table, self._queued, is_final=True, persists=persists
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
        turn_size = self._size(prompt, [turn_tokens] if turn is not None else [])
        self.registry.finish(
            lease,
            Kept(
                tokens,
                min(turn_tokens, len(tokens)),
                _isolation(request),
                getattr(request, "cache_salt", None) or "",
                self._size(prompt, positions),
                turn_size,
                Hold(turn, frontier),
                has_current=frontier is not None,
            ),
        )

    def _begin(self, tracked: Tracked) -> Lease | None:
        request = tracked.request
        isolation = _isolation(request)
        name, pin_s = self._named(request)
        match = self.registry.match(request.all_token_ids, isolation)
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
        parameters = (getattr(request, "kv_transfer_params", None) or {}).get(_PARAMETERS)
        if parameters is None:
            return None, 0.0
        try:
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
        plan.saves += self._queued
        self._queued = []
        settling, self._settling = self._settling, []
        for checkpoint in settling:
            if not checkpoint.is_dead and not self._settle(plan, checkpoint):
                self._settling.append(checkpoint)

    def busy(self) -> bool:
        """Whether the engine should take another step for the sake of a session."""
        now_s = self._clock()
        return bool(self._queued) or any(now_s - one.since_s < _SETTLE_S for one in self._settling if not one.is_dead)

    def copied(self, job: Job, cause: str) -> None:
        """All ranks have reported the copy of one unit of a checkpoint."""
        checkpoint: Checkpoint = job.checkpoint
        self.pool.free_blocks(job.blocks)
        checkpoint.copying -= 1
        current = not checkpoint.is_dead and job.epoch == self._jobs.epoch and self.registry.admits(checkpoint.lease)
        for key, slot in job.units:
            store = self._coordinator.store_of(key)
            store.unpin(key.group, slot)
            if cause or not current:
                store.abort(key, slot, "failed" if cause else "fenced")
            else:
                store.commit(key.group, slot)
                self._counters.add("saved_states" if isinstance(key, SnapshotKey) else "saved_blocks", 1)
        if cause:
            self._end(checkpoint)

    def abandon(self, tracked: Tracked) -> None:
        """What a request has computed so far is of no use any more, and so is what it computes on."""
        tracked.lane, tracked.is_laneless = None, True
        self._drop(tracked)

    def reset(self) -> None:
        """Nothing that was computed so far is of use any more."""
        self.registry.reset()
        for checkpoint in self._settling:
            self._end(checkpoint)
        self._settling.clear()

    def take_counts(self) -> Mapping[str, int]:
        """What happened since the last call, and by how much what is held has changed."""
        counts, held = dict(self.registry.counts), self.registry.held.size
        self.registry.counts.clear()
        if held != self._told:
            change, self._told = held.plus(self._told, -1), held
            counts |= {"session_kv_bytes": change.blocks + change.tails, "session_state_bytes": change.states}
        return counts

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def _capture(
        self,
        lease: Lease,
        epoch: int,
        prompt: Prompt,
        position_tokens: int,
        table: Sequence[Sequence[int]],
        saves: list[SaveJob],
        *,
        is_final: bool,
        persists: bool = True,
    ) -> Checkpoint | None:
        """Begin to keep what a request has computed up to a position; None if that is not possible."""
        prefix = self._coordinator.positions.prefix(prompt, position_tokens)
        if not prefix:
            return None
        checkpoint = Checkpoint(
            position_tokens, prefix, prompt, lease, epoch, self._clock(), persists and self._has_backend
        )
        missing = self._coordinator.missing_at(prompt, position_tokens, prefix, with_blocks=is_final)
        blocks = [table[one.group][one.column] if one.column < len(table[one.group]) else NULL_BLOCK for one in missing]
        if NULL_BLOCK in blocks:
            return None
        slots = self._reserve(missing)
        if slots is None:
            self._counters.add("refused_units", len(missing))
            return None
        self._holders[prefix] += 1
        for (key, _), slot, block in zip(missing, slots, blocks, strict=True):
            store = self._coordinator.store_of(key)
            store.pin(key.group, slot)
            held = [self.pool.blocks[block]]
            self.pool.touch(held)
            # Nobody stands in: by then the next forward may have overwritten what one rank could not copy.
            holders = tuple(ranks[:1] for ranks in self._ranks.holders(store.spread(key.group), slot))
            job = self._jobs.start([(key, slot)], (Phase.COPIED,), holders, blocks=held, checkpoint=checkpoint)
            checkpoint.copying += 1
            saves.append(
                SaveJob(
                    job,
                    key,
                    UnitCopy(key.group, slot, block),
                    self._ranks.doing(holders),
                    written=False,
                    is_final=is_final,
                    is_volatile=not is_final,
                )
            )
        self._settling.append(checkpoint)
        return checkpoint

    def _reserve(self, units: Sequence[Placed]) -> list[int] | None:
        """A slot for each unit, or None with nothing reserved."""
        slots: dict[UnitKey, int] = {}
        for store in (self._coordinator.states, self._coordinator.blocks):
            keys = [one.key for one in units if self._coordinator.store_of(one.key) is store]
            got = store.reserve(keys) if keys else []
            if got is None:
                for key, slot in slots.items():
                    self._coordinator.store_of(key).abort(key, slot, "refused")
                return None
            slots |= dict(zip(keys, got, strict=True))
        return [slots[one.key] for one in units]

    def _settle(self, plan: StepPlan, checkpoint: Checkpoint) -> bool:
        """Hold a checkpoint if all of it is there; False if some is on its way yet."""
        prompt = checkpoint.prompt
        if checkpoint.copying or prompt is None:
            return False
        presence = self._coordinator.positions.presence(prompt, checkpoint.position_tokens, checkpoint.prefix)
        if presence is Presence.PENDING and self._clock() - checkpoint.since_s < _SETTLE_S:
            return False
        if presence in (Presence.ABSENT, Presence.PENDING):
            self._end(checkpoint)
            return True
        checkpoint.prompt = None
        for key, _ in self._coordinator.needed(prompt, checkpoint.position_tokens):
            store = self._coordinator.store_of(key)
            slot = store.slot(key)
            if slot is not None:  # else the backend has it, or it is lost, and a lookup will find that out
                store.pin(key.group, slot)
                checkpoint.pins.append((key, slot))
                if checkpoint.persists and is_exact(key.group) and not store.is_stored(key):
                    self._write(plan, key, slot)
        return True

    def _write(self, plan: StepPlan, key: UnitKey, slot: int) -> None:
        store = self._coordinator.store_of(key)
        store.pin(key.group, slot)
        holders = self._ranks.holders(store.spread(key.group), slot)
        job = self._jobs.start([(key, slot)], (Phase.WRITTEN,), holders)
        plan.saves.append(
            SaveJob(job, key, UnitCopy(key.group, slot, NULL_BLOCK), self._ranks.doing(holders), copied=True)
        )

    def _release(self, kept: Kept) -> None:
        hold = kept.hold
        if isinstance(hold, Hold):
            for checkpoint in (hold.turn, hold.frontier):
                if checkpoint is not None:
                    self._end(checkpoint)

    def _release_current(self, kept: Kept) -> None:
        if isinstance(kept.hold, Hold) and kept.hold.frontier is not None:
            self._end(kept.hold.frontier)

    def _drop(self, tracked: Tracked) -> None:
        if tracked.turn is not None:
            self._end(tracked.turn)
            tracked.turn = None

    def _end(self, checkpoint: Checkpoint) -> None:
        """Let go of a checkpoint; what only it stood for leaves host memory at once."""
        if checkpoint.is_dead:
            return
        checkpoint.is_dead, checkpoint.prompt = True, None
        for key, slot in checkpoint.pins:
            self._coordinator.store_of(key).unpin(key.group, slot)
        checkpoint.pins.clear()
        self._holders[checkpoint.prefix] -= 1
        if not self._holders[checkpoint.prefix]:
            del self._holders[checkpoint.prefix]
            if not self._coordinator.on_grid(checkpoint.position_tokens):
                self._coordinator.states.give_up(checkpoint.prefix)

    def _size(self, prompt: Prompt, positions_tokens: Sequence[int]) -> Size:
        """Host memory, over all ranks, that checkpoints at these positions take together."""
        blocks = tails = states = 0
        for key in {one.key for at in positions_tokens for one in self._coordinator.needed(prompt, at)}:
            store = self._coordinator.store_of(key)
            nbytes = store.slot_bytes(key.group) * self._ranks.count // store.spread(key.group)
            if not isinstance(key, SnapshotKey):
                blocks += nbytes
            elif engine_group(key.group) in self._state_groups:
                states += nbytes
            else:
                tails += nbytes
        return Size(blocks, tails, states)


def _isolation(request: Any) -> bytes:
    """Whatever must be equal beside the tokens, as far as it is not in the prefixes that are compared later."""
    lora = getattr(request, "lora_request", None)
    return repr((getattr(request, "cache_salt", None), getattr(lora, "lora_path", None))).encode()
