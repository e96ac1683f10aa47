"""SchedulerSide: lookups, promises, load and save plans, pins.

Single-threaded, in the process that schedules; does no I/O and hashes nothing on that path. Every pin it takes belongs
to one job and ends with that job's last result.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ucmcache.config import Config
from ucmcache.connector.jobs import Job, Ledger
from ucmcache.connector.messages import LoadJob, Phase, SaveJob, Setup, StageJob, StepPlan, UnitCopy, WorkerReport
from ucmcache.connector.metrics import Counters
from ucmcache.coordinator.coordinator import Coordinator, Placed
from ucmcache.coordinator.hit import Prompt
from ucmcache.coordinator.spec import Kind
from ucmcache.keys import Namespace, SnapshotKey, UnitKey
from ucmcache.store.arena import Presence

# A backend that never answers must not keep an idle engine awake for ever.
_DRAIN_S = 30.0
_NULL_BLOCK = 0


@dataclass(frozen=True, slots=True)
class _Unnamed:
    """States at a position whose hash the engine does not have yet: under asynchronous scheduling, its last token is
    still to be sampled when the step that computes on it is planned."""

    position_tokens: int
    table: Mapping[int, Sequence[int]]  # group -> the block, held until the states are saved or given up
    blocks: Sequence[Any]


@dataclass(slots=True)
class _Tracked:
    """What is known of one request."""

    request: Any
    hashes: Callable[[], Sequence[bytes]]
    bypass: bool  # its content is not covered by the engine's hashes
    epoch: int  # resets before its present computation began: what it computed before a later one is not kept
    local_tokens: int = 0
    asked_s: float | None = None  # since when its lookups answer "ask again"
    impatient: bool = False  # the deadline passed: no more waiting for this request
    staged: bool = False  # it waited for the backend, so its hit came from there
    staging: int = 0  # units on their way for it
    failed: bool = False  # a load failed: no more promises for this request
    loaded_tokens: int = 0  # loaded, not yet run
    columns: dict[int, int] = field(default_factory=dict)  # group -> first block not yet considered for saving
    lost: Mapping[str, int] = field(default_factory=dict)  # by its last lookup; counted when it is admitted
    state_tokens: int = 0  # position of the last state taken from a running column
    unnamed: list[_Unnamed] = field(default_factory=list)


class SchedulerSide:
    """The scheduler's half of the connector.

    Guaranteed by the caller: hooks in vLLM's order (vllm-contract 1.2). Promised: lookups take no pins and answer the
    same until something changed; only verified, host-resident bytes are promised; a promise is at most num_tokens - 1.
    """

    def __init__(
        self,
        config: Config,
        coordinator: Coordinator,
        setup: Setup,
        *,
        world_size: int,
        hash_block_tokens: int,
        only_last: bool,
        speculative: bool,
        has_backend: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._coordinator = coordinator
        self._setup = setup
        self._send_setup = True
        self._hash_block_tokens = hash_block_tokens
        self._only_last = only_last
        self._speculative = speculative
        self._has_backend = has_backend
        self._save_phases = (Phase.COPIED, Phase.WRITTEN) if has_backend else (Phase.COPIED,)
        self._clock = clock
        self._pool: Any = None
        self._requests: dict[str, _Tracked] = {}
        self._jobs = Ledger(world_size, clock)
        self._epoch = 0
        self._wanted: dict[str, list[Placed]] = {}  # request -> units to stage in the next plan
        self._loads: list[LoadJob] = []
        self._evicted_seen = 0
        self.counters = Counters()

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator that decides for this engine."""
        return self._coordinator

    @property
    def jobs_in_flight(self) -> int:
        """Jobs whose last result is still to come."""
        return len(self._jobs)

    def bind_pool(self, pool: Any) -> None:
        """The engine's block pool, whose blocks are held while they are copied."""
        self._pool = pool

    # -- requests ---------------------------------------------------------------------------------------------------

    def track(self, request: Any, hashes: Callable[[], Sequence[bytes]], bypass: bool) -> None:
        """A new request; `hashes` gives its prefix hashes as they grow."""
        self._requests[request.request_id] = _Tracked(request, hashes, bypass, self._epoch)

    def forget(self, request_id: str) -> None:
        """The request ended; its jobs in flight end on their own."""
        self._wanted.pop(request_id, None)
        if tracked := self._requests.pop(request_id, None):
            self._give_up_unnamed(tracked)

    def lookup(self, request: Any, local_tokens: int) -> int | None:
        """Tokens beyond `local_tokens` that can be promised; None for "ask again"."""
        tracked = self._requests.get(request.request_id)
        self._wanted.pop(request.request_id, None)
        if tracked is not None:
            self._start_over(tracked)
        if tracked is None or tracked.bypass or tracked.failed or getattr(request, "skip_reading_prefix_cache", False):
            return 0
        prompt = self._prompt(tracked, local_tokens)
        hit = self._coordinator.lookup(prompt)
        # Also when a unit failed and the others no longer matter: one that is still on its way when the engine computes
        # it anew would not be saved, and might fail as well.
        if (hit.pending or tracked.staging > 0) and not tracked.impatient:
            if tracked.asked_s is None:
                tracked.asked_s = self._clock()
            if self._clock() - tracked.asked_s < self._config.promise_deadline_s:
                if hit.pending:
                    self._wanted[request.request_id] = self._coordinator.needed(prompt, hit.reachable_tokens)
                return None
            tracked.impatient = True
            self.counters.add("late_lookups", 1)
        tracked.staged = tracked.asked_s is not None
        tracked.asked_s = None
        tracked.local_tokens = local_tokens
        tracked.lost = hit.lost
        return hit.resume_tokens - local_tokens

    def allocated(self, request: Any, block_ids: Sequence[Sequence[int]], external_tokens: int) -> None:
        """The engine made room for `external_tokens`: pin their slots and plan their load."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return
        for cause, tokens in tracked.lost.items():
            self.counters.add("lost_tokens", tokens, cause)
        tracked.lost = {}
        if external_tokens == 0:
            return
        resume = tracked.local_tokens + external_tokens
        slots: list[tuple[UnitKey, int]] = []
        copies: list[UnitCopy] = []
        broken = False
        for key, column in self._coordinator.needed(self._prompt(tracked, tracked.local_tokens), resume):
            slot = self._coordinator.store_of(key).slot(key)
            table = block_ids[key.group]
            block = table[column] if column < len(table) else _NULL_BLOCK
            if slot is None or block == _NULL_BLOCK:
                broken = True  # cannot happen between a lookup and its allocation; then it costs only time
                continue
            self._coordinator.store_of(key).pin(key.group, slot)
            self._coordinator.store_of(key).touch(key.group, slot)
            slots.append((key, slot))
            copies.append(UnitCopy(key.group, slot, block))
        job = self._jobs.start(
            slots, (Phase.LOADED,), self._epoch, request_id=request.request_id, tokens=external_tokens
        )
        self._loads.append(LoadJob(job, request.request_id, tuple(copies), broken))
        self.counters.add("promised_tokens", external_tokens)

    def from_backend(self, request_id: str) -> bool:
        """Whether the request waited for the backend before its promise."""
        tracked = self._requests.get(request_id)
        return tracked is not None and tracked.staged

    # -- one step ---------------------------------------------------------------------------------------------------

    def plan(self, output: Any) -> StepPlan:
        """All work of the step that `output` describes."""
        plan = StepPlan(setup=self._setup if self._send_setup else None, idle=output.total_num_scheduled_tokens == 0)
        self._send_setup = False
        plan.loads, self._loads = self._loads, []
        for request_id in list(self._wanted):
            self._plan_stages(plan, request_id, self._wanted.pop(request_id))
        state = getattr(output, "kv_connector_block_state", None)
        if state is not None:
            drafts = getattr(output, "scheduled_spec_decode_tokens", None) or {}
            for request_id, scheduled in output.num_scheduled_tokens.items():
                tracked = self._requests.get(request_id)
                if tracked is None:
                    continue
                self._adopt(tracked)
                if self._keeps(tracked):
                    self._plan_saves(plan, tracked, scheduled, len(drafts.get(request_id, ())), state)
            for request_id, offers in (getattr(state, "boundary_state_offloads", None) or {}).items():
                tracked = self._requests.get(request_id)
                if tracked is not None and self._keeps(tracked):
                    self._plan_offers(plan, tracked, offers)
        return plan

    def _plan_stages(self, plan: StepPlan, request_id: str, units: Iterable[Placed]) -> None:
        for key, _ in units:
            store = self._coordinator.store_of(key)
            if store.presence(key.group, [key.prefix])[0] != Presence.STORED:
                continue
            slots = store.reserve([key])
            if slots is None:
                # Waiting would not help: what fills the host memory is in use.
                self.counters.add("refused_units", 1)
                if tracked := self._requests.get(request_id):
                    tracked.impatient = True
                return
            job = self._jobs.start([(key, slots[0])], (Phase.STAGED,), self._epoch, request_id=request_id)
            if tracked := self._requests.get(request_id):
                tracked.staging += 1
            plan.stages.append(StageJob(job, key, slots[0]))

    def _plan_saves(self, plan: StepPlan, tracked: _Tracked, scheduled: int, drafts: int, state: Any) -> None:
        start = tracked.request.num_computed_tokens  # before this step
        end = start + scheduled - drafts
        prompt = self._prompt(tracked, 0)
        table = None
        for row in self._coordinator.rows:
            if row.kind is not Kind.CHAIN:
                continue
            # Not beyond where this step starts: rejected drafts and streamed input can take a request back.
            first = min(tracked.columns.get(row.group, 0), start // row.block_tokens)
            units, tracked.columns[row.group] = self._coordinator.missing_blocks(prompt, row, first, end)
            if units:
                table = table if table is not None else state.get_block_ids(tracked.request.request_id)
            for unit in units:
                if not self._plan_copies(plan, [unit], table):
                    break  # no room: nor is there for the blocks behind it
        self._plan_unnamed(plan, tracked, prompt)
        if drafts or not self._coordinator.on_grid(end) or not self._exact(tracked, end):
            return
        if self._coordinator.retention.wants(end, tracked.state_tokens):
            tracked.state_tokens = end
            table = table if table is not None else state.get_block_ids(tracked.request.request_id)
            if end > prompt.hashed_tokens:
                self._hold_unnamed(tracked, end, table)
            elif units := self._coordinator.missing_states(prompt, end):
                self._plan_copies(plan, units, table)

    def _hold_unnamed(self, tracked: _Tracked, end: int, table: Sequence[Sequence[int]] | None) -> None:
        """Keep the running columns' blocks: a column that is full is not written to again."""
        columns = self._coordinator.state_columns(end)
        if table is None or not columns or any(column >= len(table[group]) for group, column in columns):
            return
        held = {group: table[group][column] for group, column in columns}
        if _NULL_BLOCK not in held.values():
            blocks = [block for block_id in held.values() for block in self._hold(block_id)]
            tracked.unnamed.append(_Unnamed(end, {group: [block] for group, block in held.items()}, blocks))

    def _plan_unnamed(self, plan: StepPlan, tracked: _Tracked, prompt: Prompt) -> None:
        """Save the held states whose hash is known by now."""
        for one in [one for one in tracked.unnamed if one.position_tokens <= prompt.hashed_tokens]:
            tracked.unnamed.remove(one)
            units = self._coordinator.missing_states(prompt, one.position_tokens)
            if units:
                self._plan_copies(plan, [Placed(key, 0) for key, _ in units], one.table)
            self._pool.free_blocks(one.blocks)

    def _give_up_unnamed(self, tracked: _Tracked) -> None:
        for one in tracked.unnamed:
            self._pool.free_blocks(one.blocks)
        tracked.unnamed.clear()

    def _start_over(self, tracked: _Tracked) -> None:
        """Nothing of the request is computed yet, or no longer (preemption)."""
        self._give_up_unnamed(tracked)
        tracked.columns.clear()
        tracked.state_tokens = 0
        tracked.epoch = self._epoch

    def _keeps(self, tracked: _Tracked) -> bool:
        return not tracked.bypass and tracked.epoch == self._epoch

    def _exact(self, tracked: _Tracked, end: int) -> bool:
        # With drafts in the engine, num_computed_tokens may count tokens whose acceptance is still open; a prefill's
        # does not.
        return not self._speculative or end <= tracked.request.num_prompt_tokens

    def _plan_offers(self, plan: StepPlan, tracked: _Tracked, offers: Iterable[tuple[int, int, int]]) -> None:
        prompt = self._prompt(tracked, 0)
        for group, block, position in offers:
            if not self._coordinator.on_grid(position):
                continue
            units = [unit for unit in self._coordinator.missing_states(prompt, position) if unit.key.group == group]
            for key, _ in units:
                # The offer names the block itself; its column may be another one (prefill checkpoints).
                self._plan_copies(plan, [Placed(key, 0)], {group: [block]})

    def _plan_copies(
        self,
        plan: StepPlan,
        units: Sequence[Placed],
        table: Sequence[Sequence[int]] | Mapping[int, Sequence[int]] | None,
    ) -> bool:
        """Save units that are of use only together: all of them, or none. False if there is no room for them."""
        if table is None:
            return True
        blocks = [table[key.group][column] if column < len(table[key.group]) else _NULL_BLOCK for key, column in units]
        if _NULL_BLOCK in blocks:
            return True  # behind a window: saved when it filled, or never to be had
        keys = [key for key, _ in units]
        store = self._coordinator.store_of(keys[0])
        slots = store.reserve(keys)
        if slots is None:
            self.counters.add("refused_units", len(units))
            return False
        for key, slot, block in zip(keys, slots, blocks, strict=True):
            store.pin(key.group, slot)
            job = self._jobs.start([(key, slot)], self._save_phases, self._epoch, blocks=self._hold(block))
            plan.saves.append(SaveJob(job, key, UnitCopy(key.group, slot, block)))
        return True

    def _adopt(self, tracked: _Tracked) -> None:
        self.counters.add("adopted_tokens", tracked.loaded_tokens)
        tracked.loaded_tokens = 0

    # -- results ----------------------------------------------------------------------------------------------------

    def report(self, report: WorkerReport) -> None:
        """Results of the workers; a phase failed if one rank's did."""
        for job, phase, cause in self._jobs.ended(report.results):
            if phase is Phase.LOADED:
                self._load_ended(job, cause)
            elif phase is Phase.STAGED:
                self._stage_ended(job, cause)
            else:
                self._save_ended(job, phase, cause)

    def _load_ended(self, job: Job, cause: str) -> None:
        self._unpin(job)
        tracked = self._requests.get(job.request_id)
        self.counters.add("failed_tokens" if cause else "loaded_tokens", job.tokens)
        if tracked is not None:
            tracked.failed = tracked.failed or bool(cause)
            tracked.loaded_tokens = 0 if cause else job.tokens

    def _stage_ended(self, job: Job, cause: str) -> None:
        if tracked := self._requests.get(job.request_id):
            tracked.staging = max(tracked.staging - 1, 0)
        for key, slot in job.units:
            store = self._coordinator.store_of(key)
            if cause:
                store.abort(key, slot, "failed")
                if job.epoch == self._epoch:
                    store.set_stored(key, False)  # not asked for again until somebody stores it anew
            else:
                store.commit(key.group, slot)
                store.touch(key.group, slot)

    def _save_ended(self, job: Job, phase: Phase, cause: str) -> None:
        copied = not job.causes.get(Phase.COPIED)
        if phase is Phase.COPIED:
            self._pool.free_blocks(job.blocks)
            for key, slot in job.units if copied else ():
                self._coordinator.store_of(key).commit(key.group, slot)
                self.counters.add("saved_states" if isinstance(key, SnapshotKey) else "saved_blocks", 1)
        if job.waiting:
            return  # a rank may still be writing from the slot
        self._unpin(job)
        for key, slot in job.units:
            store = self._coordinator.store_of(key)
            if not copied:
                store.abort(key, slot, "failed")
            elif phase is Phase.WRITTEN and not cause and job.epoch == self._epoch:
                store.set_stored(key, True)

    # -- the rest ---------------------------------------------------------------------------------------------------

    def busy(self) -> bool:
        """Whether results are still to come that the engine should stay awake for."""
        return bool(self._loads) or self._jobs.any_younger_than(_DRAIN_S)

    def reset(self) -> None:
        """Forget everything; what was computed or stored before is not found afterwards by this engine.

        An engine is reset when its weights change in place, which its identity cannot tell. So it goes on under an
        identity of its own: what the backend holds stays right for the weights that it was computed with.
        """
        self._epoch += 1
        self._wanted.clear()
        for tracked in self._requests.values():
            self._give_up_unnamed(tracked)
        fields = {**self._setup.fields, "generation": uuid.uuid4().hex}
        namespace = Namespace(fields).digest
        self._setup = replace(self._setup, namespace=namespace, fields=fields)
        self._send_setup = True
        self._coordinator.blocks.clear(namespace)
        self._coordinator.states.clear(namespace)

    def take_counts(self) -> dict[str, int]:
        """Counts since the last call."""
        evicted = self._coordinator.blocks.evicted_units + self._coordinator.states.evicted_units
        self.counters.add("evicted_units", evicted - self._evicted_seen)
        self._evicted_seen = evicted
        return self.counters.take()

    def _prompt(self, tracked: _Tracked, local_tokens: int) -> Prompt:
        return Prompt(
            tracked.request.num_tokens,
            tracked.hashes(),
            self._hash_block_tokens,
            local_tokens,
            self._only_last,
        )

    def _unpin(self, job: Job) -> None:
        for key, slot in job.units:
            self._coordinator.store_of(key).unpin(key.group, slot)

    def _hold(self, block_id: int) -> list[Any]:
        blocks = [self._pool.blocks[block_id]]
        self._pool.touch(blocks)
        return blocks
