"""SavePlanner: which blocks and states a step leaves that are worth a copy, and the pins that the copies need."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, Protocol

from ucmcache.connector.jobs import Job, Ledger, TakeOver
from ucmcache.connector.messages import Phase, SaveJob, StepPlan, UnitCopy
from ucmcache.connector.metrics import Counters
from ucmcache.connector.ranks import Ranks
from ucmcache.connector.requests import Tracked, Unnamed
from ucmcache.coordinator.coordinator import Coordinator, Placed
from ucmcache.coordinator.hit import Prompt
from ucmcache.coordinator.retention import Trigger
from ucmcache.coordinator.spec import Kind
from ucmcache.keys import SnapshotKey

NULL_BLOCK = 0


class Table(Protocol):
    """Block ids by KV cache group."""

    def __getitem__(self, group: int, /) -> Sequence[int]: ...


class _Resolved:
    """A request's block table, asked for once, and only by a step that has something to save."""

    def __init__(self, state: Any, request_id: str) -> None:
        self._state = state
        self._request_id = request_id

    def __getitem__(self, group: int) -> Sequence[int]:
        return self._table[group]

    @cached_property
    def _table(self) -> Table:
        table: Table | None = self._state.get_block_ids(self._request_id)
        return table if table is not None else defaultdict(list)


