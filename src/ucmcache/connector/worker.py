"""WorkerSide: carries plans out and reports a result per unit.

Nothing that a copy or a backend raises leaves this file: it is caught once per job, counted by cause, and the request
recomputes.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from typing import Any

import torch

from ucmcache.config import Config
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
from ucmcache.connector.pool import DaemonPool
from ucmcache.connector.ranks import Ranks
from ucmcache.connector.transfer import CudaDevice, HostTransfer, StreamTransfer, Ticket, Transfer
from ucmcache.coordinator.binding import bind
from ucmcache.coordinator.spec import Kind
from ucmcache.errors import BackendError, ConfigError, ContractError, RecordError
from ucmcache.keys import SnapshotKey, UnitKey
from ucmcache.store import record
from ucmcache.store.backend import Backend, Bucket, open_backend
from ucmcache.store.breaker import Breaker
from ucmcache.store.memory import MemoryHandle, SlotMemory, map_shared, take_memory, take_shared_memory

logger = logging.getLogger(__name__)

_IO_THREADS = 2
# How long an idle step waits for storage: an engine with nothing to compute neither spins nor takes a step per unit,
# and a request that arrives meanwhile waits no longer than this.
_IDLE_WAIT_S = 0.005
_SHUTDOWN_S = 10.0
REFUSED = "breaker"  # why a job was not tried: its backend is left alone for a while
# Few enough that both threads get some, enough that a task's own cost does not count.
_STAGES_A_TASK = 4


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
        executor: Executor | None = None,
        backend: Backend | None = None,
    ) -> None:
        self._config = config
        self._kv_cache_config = kv_cache_config
        self._rank = rank
        self._ranks = ranks
        self._executor = executor or DaemonPool(_IO_THREADS, "ucmcache-io")
        self._backend = backend
        if backend is None and config.backend is not None:
            self._backend = open_backend(config.backend.url, config.backend.capacity_bytes)
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
        self._io: set[Future[None]] = set()
        self._unstarted: tuple[SaveJob, ...] = ()  # of the plan whose `end` is still to come
        self._progress = threading.Condition()
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._breaker = Breaker()
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
            if spreads:
                self._memory[kind] = self._take(kind, nbytes, max(spreads) > 1)
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
        if self._backend is not None:
            self._submit(self._describe, setup)

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

    def _describe(self, setup: Setup) -> None:
        # Only for people and for warnings at a later start; bytes do not depend on it.
        if self._backend is not None and self._rank == 0:
            try:
                self._backend.describe(setup.namespace, setup.fields)
            except Exception as error:
                self.counters.failure("describe", error)

    # -- one step -------------------------------------------------------------------------------------------------

    def begin(self, plan: StepPlan) -> None:
        """Start what does not wait for this step's forward: stages and loads."""
        if plan.setup is not None:
            self._set_up(plan.setup)
        # A runner may leave a step without its end (pipeline stages under speculative decoding on vLLM's V1 runner).
        if self._unstarted:
            self._saves_failed(self._unstarted, "no_end")
        saves = [save for save in plan.saves if self._does(save.ranks)]
        self._unstarted = tuple(save for save in saves if not save.copied)
        for save in saves:
            if save.copied:
                self._submit(self._write, save, self._setup)
        stages = [stage for stage in plan.stages if self._does(stage.ranks)]
        for start in range(0, len(stages), _STAGES_A_TASK):
            self._submit(self._stage_all, stages[start : start + _STAGES_A_TASK], self._setup)
        for load in plan.loads:
            self._load(load)

    def _does(self, ranks: tuple[int, ...] | None) -> bool:
        return ranks is None or self._rank in ranks

    def end(self, plan: StepPlan) -> None:
        """Start the saves of this step, whose bytes the forward just wrote."""
        saves, self._unstarted = self._unstarted, ()
        if not saves:
            return
        try:
            transfer, setup = self._ready()
            self._running.append(_Running(transfer.save([save.copy for save in saves]), setup, saves=saves))
        except Exception as error:
            self._saves_failed(saves, self.counters.failure("save", error))

    def poll(self, idle: bool) -> None:
        """Collect finished copies; in an idle step, first give storage a moment."""
        if idle and self._io and not self._running:
            with self._progress:
                self._progress.wait_for(lambda: not self._io, _IDLE_WAIT_S)
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
        down = self._breaker.is_open
        changed = {self._rank: down} if down != self._told_down else {}
        self._told_down = down
        self.counters.add("breaker_openings", self._breaker.openings - self._told_openings)
        self._told_openings = self._breaker.openings
        return WorkerReport(results, changed) if results or changed else None

    # -- jobs -----------------------------------------------------------------------------------------------------

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
                self._submit(self._write, save, running.setup)

    def _saves_failed(self, saves: Sequence[SaveJob], cause: str) -> None:
        for save in saves:
            self._result(save.job, Phase.COPIED, cause)

    def _stage_all(self, stages: Sequence[StageJob], setup: Setup | None) -> None:
        for stage in stages:
            self._stage(stage, setup)

    def _stage(self, stage: StageJob, setup: Setup | None) -> None:
        if not self._breaker.allows():
            self.counters.add("failures", 1, f"stage:{REFUSED}")
            self._result(stage.job, Phase.STAGED, REFUSED)
            return
        try:
            payload = self._payload(stage.key, stage.slot)
            cause = "" if record.read_into(*self._record(stage.key, setup), payload) else record.GONE
            if cause:
                self.counters.add("failures", 1, f"stage:{cause}")
            else:
                self.counters.add("read_bytes", payload.nbytes)
            self._breaker.succeeded()
        except RecordError as error:
            self._breaker.succeeded()  # it answered
            cause = self.counters.failure("stage", error, error.cause)
        except Exception as error:
            self._breaker.failed()
            cause = self.counters.failure("stage", error)
        self._result(stage.job, Phase.STAGED, cause)

    def _write(self, save: SaveJob, setup: Setup | None) -> None:
        cause = ""
        if not self._breaker.allows():
            self.counters.add("failures", 1, f"write:{REFUSED}")
            self._result(save.job, Phase.WRITTEN, REFUSED)
            return
        try:
            payload = self._payload(save.key, save.copy.slot)
            self.counters.add("written_bytes", record.write(*self._record(save.key, setup), payload))
            self._breaker.succeeded()
        except Exception as error:
            self._breaker.failed()
            cause = self.counters.failure("write", error)
        self._result(save.job, Phase.WRITTEN, cause)

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

    def _submit(self, job: Callable[..., None], *args: object) -> Future[None]:
        future = self._executor.submit(job, *args)
        self._io.add(future)
        future.add_done_callback(self._io_done)
        return future

    def _io_done(self, future: Future[None]) -> None:
        self._io.discard(future)
        with self._progress:
            self._progress.notify_all()

    def shutdown(self, timeout_s: float = _SHUTDOWN_S) -> None:
        """Let writes in flight finish, within a deadline, and give the memory back; may be called again."""
        pending = wait(tuple(self._io), timeout=timeout_s).not_done
        if pending:
            logger.warning(
                "ucmcache: %d storage jobs did not end within %.0f s and are given up", len(pending), timeout_s
            )
        self._executor.shutdown(wait=not pending, cancel_futures=True)
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
