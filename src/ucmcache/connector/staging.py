"""Staging: units on their way from the backend, and what a request that waits for them holds meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ucmcache.connector.jobs import Job, Ledger
from ucmcache.connector.messages import Phase, StageJob, StepPlan
from ucmcache.connector.metrics import Counters
from ucmcache.connector.ranks import Ranks
from ucmcache.connector.requests import Tracked
from ucmcache.coordinator.coordinator import Coordinator, Placed
from ucmcache.coordinator.hit import Prompt
from ucmcache.coordinator.retention import Trigger
from ucmcache.keys import SnapshotKey, UnitKey, is_exact
from ucmcache.store.arena import Presence
from ucmcache.store.record import FOR_GOOD


class Staging:
    """The reads of one engine. Single-threaded, on the scheduler's side.

    Promised: what a request waits with stays until it is admitted or its patience ends, after `patience_s`.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        jobs: Ledger,
        ranks: Ranks,
        counters: Counters,
        requests: Mapping[str, Tracked],
        prompt_of: Callable[[Tracked, int], Prompt],
        patience_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._coordinator = coordinator
        self._jobs = jobs
        self._ranks = ranks
        self._counters = counters
        self._requests = requests
        self._prompt_of = prompt_of
        self._patience_s = patience_s
        self._clock = clock
        self._wanted: dict[str, list[Placed]] = {}  # request -> units to stage in the next plan
        self._lease_ends_s: dict[str, float] = {}  # by request

    def want(self, request_id: str, units: list[Placed]) -> None:
        """A request waits for these units."""
        self._wanted[request_id] = units

    def forget(self, request_id: str) -> None:
        """It waits for none."""
        self._wanted.pop(request_id, None)

    def clear(self) -> None:
        """Nobody waits for anything."""
        self._wanted.clear()

    def plan(self, plan: StepPlan) -> None:
        """Read what is waited for, as far as there is room for it."""
        self._expire_leases()
        for request_id in list(self._wanted):
            self._plan_stages(plan, request_id, self._wanted.pop(request_id))

    def ended(self, job: Job, cause: str) -> None:
        """A unit is in host memory on all ranks, or could not be had."""
        tracked = self._requests.get(job.request_id)
        if tracked is not None:
            tracked.staging = max(tracked.staging - 1, 0)
        for key, slot in job.units:
            store = self._coordinator.store_of(key)
            if cause:
                store.abort(key, slot, "failed")
                if cause not in FOR_GOOD:
                    # It may be had later; this request computes rather than to try again and again.
                    if tracked is not None:
                        tracked.impatient = True
                elif job.epoch == self._jobs.epoch:
                    store.set_stored(key, False)  # not asked for again until somebody stores it anew
            else:
                store.commit(key.group, slot)
                store.touch(key.group, slot)
                self._lease(job.request_id, key)

    def end_lease(self, tracked: Tracked) -> None:
        """A request waits no longer."""
        self._lease_ends_s.pop(tracked.request.request_id, None)
        for key, slot in tracked.lease.items():
            self._coordinator.store_of(key).unpin(key.group, slot)
        tracked.lease.clear()

    def _plan_stages(self, plan: StepPlan, request_id: str, units: Iterable[Placed]) -> None:
        # States first: their blocks are needed from then on, and do not push each other out.
        for key, _ in sorted(units, key=lambda placed: not isinstance(placed.key, SnapshotKey)):
            store = self._coordinator.store_of(key)
            self._lease(request_id, key)
            if store.presence(key.group, [key.prefix])[0] != Presence.STORED:
                continue
            slots = store.reserve([key])
            if slots is None:
                # Waiting would not help: what fills the host memory is in use.
                self._counters.add("refused_units", 1)
                if tracked := self._requests.get(request_id):
                    tracked.impatient = True
                return
            # What one rank finds missing or spoilt, another would, too: nobody stands in.
            holders = tuple(ranks[:1] for ranks in self._ranks.holders(store.spread(key.group), slots[0]))
            job = self._jobs.start([(key, slots[0])], (Phase.STAGED,), holders, request_id=request_id)
            if tracked := self._requests.get(request_id):
                tracked.staging += 1
                if isinstance(key, SnapshotKey) and not is_exact(key.group):
                    # Why it was kept is not known any more; that somebody wants it is.
                    self._coordinator.keep(self._prompt_of(tracked, 0), key.depth_tokens, Trigger.PROMPT_END)
            plan.stages.append(StageJob(job, key, slots[0], self._ranks.doing(holders)))

    def _lease(self, request_id: str, key: UnitKey) -> None:
        """Keep a unit that a request waits with, until it is admitted or its patience ends.

        Else two requests that wait for the backend could push out each other's units for ever.
        """
        tracked = self._requests.get(request_id)
        store = self._coordinator.store_of(key)
        slot = store.slot(key)
        if tracked is None or slot is None or key in tracked.lease:
            return
        store.pin(key.group, slot)
        tracked.lease[key] = slot
        self._lease_ends_s.setdefault(request_id, self._clock() + self._patience_s)

    def _expire_leases(self) -> None:
        now = self._clock()
        for request_id in [name for name, end_s in self._lease_ends_s.items() if end_s <= now]:
            self.end_lease(self._requests[request_id])