class SavePlanner:
    """Plans the saves of one engine.

    States come only from exact sources: what the engine offers, and the running column right after a step that ends on
    a block boundary without unverified drafts. Promised: a block stays the engine's own, and a slot unused by others,
    until all ranks that save it have reported the copy (and the write from the slot).
    """

    def __init__(
        self,
        coordinator: Coordinator,
        jobs: Ledger,
        ranks: Ranks,
        counters: Counters,
        *,
        speculative: bool,
        has_backend: bool,
    ) -> None:
        self._coordinator = coordinator
        self._jobs = jobs
        self._ranks = ranks
        self._counters = counters
        self._speculative = speculative
        self._phases = (Phase.COPIED, Phase.WRITTEN) if has_backend else (Phase.COPIED,)
        self.pool: Any = None  # the engine's block pool

    def plan_step(
        self, plan: StepPlan, tracked: Tracked, prompt: Prompt, scheduled: int, drafts: int, state: Any
    ) -> None:
        """What one request leaves after a step of `scheduled` tokens, `drafts` of them unverified."""
        start = tracked.request.num_computed_tokens  # before this step
        end = start + scheduled - drafts
        table = _Resolved(state, tracked.request.request_id)
        self._coordinator.claim(tracked.claims, prompt, end)
        for row in self._coordinator.rows:
            if row.kind is not Kind.CHAIN:
                continue
            # Not beyond where this step starts: rejected drafts and streamed input can take a request back.
            refused = tracked.refused.pop(row.group, tracked.columns.get(row.group, 0))
            first = min(tracked.columns.get(row.group, 0), start // row.block_tokens, refused)
            units, tracked.columns[row.group] = self._coordinator.missing_blocks(prompt, row, first, end)
            for unit in units:
                if not self._copy(plan, [unit], table):
                    # No room: nor is there for the blocks behind it. The next full block is a time to try again.
                    tracked.refused[row.group] = unit.column
                    break
        tracked.seen_tokens = end
        tracked.due_tokens = min(
            (
                (tracked.columns[row.group] + 1) * row.block_tokens
                for row in self._coordinator.rows
                if row.kind is Kind.CHAIN
            ),
            default=0,
        )
        self._plan_named(plan, tracked, prompt)
        if drafts or not self._coordinator.on_grid(end) or not self._exact(tracked, end):
            return
        trigger = self._trigger(tracked, end)
        if trigger is None:
            self._coordinator.pass_over(prompt, end, "never_saved")
        else:
            tracked.state_tokens = end
            if end > prompt.hashed_tokens:
                self._remember(tracked, end, trigger, table)
            else:
                self._keep(plan, tracked, prompt, end, trigger, self._coordinator.missing_states(prompt, end), table)

    def plan_offers(
        self, plan: StepPlan, tracked: Tracked, prompt: Prompt, offers: Iterable[tuple[int, int, int]]
    ) -> None:
        """The states that the engine itself hands over after this step: (group, block, position) each."""
        positions: dict[int, dict[int, list[int]]] = {}
        for group, block, position in offers:
            # The offer names the block itself; its column may be another one (prefill checkpoints).
            positions.setdefault(position, {})[group] = [block]
        for position, table in positions.items():
            missing = self._coordinator.missing_states(prompt, position)
            units = [Placed(key, 0) for key, _ in missing if key.group in table]
            # What the engine went out of its way for is kept in any case.
            trigger = self._trigger(tracked, position) or Trigger.INTERVAL
            self._keep(plan, tracked, prompt, position, trigger, units, table)

    def plan_again(self, plan: StepPlan, failed: TakeOver) -> None:
        """Give a save that one rank failed in to the next that has the same bytes."""
        (key, slot), copied = failed.job.units[0], failed.phase is not Phase.COPIED
        block = NULL_BLOCK if copied else failed.job.blocks[0].block_id
        self._counters.add("taken_over_units", 1)
        plan.saves.append(SaveJob(failed.number, key, UnitCopy(key.group, slot, block), (failed.rank,), copied))

    def ended(self, job: Job, phase: Phase, cause: str) -> None:
        """A phase of a save has been reported by all ranks that save it."""
        copied = not job.causes.get(Phase.COPIED)
        if phase is Phase.COPIED:
            self.pool.free_blocks(job.blocks)
            for key, slot in job.units if copied else ():
                self._coordinator.store_of(key).commit(key.group, slot)
                self._counters.add("saved_states" if isinstance(key, SnapshotKey) else "saved_blocks", 1)
        if job.waiting:
            return  # a rank may still be writing from the slot
        for key, slot in job.units:
            store = self._coordinator.store_of(key)
            store.unpin(key.group, slot)
            if not copied:
                store.abort(key, slot, "failed")
            elif phase is Phase.WRITTEN and not cause and job.epoch == self._jobs.epoch:
                store.set_stored(key, True)

    def _trigger(self, tracked: Tracked, position_tokens: int) -> Trigger | None:
        return self._coordinator.retention.trigger(
            position_tokens, tracked.request.num_prompt_tokens, tracked.junction_tokens, tracked.state_tokens
        )

    def _keep(
        self,
        plan: StepPlan,
        tracked: Tracked,
        prompt: Prompt,
        position_tokens: int,
        trigger: Trigger,
        missing: Sequence[Placed],
        table: Table,
    ) -> None:
        """Save the states of a position, or see to it that those which are here count for what they are now."""
        if tracked.refused:
            # A block before it is missing: nobody could get to it.
            self._coordinator.pass_over(prompt, position_tokens, "refused")
            return
        if missing:
            if not self._copy(plan, missing, table):
                return
            self._counters.add("state_saves", 1, trigger)
        if trigger is Trigger.OUTPUT_END:
            if tracked.output_end:
                self._coordinator.demote(tracked.output_end)
            tracked.output_end = prompt.prefix(position_tokens)
        self._coordinator.keep(prompt, position_tokens, trigger)

    def _exact(self, tracked: Tracked, end: int) -> bool:
        # With drafts in the engine, num_computed_tokens may count tokens whose acceptance is still open; a prefill's
        # does not.
        return not self._speculative or end <= tracked.request.num_prompt_tokens

    def _remember(self, tracked: Tracked, end: int, trigger: Trigger, table: Table) -> None:
        """Keep an eye on the running columns' blocks: a full column is not written to again, unless it is given away.

        No reference is held, so neither the engine's pool nor a reset of it is in the way; the pool tells of reuse.
        """
        columns = self._coordinator.state_columns(end)
        watch = getattr(self.pool, "unpin_blocks", None)
        if watch is None or not columns or any(column >= len(table[group]) for group, column in columns):
            return
        held = {group: [table[group][column]] for group, column in columns}
        if any(block == NULL_BLOCK for (block,) in held.values()):
            return
        unnamed = Unnamed(end, trigger, held)

        def reused(_: Any) -> None:
            unnamed.overwritten = True

        blocks = [self.pool.blocks[block] for (block,) in held.values()]
        self.pool.touch(blocks)
        watch(blocks, reused)
        tracked.unnamed.append(unnamed)

    def _plan_named(self, plan: StepPlan, tracked: Tracked, prompt: Prompt) -> None:
        """Save the remembered states whose hash is known by now."""
        for one in [one for one in tracked.unnamed if one.position_tokens <= prompt.hashed_tokens]:
            tracked.unnamed.remove(one)
            missing = self._coordinator.missing_states(prompt, one.position_tokens)
            if not one.overwritten:
                units = [Placed(key, 0) for key, _ in missing]
                self._keep(plan, tracked, prompt, one.position_tokens, one.trigger, units, one.table)

    def _copy(self, plan: StepPlan, units: Sequence[Placed], table: Table) -> bool:
        """Save units that are of use only together: all of them, or none. False if there is no room for them."""
        blocks = [table[key.group][column] if column < len(table[key.group]) else NULL_BLOCK for key, column in units]
        if NULL_BLOCK in blocks:
            return True  # behind a window: saved when it filled, or never to be had
        keys = [key for key, _ in units]
        store = self._coordinator.store_of(keys[0])
        slots = store.reserve(keys)
        if slots is None:
            self._counters.add("refused_units", len(units))
            return False
        for key, slot, block in zip(keys, slots, blocks, strict=True):
            store.pin(key.group, slot)
            held = [self.pool.blocks[block]]
            self.pool.touch(held)
            holders = self._ranks.holders(store.spread(key.group), slot)
            job = self._jobs.start([(key, slot)], self._phases, holders, blocks=held)
            plan.saves.append(SaveJob(job, key, UnitCopy(key.group, slot, block), self._ranks.doing(holders)))
        return True
