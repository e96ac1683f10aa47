"""WorkerSide: carries plans out and reports a result per unit.

Nothing that a copy or a backend raises leaves this file: it is caught once per job, counted by cause, and the request
recomputes.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ucmcache.config import BackendSettings, Config
from ucmcache.connector.layout import Storages, UnitMap, content_text, group_facts, unit_map
from ucmcache.connector.messages import (
    GroupGeometry,
    LoadJob,
    Phase,
    Result,
    SaveJob,
    Setup,
    StageJob,
    StepPlan,
    WorkerFacts,
    WorkerReport,
)
from ucmcache.connector.metrics import Counters
from ucmcache.connector.ranks import Ranks
from ucmcache.connector.transfer import CudaDevice, HostTransfer, StreamTransfer, Ticket, Transfer
from ucmcache.coordinator.binding import bind
from ucmcache.coordinator.spec import Kind
from ucmcache.errors import BackendError, ConfigError, ContractError
from ucmcache.keys import SnapshotKey, UnitKey, exact_group
from ucmcache.store import record
from ucmcache.store.backend import Backend, Bucket, open_backend
from ucmcache.store.memory import MemoryHandle, SlotMemory, map_shared, take_memory, take_shared_memory
from ucmcache.store.pipeline import READ_BACKOFF_S, WRITE_BACKOFF_S, Call, Pipeline

logger = logging.getLogger(__name__)

# How long an idle step waits for storage: an engine with nothing to compute neither spins nor takes a step per unit,
# and a request that arrives meanwhile waits no longer than this.
_IDLE_WAIT_S = 0.005
_SHUTDOWN_S = 3.0  # of the five seconds that a shutdown may take on a busy machine
_QUEUE_PARTS = 4


@dataclass(frozen=True, slots=True)
class _Running:
    """A submitted group of copies, whose they are, and the namespace they were computed under."""

    ticket: Ticket
    setup: Setup
    saves: tuple[SaveJob, ...] = ()
    load: LoadJob | None = None


class WorkerSide:
    """One rank's half of the connector.

    Guaranteed by the caller: plans arrive in order, each once; `begin` before the forward or right after it was
    launched, `end` after it was launched. Promised: every job of a plan gets exactly one result per phase; a load's
    blocks are whole before its request is reported. A job that names its ranks is nothing to the others.
    """

    def __init__(
        self,
        config: Config,
        kv_cache_config: Any,
        rank: int,
        ranks: Ranks,
        backend: Backend | None = None,
    ) -> None:
        self._config = config
        self._kv_cache_config = kv_cache_config
        self._rank = rank
        self._ranks = ranks
        self._backend = backend
        deadline_s = BackendSettings.model_fields["deadline_s"].default
        if config.backend is not None:
            deadline_s = config.backend.deadline_s
            self._backend = backend or open_backend(config.backend.url, config.backend.capacity_bytes)
        self._pipeline = Pipeline(deadline_s, on_retry=lambda: self.counters.add("retried_calls", 1))
        self._storages = Storages()
        self._units: dict[int, UnitMap] = {}
        self._facts: WorkerFacts | None = None
        self._setup: Setup | None = None
        self._memory: dict[Kind, torch.Tensor] = {}
        self._handles: dict[str, MemoryHandle] = {}  # of memory that the ranks beside this one may map
        self._slots: dict[int, SlotMemory] = {}
        self._spread: dict[int, int] = {}
        self._transfer: Transfer | None = None
        self._running: deque[_Running] = deque()
        self._results: deque[Result] = deque()  # appended to by I/O threads too
        self._reads: deque[tuple[int, float]] = deque()  # bytes and seconds of each, appended to by I/O threads
        self._unstarted: tuple[SaveJob, ...] = ()  # of the plan whose `end` is still to come
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._told_down = False
        self._told_openings = 0
        self.counters = Counters()

    # -- start ----------------------------------------------------------------------------------------------------

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Learn where the engine keeps its KV, and take the host memory for it; called once.

        Raises UnsupportedModelError for KV of an unknown kind or layout, ConfigError where the memory cannot be had.
        """
        rows = bind(group_facts(i, group) for i, group in enumerate(self._kv_cache_config.kv_cache_groups))
        groups = {}
        for row, group in zip(rows, self._kv_cache_config.kv_cache_groups, strict=True):
            unit = unit_map(kv_caches, group.layer_names, self._kv_cache_config.num_blocks, self._storages)
            self._units[row.group] = unit
            alike = row.ranks_alike(self._ranks.per_stage)
            groups[row.group] = GroupGeometry(unit.unit_bytes, content_text(group, unit), alike)
        host = self._config.host.of_one_rank(self._ranks.count)
        for kind, nbytes in ((Kind.CHAIN, host.blocks_bytes), (Kind.SNAPSHOT, host.snapshots_bytes)):
            spreads = [groups[row.group].alike for row in rows if row.kind is kind]
            if kind is Kind.SNAPSHOT and self._config.sessions.are_kept:
                spreads = [groups[row.group].alike for row in rows if row.spec.votes]
            if spreads:
                self._memory[kind] = self._take(kind, nbytes, max(spreads) > 1)
            # What waits to be written keeps its slots from being used; most of them stay free for others.
            self._pipeline.queue_bytes = (host.blocks_bytes + host.snapshots_bytes) // _QUEUE_PARTS
        # What is kept of a group off the grid has the same regions.
        self._units |= {exact_group(group): unit for group, unit in self._units.items()}
        self._facts = WorkerFacts(groups, self._handles)

    @property
    def facts(self) -> WorkerFacts | None:
        """What the scheduler side must know of this worker; None before `register`."""
        return self._facts

    def _set_up(self, setup: Setup) -> None:
        first, self._setup = self._setup is None, setup
        if first:
            try:
                self._make_arenas(setup)
            except Exception as error:
                # Every job will fail and be counted; the engine computes on.
                self.counters.failure("setup", error)
        if self._backend is not None and self._rank == 0:
            # Only for people and for warnings at a later start; bytes do not depend on it.
            self._pipeline.submit([self._describe(self._backend, setup)])

    def _take(self, kind: Kind, nbytes: int, shared: bool) -> torch.Tensor:
        try:
            if shared:
                memory, self._handles[kind.value] = take_shared_memory(nbytes)
                return self._pinned(torch.frombuffer(memory, dtype=torch.uint8))
            if self._device is not None:
                return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            return torch.frombuffer(take_memory(nbytes), dtype=torch.uint8)
        except (MemoryError, OSError, RuntimeError) as error:
            raise ConfigError(
                f"{nbytes} bytes of host memory cannot be had for this rank: {error}; accepted is what the host (and "
                "for a GPU its driver) gives; lower host.blocks or host.snapshots"
            ) from error

    def _pinned(self, memory: torch.Tensor) -> torch.Tensor:
        """The same memory, known to the device's driver: copies from elsewhere are slow and not asynchronous."""
        if self._device is not None:
            result = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
            if int(result) != 0:
                raise RuntimeError(f"cudaHostRegister answered {result}")
        return memory

    @property
    def _device(self) -> torch.device | None:
        """The accelerator that holds the engine's KV; None for a CPU."""
        return next((storage.device for storage in self._storages.flat if storage.is_cuda), None)

    def _make_arenas(self, setup: Setup) -> None:
        for kind, plans in ((Kind.CHAIN, setup.block_arenas), (Kind.SNAPSHOT, setup.state_arenas)):
            mapped = {self._rank: self._memory[kind]} if plans else {}
            at = 0
            for plan in plans:
                end = at + plan.rows * plan.slot_bytes
                memories = [
                    self._mapped(mapped, kind, rank, setup) for rank in self._ranks.alike(plan.spread, self._rank)
                ]
                slots = SlotMemory(plan, *(memory[at:end].numpy() for memory in memories))
                self._slots.update(dict.fromkeys(plan.groups, slots))
                self._spread.update(dict.fromkeys(plan.groups, plan.spread))
                at = end
        if self._device is not None:
            self._transfer = StreamTransfer(CudaDevice(self._device, self._storages, self._units, self._slots))
        else:
            self._transfer = HostTransfer(self._storages, self._units, self._slots)

    def _mapped(self, mapped: dict[int, torch.Tensor], kind: Kind, rank: int, setup: Setup) -> torch.Tensor:
        """The memory of a rank that shares slots with this one."""
        if rank not in mapped:
            memory = map_shared(setup.memory[rank][kind.value])
            mapped[rank] = self._pinned(torch.frombuffer(memory, dtype=torch.uint8))
        return mapped[rank]

    def _describe(self, backend: Backend, setup: Setup) -> Call:
        def describe() -> str:
            backend.describe(setup.namespace, setup.fields)
            return ""

        return Call(describe, lambda cause, error: self._count("describe", cause, error), backoff_s=WRITE_BACKOFF_S)

    # -- one step -------------------------------------------------------------------------------------------------

    def begin(self, plan: StepPlan) -> None:
        """Start what does not wait for this step's forward: stages and loads."""
        if plan.setup is not None:
            self._set_up(plan.setup)
        # A runner may leave a step without its end (pipeline stages under speculative decoding on vLLM's V1 runner).
        if self._unstarted:
            self._saves_failed(self._unstarted, "no_end")
        saves = [save for save in plan.saves if self._does(save.ranks)]
        self._unstarted = tuple(save for save in saves if not save.copied and not save.is_final)
        self._save([save for save in saves if save.is_final])
        calls = [self._stage(stage, self._setup) for stage in plan.stages if self._does(stage.ranks)]
        calls += [self._write(save, self._setup) for save in saves if save.copied]
        if plan.touches and self._backend is not None:
            calls.append(self._touch(plan.touches, self._setup))
        if calls:
            self._pipeline.submit(calls)
        for load in plan.loads:
            self._load(load)

    def _does(self, ranks: tuple[int, ...] | None) -> bool:
        return ranks is None or self._rank in ranks

    def end(self, plan: StepPlan) -> None:
        """Start the saves of this step, whose bytes the forward just wrote."""
        saves, self._unstarted = self._unstarted, ()
        # Together what the next forward waits for, so that it waits for nothing else.
        self._save([save for save in saves if save.is_volatile], before_next=True)
        self._save([save for save in saves if not save.is_volatile])

    def poll(self, idle: bool) -> None:
        """Collect finished copies; in an idle step, first give storage a moment."""
        self._pipeline.watch()
        if idle and self._pipeline.pending and not self._running:
            self._pipeline.wait_idle(_IDLE_WAIT_S)
        for _ in range(len(self._running)):
            running = self._running.popleft()
            try:
                if not self._ready()[0].done(running.ticket):
                    self._running.append(running)
                    continue
                cause = self.counters.failure("copy", running.ticket.error) if running.ticket.error else ""
            except Exception as error:
                cause = self.counters.failure("copy", error)
            self._copies_done(running, cause)

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Request ids whose loads ended since the last call, and those of them that failed."""
        finished, self._finished = self._finished, set()
        failed, self._failed = self._failed, set()
        return finished, failed

    def take_report(self) -> WorkerReport | None:
        """Results since the last call, or None."""
        results = []
        while self._results:
            results.append(self._results.popleft())
        down = not self._pipeline.answers
        changed = {self._rank: down} if down != self._told_down else {}
        self._told_down = down
        openings = self._pipeline.breaker.openings
        self.counters.add("breaker_openings", openings - self._told_openings)
        self._told_openings = openings
        reads = [self._reads.popleft() for _ in range(len(self._reads))]
        nbytes, seconds = sum(nbytes for nbytes, _ in reads), sum(seconds for _, seconds in reads)
        self.counters.add("read_bytes", nbytes)
        speed = {self._rank: (nbytes, seconds)} if reads else {}
        return WorkerReport(results, changed, speed) if results or changed or speed else None

    # -- jobs -----------------------------------------------------------------------------------------------------

    def _save(self, saves: Sequence[SaveJob], before_next: bool = False) -> None:
        if not saves:
            return
        try:
            transfer, setup = self._ready()
            ticket = transfer.save([save.copy for save in saves], before_next)
            self._running.append(_Running(ticket, setup, saves=tuple(saves)))
        except Exception as error:
            self._saves_failed(saves, self.counters.failure("save", error))

    def _load(self, load: LoadJob) -> None:
        cause = "broken" if load.broken else ""
        if not cause:
            try:
                transfer, setup = self._ready()
                self._running.append(_Running(transfer.load(load.copies), setup, load=load))
                return
            except Exception as error:
                cause = self.counters.failure("load", error)
        self._load_done(load, cause)

    def _load_done(self, load: LoadJob, cause: str) -> None:
        self._finished.add(load.request_id)
        if cause:
            self._failed.add(load.request_id)
        else:
            self.counters.add("loaded_bytes", sum(self._units[copy.group].unit_bytes for copy in load.copies))
        self._result(load.job, Phase.LOADED, cause)

    def _copies_done(self, running: _Running, cause: str) -> None:
        if running.load is not None:
            self._load_done(running.load, cause)
        if cause:
            self._saves_failed(running.saves, cause)
            return
        for save in running.saves:
            self._result(save.job, Phase.COPIED)
            self.counters.add("saved_bytes", self._units[save.copy.group].unit_bytes)
        if self._backend is not None:
            self._pipeline.submit([self._write(save, running.setup) for save in running.saves if save.written])

    def _saves_failed(self, saves: Sequence[SaveJob], cause: str) -> None:
        for save in saves:
            self._result(save.job, Phase.COPIED, cause)

    def _stage(self, stage: StageJob, setup: Setup | None) -> Call:
        def read() -> str:
            payload = self._payload(stage.key, stage.slot)
            began_s = time.perf_counter()
            found = record.read_into(*self._record(stage.key, setup), payload)
            if found:
                self._reads.append((payload.nbytes, time.perf_counter() - began_s))
            return "" if found else record.GONE

        def done(cause: str, error: Exception | None) -> None:
            self._count("stage", cause, error)
            self._result(stage.job, Phase.STAGED, cause)

        return Call(read, done, is_read=True, backoff_s=READ_BACKOFF_S, key=stage.key)

    def _write(self, save: SaveJob, setup: Setup | None) -> Call:
        nbytes = self._units[save.copy.group].unit_bytes

        def write() -> str:
            payload = self._payload(save.key, save.copy.slot)
            self.counters.add("written_bytes", record.write(*self._record(save.key, setup), payload))
            return ""

        def done(cause: str, error: Exception | None) -> None:
            self._count("write", cause, error)
            self._result(save.job, Phase.WRITTEN, cause)

        return Call(write, done, nbytes=nbytes, backoff_s=WRITE_BACKOFF_S, key=save.key)

    def _touch(self, keys: Sequence[UnitKey], setup: Setup | None) -> Call:
        def touch() -> str:
            by_bucket: dict[int, list[bytes]] = {}
            for key in keys:
                bucket, key_of_record = self._record(key, setup)
                if key_of_record.rank == self._rank:  # else another rank does it
                    by_bucket.setdefault(key_of_record.rank, []).append(key_of_record.id)
            for ids in by_bucket.values():
                bucket.touch(ids)
            return ""

        return Call(touch, lambda cause, error: self._count("touch", cause, error))

    def _count(self, operation: str, cause: str, error: Exception | None) -> None:
        if error is not None:
            self.counters.failure(operation, error, cause)
        elif cause:
            self.counters.add("failures", 1, f"{operation}:{cause}")

    # -- shared ---------------------------------------------------------------------------------------------------

    def _result(self, job: int, phase: Phase, cause: str = "") -> None:
        self._results.append(Result(job, phase, self._rank, cause))

    def _ready(self) -> tuple[Transfer, Setup]:
        if self._transfer is None or self._setup is None:
            raise ContractError("there is no host memory: its set-up failed, or a job came before it")
        return self._transfer, self._setup

    def _payload(self, key: UnitKey, slot: int) -> memoryview:
        return self._slots[key.group].view(slot, self._units[key.group].unit_bytes)

    def _record(self, key: UnitKey, setup: Setup | None) -> tuple[Bucket, record.RecordKey]:
        """Where a unit's record is, and its key, under the namespace that the job was planned with."""
        if self._backend is None or setup is None:
            raise BackendError("there is no backend, or it is closed")
        # Opened anew for every job, which is free: a backend that could not be opened once is not given up.
        bucket = self._ranks.bucket(self._spread[key.group], self._rank)
        return self._backend.bucket(setup.namespace, bucket), record.RecordKey(
            namespace=setup.namespace,
            group_seed=setup.seeds[key.group],
            kind="snapshot" if isinstance(key, SnapshotKey) else "block",
            prefix=key.prefix,
            parent=key.parent,
            depth_tokens=key.depth_tokens,
            rank=bucket,
        )

    def wait_durable(self, keys: Sequence[UnitKey], timeout_s: float) -> list[UnitKey]:
        """Wait for this rank's writes of `keys`; those of them that the backend then does not have, in order.

        Asks the backend itself, so a key that was never saved, or was given up, is among them.
        """
        deadline_s = time.monotonic() + timeout_s
        self._pipeline.wait_for(keys, timeout_s)
        found: set[UnitKey] = set()

        def ask(key: UnitKey) -> Call:
            def contains() -> str:
                bucket, key_of_record = self._record(key, self._setup)
                return "" if bucket.contains(key_of_record.id) else record.GONE

            def done(cause: str, error: Exception | None) -> None:
                if not cause:
                    found.add(key)

            return Call(contains, done, is_read=True, key=("durable", key))

        self._pipeline.submit([ask(key) for key in keys])
        self._pipeline.wait_for([("durable", key) for key in keys], max(0.0, deadline_s - time.monotonic()))
        return [key for key in keys if key not in found]

    def shutdown(self, timeout_s: float = _SHUTDOWN_S) -> None:
        """Let writes in flight finish, within a deadline, and give the memory back; may be called again."""
        pending = self._pipeline.close(timeout_s)
        if pending:
            logger.warning("ucmcache: %d storage calls did not end within %.0f s and are given up", pending, timeout_s)
        # A process may outlive its engine, and start another one. What hangs keeps what it is reading from.
        self._running.clear()
        self._transfer = None
        self._slots.clear()
        self._memory.clear()
        for handle in self._handles.values():
            os.close(handle.fd)
        self._handles.clear()
        if self._backend is not None and not pending:
            try:
                self._backend.close()
            except Exception as error:
                self.counters.failure("close", error)
            self._backend = None
