"""Checkpoints: what is kept at one position of a request, copied, held and let go as a whole.

Each is what the coordinator keeps at that position, with all blocks that a resume takes, pinned in host memory from
when all of it is there until somebody ends it. What is written for one carries a lease, and changes nothing once the
lease is not admitted any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ucmcache.connector.jobs import Job, Ledger
from ucmcache.connector.messages import Phase, SaveJob, StepPlan, UnitCopy
from ucmcache.connector.metrics import Counters
from ucmcache.connector.ranks import Ranks
from ucmcache.connector.saving import NULL_BLOCK
from ucmcache.coordinator.coordinator import Coordinator, Placed
from ucmcache.coordinator.hit import Prompt
from ucmcache.coordinator.spec import Kind
from ucmcache.keys import SnapshotKey, UnitKey, engine_group, is_exact
from ucmcache.registry.registry import Lease, Size
from ucmcache.store.arena import Presence
from ucmcache.store.units import UnitStore

_SETTLE_S = 10.0  # an engine is not kept awake for longer for the sake of a checkpoint


@dataclass(slots=True, eq=False)
class Checkpoint:
    """What is kept at one position of a request, from its first copy until its session lets it go."""

    position_tokens: int
    prefix: bytes
    prompt: Prompt | None  # until it is held
    lease: Lease
    epoch: int
    since_s: float
    copying: int = 0  # units whose copy is on its way
    copied: list[UnitKey] = field(default_factory=list)  # by it, and to be written
    pins: list[tuple[UnitStore, int, list[int]]] = field(default_factory=list)  # store, group, slots
    is_dead: bool = False


class Checkpoints:
    """The checkpoints of one engine. Single-threaded, on the scheduler's side.

    Promised: each pin and each engine block that is taken is given back once; `admits` tells of a lease whether what
    carries it may still write.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        jobs: Ledger,
        ranks: Ranks,
        counters: Counters,
        *,
        has_backend: bool,
        admits: Callable[[Lease], bool],
        clock: Callable[[], float],
    ) -> None:
        self._coordinator = coordinator
        self._jobs = jobs
        self._ranks = ranks
        self._counters = counters
        self._has_backend = has_backend
        self._admits = admits
        self._clock = clock
        self._state_groups = {row.group for row in coordinator.rows if row.kind is Kind.SNAPSHOT}
        self.pool: Any = None  # the engine's block pool
        self._queued: list[SaveJob] = []  # for the next plan
        self._settling: list[Checkpoint] = []  # not held yet
        self._holders: Counter[bytes] = Counter()  # by prefix: checkpoints that stand for it

    def capture(
        self,
        lease: Lease,
        epoch: int,
        prompt: Prompt,
        position_tokens: int,
        table: Sequence[Sequence[int]],
        *,
        plan: StepPlan | None = None,
        persists: bool = True,
    ) -> Checkpoint | None:
        """Begin to keep what a request has computed up to a position; None if that is not possible.

        It is written to the backend if there is one; off the grid, only if it `persists`. With a plan it is what that
        step computes, and the next one overwrites; without, the request is over.
        """
        is_final, saves = plan is None, self._queued if plan is None else plan.saves
        prefix = self._coordinator.positions.prefix(prompt, position_tokens)
        if not prefix:
            return None
        checkpoint = Checkpoint(position_tokens, prefix, prompt, lease, epoch, self._clock())
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
            if persists or not is_exact(key.group):
                checkpoint.copied.append(key)
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
            self.end(checkpoint)
            return True
        checkpoint.prompt = None
        position, coordinator = checkpoint.position_tokens, self._coordinator
        # What is not here the backend has, or it has just been lost, which a lookup will find out.
        for group, prefixes in coordinator.positions.whole_blocks(prompt, position).items():
            checkpoint.pins.append((coordinator.blocks, group, coordinator.blocks.hold(group, prefixes)))
        for key, _ in coordinator.positions.keys(prompt, position, checkpoint.prefix):
            slots = coordinator.states.hold(key.group, [key.prefix])
            checkpoint.pins.append((coordinator.states, key.group, slots))
        for copied in checkpoint.copied if self._has_backend else ():
            slot = coordinator.store_of(copied).slot(copied)
            if slot is not None and not coordinator.store_of(copied).is_stored(copied):
                self._write(plan, copied, slot)
        checkpoint.copied.clear()
        return True

    def _write(self, plan: StepPlan, key: UnitKey, slot: int) -> None:
        store = self._coordinator.store_of(key)
        store.pin(key.group, slot)
        holders = self._ranks.holders(store.spread(key.group), slot)
        job = self._jobs.start([(key, slot)], (Phase.WRITTEN,), holders)
        plan.saves.append(
            SaveJob(job, key, UnitCopy(key.group, slot, NULL_BLOCK), self._ranks.doing(holders), copied=True)
        )

    def plan(self, plan: StepPlan) -> None:
        """What finished requests have left, and what is whole by now."""
        plan.saves += self._queued
        self._queued = []
        settling, self._settling = self._settling, []
        for checkpoint in settling:
            if not checkpoint.is_dead and not self._settle(plan, checkpoint):
                self._settling.append(checkpoint)

    def busy(self) -> bool:
        """Whether the engine should take another step for the sake of a checkpoint."""
        now_s = self._clock()
        return bool(self._queued) or any(now_s - one.since_s < _SETTLE_S for one in self._settling if not one.is_dead)

    def end_unsettled(self) -> None:
        """Let go of all that is not held yet."""
        for checkpoint in self._settling:
            self.end(checkpoint)
        self._settling.clear()

    def copied(self, job: Job, cause: str) -> None:
        """All ranks have reported the copy of one unit of a checkpoint."""
        checkpoint: Checkpoint = job.checkpoint
        self.pool.free_blocks(job.blocks)
        checkpoint.copying -= 1
        current = self._admits(checkpoint.lease) and not checkpoint.is_dead and job.epoch == self._jobs.epoch
        for key, slot in job.units:
            store = self._coordinator.store_of(key)
            store.unpin(key.group, slot)
            if cause or not current:
                store.abort(key, slot, "failed" if cause else "fenced")
            else:
                store.commit(key.group, slot)
                self._counters.add("saved_states" if isinstance(key, SnapshotKey) else "saved_blocks", 1)
        if cause:
            self.end(checkpoint)

    def end(self, checkpoint: Checkpoint) -> None:
        """Let go of a checkpoint; what only it stood for leaves host memory at once."""
        if checkpoint.is_dead:
            return
        checkpoint.is_dead, checkpoint.prompt = True, None
        for store, group, slots in checkpoint.pins:
            for slot in slots:
                store.unpin(group, slot)
        checkpoint.pins.clear()
        self._holders[checkpoint.prefix] -= 1
        if not self._holders[checkpoint.prefix]:
            del self._holders[checkpoint.prefix]
            if not self._coordinator.on_grid(checkpoint.position_tokens):
                self._coordinator.states.give_up(checkpoint.prefix)

    def size(self, positions_tokens: Sequence[int]) -> Size:
        """Host memory, over all ranks, that checkpoints of one prompt at these positions take together."""
        blocks = tails = states = 0
        for group, count in self._coordinator.positions.units_at(positions_tokens).items():
            is_tail = is_exact(group) and engine_group(group) not in self._state_groups
            is_block = not is_exact(group) and group not in self._state_groups
            store: UnitStore = self._coordinator.blocks if is_block else self._coordinator.states
            nbytes = count * store.slot_bytes(group) * self._ranks.count // store.spread(group)
            blocks += nbytes * is_block
            tails += nbytes * is_tail
            states += nbytes * (not is_block and not is_tail)
        return Size(blocks, tails, states)
