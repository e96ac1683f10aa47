"""SchedulerSide: lookups, promises, load and save plans, pins.

Single-threaded, in the process that schedules; does no I/O and hashes nothing on that path. Every pin it takes belongs
to one job and ends with that job's last result.
"""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ucmcache.config import Config
from ucmcache.connector.identity import RequestIdentity
from ucmcache.connector.jobs import Job, Ledger
from ucmcache.connector.messages import LoadJob, Phase, Setup, StepPlan, UnitCopy, WorkerReport
from ucmcache.connector.metrics import Counters
from ucmcache.connector.ranks import Ranks
from ucmcache.connector.requests import Tracked
from ucmcache.connector.saving import NULL_BLOCK, SavePlanner
from ucmcache.connector.sessions import SessionSide
from ucmcache.connector.staging import Staging
from ucmcache.coordinator.coordinator import Coordinator
from ucmcache.coordinator.discovery import Discovery, Listing
from ucmcache.coordinator.gate import LoadGate
from ucmcache.coordinator.hit import Hit, Prompt
from ucmcache.keys import Namespace, UnitKey, engine_group
from ucmcache.store.arena import Presence

_LEARNT_AT_ONCE = 4  # listings of some thousand ids each: a few milliseconds
_KNOWN_PROMPTS = 4096  # whose questions are remembered
_TOUCH_INTERVAL_S = 60.0
_IDLE_WAIT_S = 0.005
_SHUTDOWN_S = 1.0
_STEPS_IN_FLIGHT = 8
_PREFILL_TOKENS = 8  # a request; a step of more is a prefill
_READS_AT_ONCE = 2
# A backend that never answers must not keep an idle engine awake for ever.
_DRAIN_S = 10.0


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
        ranks: Ranks,
        hash_block_tokens: int,
        only_last: bool,
        speculative: bool,
        has_backend: bool,
        discovery: Discovery | None = None,
        lanes: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._coordinator = coordinator
        self._setup = setup
        self._send_setup = True
        self._hash_block_tokens = hash_block_tokens
        self._only_last = only_last
        self._clock = clock
        self._requests: dict[str, Tracked] = {}
        self._ranks = ranks
        self._jobs = Ledger(clock)
        self._loads: list[LoadJob] = []
        self._down: set[int] = set()  # ranks whose backend is left alone for a while
        self._discovery = discovery
        self._asked: OrderedDict[bytes, float] = OrderedDict()  # prompts that were asked for, and until when that holds
        self._touched: OrderedDict[bytes, float] = OrderedDict()  # resumed prefixes, and when they may be touched again
        self._touches: list[UnitKey] = []
        self._gate = LoadGate(clock)
        self._steps: deque[tuple[float, int]] = deque()  # planned, and not done: since when, and tokens of prefills
        self._step_done_s = 0.0
        self._evicted_seen = 0
        self.counters = Counters()
        self._saving = SavePlanner(
            coordinator, self._jobs, ranks, self.counters, speculative=speculative, has_backend=has_backend
        )
        self._staging = Staging(
            coordinator,
            self._jobs,
            ranks,
            self.counters,
            self._requests,
            self._prompt,
            config.promise_deadline_s,
            clock,
        )
        self._sessions: SessionSide | None = None
        if config.sessions.are_kept:
            self._sessions = SessionSide(
                config.sessions,
                coordinator,
                self._jobs,
                ranks,
                self.counters,
                lanes=lanes,
                host_bytes=(config.host.blocks_bytes, config.host.snapshots_bytes),
                has_backend=has_backend,
                clock=clock,
            )

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
        self._saving.pool = pool
        if self._sessions is not None:
            self._sessions.checkpoints.pool = pool

    # -- requests ---------------------------------------------------------------------------------------------------

    def track(self, request: Any, identity: RequestIdentity) -> None:
        """A new request."""
        self._requests[request.request_id] = Tracked(request, identity, self._jobs.epoch)

    def finished(self, request: Any, block_ids: Sequence[Sequence[int]]) -> None:
        """The request ended, and its blocks are about to be freed; its jobs in flight end on their own."""
        tracked = self._requests.get(request.request_id)
        if tracked is not None and self._sessions is not None:
            self._sessions.finish(tracked, self._prompt(tracked, 0), block_ids)
        self._forget(request.request_id)

    def _forget(self, request_id: str) -> None:
        self._staging.forget(request_id)
        if tracked := self._requests.pop(request_id, None):
            self._lose(tracked, "aborted")
            self._coordinator.settle(tracked.claims)
            self._staging.end_lease(tracked)

    def lookup(self, request: Any, local_tokens: int) -> int | None:
        """Tokens beyond `local_tokens` that can be promised; None for "ask again"."""
        tracked = self._requests.get(request.request_id)
        self._staging.forget(request.request_id)
        if tracked is not None:
            self._lose(tracked, "preempted")
            tracked.hit = None
            self._coordinator.settle(tracked.claims)
            tracked.start_over(self._jobs.epoch)
            if self._sessions is not None:
                self._sessions.stop(tracked)
        if (
            tracked is None
            or tracked.identity.bypass
            or tracked.failed
            or getattr(request, "skip_reading_prefix_cache", False)
        ):
            return 0
        self._learn()
        prompt = self._prompt(tracked, local_tokens)
        hit = self._coordinator.lookup(prompt)
        if hit.pending and tracked.asked_s is None and not self._worth_loading(prompt, hit):
            tracked.impatient = True
            self.counters.add("slow_lookups", 1)
        # Also when a unit failed and the others no longer matter: one that is still on its way when the engine computes
        # it anew would not be saved, and might fail as well.
        if (hit.pending or tracked.staging > 0 or self._discovers(tracked, prompt, hit)) and not tracked.impatient:
            if tracked.asked_s is None:
                tracked.asked_s = self._clock()
            if self._clock() - tracked.asked_s < self._config.promise_deadline_s:
                if hit.pending:
                    self._staging.want(request.request_id, self._coordinator.needed(prompt, hit.reachable_tokens))
                return None
            tracked.impatient = True
            self.counters.add("late_lookups", 1)
        tracked.staged = tracked.asked_s is not None
        tracked.asked_s = None
        tracked.local_tokens = local_tokens
        tracked.hit = hit
        tracked.junction_tokens = self._coordinator.junction(hit)
        # The engine then ends a prefill chunk there, so that there is a state, and keeps it itself, too. It sets the
        # attribute anew before every lookup.
        if tracked.junction_tokens > getattr(request, "shared_prefix_boundary", tracked.junction_tokens):
            request.shared_prefix_boundary = tracked.junction_tokens
        return hit.resume_tokens - local_tokens

    def _learn(self) -> None:
        """Take in what was found out about the backend."""
        for found in self._discovery.found(_LEARNT_AT_ONCE) if self._discovery is not None else ():
            current = found.namespace == self._setup.namespace
            if isinstance(found, Listing):
                for store in (self._coordinator.blocks, self._coordinator.states) if current else ():
                    store.add_stored(found.ids)
                continue
            if found.error is not None:
                self.counters.failure("ask", found.error, found.cause)
            elif found.cause:
                self.counters.add("failures", 1, f"ask:{found.cause}")
            for key in found.units if current else ():
                self._coordinator.store_of(key).set_stored(key, True)
            if tracked := self._requests.get(found.request_id):
                tracked.discovering, tracked.discovered = False, True

    def _discovers(self, tracked: Tracked, prompt: Prompt, hit: Hit) -> bool:
        """Whether the backend is being asked for more of the prompt than is known; asks it, if there is reason to."""
        if self._discovery is None or tracked.discovered or tracked.discovering:
            return tracked.discovering
        tracked.discovered = True
        ttl_s = self._config.backend.existence_ttl_s if self._config.backend is not None else None
        deepest = self._coordinator.deepest(prompt)
        if deepest <= max(hit.reachable_tokens, prompt.local_tokens) or not self._discovery.answers:
            return False
        if ttl_s is None and not self._discovery.is_listing:
            return False
        if not _due(self._asked, prompt.prefix(deepest), self._clock(), ttl_s or 0.0):
            return False
        self._discovery.ask(self._setup.namespace, tracked.request.request_id, prompt)
        tracked.discovering, tracked.discovered = True, False
        return True

    def _worth_loading(self, prompt: Prompt, hit: Hit) -> bool:
        if self._config.backend is None or self._config.backend.when_slow == "load":
            return True
        nbytes = 0
        for key, _ in self._coordinator.needed(prompt, hit.reachable_tokens):
            store = self._coordinator.store_of(key)
            if store.presence(key.group, [key.prefix])[0] == Presence.STORED:
                nbytes += store.slot_bytes(key.group)
        return not nbytes or self._gate.allows(nbytes, hit.reachable_tokens - hit.resume_tokens)

    def allocated(self, request: Any, block_ids: Sequence[Sequence[int]], external_tokens: int) -> None:
        """The engine made room for `external_tokens`: pin their slots and plan their load."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return
        resume = tracked.local_tokens + external_tokens
        self._count_admission(tracked, resume)
        if external_tokens:
            self._plan_load(tracked, block_ids, resume, external_tokens)
            self._touch(tracked, resume)
        self._staging.end_lease(tracked)

    def _plan_load(
        self, tracked: Tracked, block_ids: Sequence[Sequence[int]], resume: int, external_tokens: int
    ) -> None:
        tracked.open_tokens = external_tokens
        slots: list[tuple[UnitKey, int]] = []
        copies: list[UnitCopy] = []
        broken = False
        for key, column in self._coordinator.needed(self._prompt(tracked, tracked.local_tokens), resume):
            slot = self._coordinator.store_of(key).slot(key)
            table = block_ids[engine_group(key.group)]
            block = table[column] if column < len(table) else NULL_BLOCK
            if slot is None or block == NULL_BLOCK:
                broken = True  # cannot happen between a lookup and its allocation; then it costs only time
                continue
            self._coordinator.store_of(key).pin(key.group, slot)
            self._coordinator.store_of(key).touch(key.group, slot)
            slots.append((key, slot))
            copies.append(UnitCopy(key.group, slot, block))
        # Every rank fills its own blocks, from whosever memory.
        job = self._jobs.start(
            slots,
            (Phase.LOADED,),
            self._ranks.holders(1, 0),
            request_id=tracked.request.request_id,
            tokens=external_tokens,
        )
        self._loads.append(LoadJob(job, tracked.request.request_id, tuple(copies), broken))
        self.counters.add("promised_tokens", external_tokens)

    def _touch(self, tracked: Tracked, resume_tokens: int) -> None:
        """Keep what was resumed from in the backend too, where nobody read it."""
        prompt = self._prompt(tracked, 0)
        prefix = self._coordinator.positions.prefix(prompt, resume_tokens)
        if self._discovery is None or not _due(self._touched, prefix, self._clock(), _TOUCH_INTERVAL_S):
            return
        for key, _ in self._coordinator.needed(prompt, resume_tokens):
            if self._coordinator.store_of(key).is_stored(key):
                self._touches.append(key)

    def _count_admission(self, tracked: Tracked, resume_tokens: int) -> None:
        """What the chain groups had is from now on adopted, lost for a cause, or open."""
        hit, tracked.hit = tracked.hit, None
        if hit is None:
            return
        self.counters.add("chain_tokens", hit.chain_tokens - tracked.local_tokens)
        for cause, tokens in hit.lost.items():
            self.counters.add("lost_tokens", tokens, cause)
        # The engine may take less than it was promised.
        self.counters.add("lost_tokens", hit.resume_tokens - resume_tokens, "declined")
        if resume_tokens <= tracked.local_tokens:
            return
        prefix = self._coordinator.positions.prefix(self._prompt(tracked, 0), resume_tokens)
        read = self._coordinator.resumed(prefix)
        if read is not None:
            trigger, first = read
            self.counters.add("state_saved_tokens", resume_tokens - tracked.local_tokens, trigger)
            self.counters.add("state_first_reads", int(first), trigger)

    def _lose(self, tracked: Tracked, cause: str) -> None:
        self.counters.add("lost_tokens", tracked.open_tokens, cause)
        tracked.open_tokens = 0

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
        plan.touches, self._touches = self._touches, []
        if plan.idle and self._discovery is not None and self._discovery.is_asked:
            self._discovery.wait(_IDLE_WAIT_S)
        self._learn()
        self._measure(output)
        for failed in self._jobs.take_overs():
            self._saving.plan_again(plan, failed)
        self._staging.plan(plan)
        if self._sessions is not None:
            for request_id in getattr(output, "preempted_req_ids", None) or ():
                if tracked := self._requests.get(request_id):
                    self._sessions.stop(tracked)
            self._sessions.plan(plan)
        state = getattr(output, "kv_connector_block_state", None)
        if state is not None:
            drafts = getattr(output, "scheduled_spec_decode_tokens", None) or {}
            for request_id, scheduled in output.num_scheduled_tokens.items():
                tracked = self._requests.get(request_id)
                if tracked is None:
                    continue
                self._adopt(tracked)
                unverified = len(drafts[request_id]) if request_id in drafts else 0
                if self._keeps(tracked) and not tracked.passes(scheduled - unverified):
                    self._saving.plan_step(plan, tracked, self._prompt(tracked, 0), scheduled, unverified, state)
                sessions = self._sessions
                if sessions is not None and sessions.concerns(tracked, scheduled) and self._keeps(tracked):
                    prompt, table = partial(self._prompt, tracked, 0), partial(state.get_block_ids, request_id)
                    sessions.step(plan, tracked, prompt, scheduled, table)
            for request_id, offers in (getattr(state, "boundary_state_offloads", None) or {}).items():
                tracked = self._requests.get(request_id)
                if tracked is not None and self._keeps(tracked):
                    self._saving.plan_offers(plan, tracked, self._prompt(tracked, 0), offers)
        return plan

    def _measure(self, output: Any) -> None:
        tokens, requests = output.total_num_scheduled_tokens, len(output.num_scheduled_tokens)
        if len(self._steps) > _STEPS_IN_FLIGHT:
            self._steps.clear()  # an engine that does not tell of their ends
        self._steps.append((self._clock(), tokens if tokens > _PREFILL_TOKENS * requests else 0))

    def stepped(self) -> None:
        """The oldest step that was planned is done."""
        if self._steps:
            began_s, tokens = self._steps.popleft()
            now_s = self._clock()
            self._gate.computed(tokens, now_s - max(began_s, self._step_done_s))
            self._step_done_s = now_s

    def _keeps(self, tracked: Tracked) -> bool:
        return not tracked.identity.bypass and tracked.epoch == self._jobs.epoch

    def _adopt(self, tracked: Tracked) -> None:
        if tracked.loaded_tokens:
            self.counters.add("adopted_tokens", tracked.loaded_tokens)
            tracked.loaded_tokens = tracked.open_tokens = 0

    # -- results ----------------------------------------------------------------------------------------------------

    def report(self, report: WorkerReport) -> None:
        """Results of the workers."""
        if report.reads:
            # All ranks read their parts of the same units, two at a time.
            slowest = max(report.reads.values(), key=lambda read: read[1] / read[0])
            self._gate.read(slowest[0], slowest[1] / _READS_AT_ONCE)
        self._ended(self._jobs.ended(report.results))
        self._down |= {rank for rank, down in report.down.items() if down}
        self._down -= {rank for rank, down in report.down.items() if not down}
        for store in (self._coordinator.blocks, self._coordinator.states):
            store.backend_answers = not self._down

    def _ended(self, phases: Iterable[tuple[Job, Phase, str]]) -> None:
        for job, phase, cause in phases:
            if phase is Phase.LOADED:
                self._load_ended(job, cause)
            elif phase is Phase.STAGED:
                self._staging.ended(job, cause)
            elif job.checkpoint is not None and self._sessions is not None:
                self._sessions.checkpoints.copied(job, cause)
            else:
                self._saving.ended(job, phase, cause)

    def _load_ended(self, job: Job, cause: str) -> None:
        self._unpin(job)
        tracked = self._requests.get(job.request_id)
        self.counters.add("failed_tokens" if cause else "loaded_tokens", job.tokens)
        if tracked is not None:
            tracked.failed = tracked.failed or bool(cause)
            tracked.loaded_tokens = 0 if cause else job.tokens
            if cause:
                self._lose(tracked, "failed")

    # -- the rest ---------------------------------------------------------------------------------------------------

    def busy(self) -> bool:
        """Whether results are still to come that the engine should stay awake for."""
        asked = self._discovery is not None and self._discovery.is_asked
        if self._sessions is not None and self._sessions.busy():
            return True
        return asked or bool(self._loads) or self._jobs.has_take_overs or self._jobs.any_younger_than(_DRAIN_S)

    def reset(self) -> None:
        """Forget everything; what was computed or stored before is not found afterwards by this engine.

        An engine is reset when its weights change in place, which its identity cannot tell. So it goes on under an
        identity of its own: what the backend holds stays right for the weights that it was computed with.
        """
        self._ended(self._jobs.reset())
        self._staging.clear()
        for tracked in self._requests.values():
            tracked.claims.clear()
            self._staging.end_lease(tracked)
            if self._sessions is not None:
                self._sessions.abandon(tracked)
        if self._sessions is not None:
            self._sessions.reset()
        fields = {**self._setup.fields, "generation": uuid.uuid4().hex}
        namespace = Namespace(fields).digest
        self._setup = replace(self._setup, namespace=namespace, fields=fields)
        self._send_setup = True
        self._coordinator.clear(namespace)

    def shutdown(self) -> None:
        """Ask the backend nothing any more."""
        if self._discovery is not None:
            self._discovery.close(_SHUTDOWN_S)

    def take_counts(self) -> dict[str, int]:
        """Counts since the last call."""
        evicted = self._coordinator.blocks.evicted_units + self._coordinator.states.evicted_units
        self.counters.add("evicted_units", evicted - self._evicted_seen)
        self._evicted_seen = evicted
        for name, count in self._sessions.take_counts().items() if self._sessions is not None else ():
            self.counters.add(name, count)
        return self.counters.take()

    def _prompt(self, tracked: Tracked, local_tokens: int) -> Prompt:
        return Prompt(
            tracked.request.num_tokens,
            tracked.identity.hashes(),
            self._hash_block_tokens,
            local_tokens,
            self._only_last,
            tracked.identity.tail,
        )

    def _unpin(self, job: Job) -> None:
        for key, slot in job.units:
            self._coordinator.store_of(key).unpin(key.group, slot)


def _due(until: OrderedDict[bytes, float], prefix: bytes, now_s: float, interval_s: float) -> bool:
    """Whether something is due for a prefix, which it then is not for `interval_s`."""
    if until.get(prefix, now_s) > now_s:
        return False
    until[prefix] = now_s + interval_s
    until.move_to_end(prefix)
    if len(until) > _KNOWN_PROMPTS:
        until.popitem(last=False)
    return True
