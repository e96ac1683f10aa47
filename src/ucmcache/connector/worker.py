"""WorkerSide: carries plans out and reports a result per unit.

Nothing that a copy or a backend raises leaves this file: it is caught once per job, counted by cause, and the request
recomputes.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch

from ucmcache.config import Config
from ucmcache.connector.layout import Storages, UnitMap, content_text, unit_map
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
from ucmcache.connector.transfer import CudaDevice, HostTransfer, StreamTransfer, Transfer
from ucmcache.errors import BackendError, RecordError
from ucmcache.keys import SnapshotKey, UnitKey
from ucmcache.store import record
from ucmcache.store.arena import PagedMemory, SlotMemory
from ucmcache.store.backend import Backend, Bucket, open_backend

logger = logging.getLogger(__name__)

_IO_THREADS = 2
# How long an idle step waits for storage: an engine with nothing to compute neither spins nor takes a step per unit,
# and a request that arrives meanwhile waits no longer than this.
_IDLE_WAIT_S = 0.005
_SHUTDOWN_S = 10.0
# Few enough that both threads get some, enough that a task's own cost does not count.
_STAGES_A_TASK = 4


def _advance(lagging: Sequence[PagedMemory]) -> None:
    for paged in lagging:
        while paged.behind:
            paged.advance()


@dataclass(frozen=True, slots=True)
class _Running:
    """A submitted group of copies and whose they are."""

    ticket: Any
    epoch: int
    saves: tuple[SaveJob, ...] = ()
    load: LoadJob | None = None


class WorkerSide:
    """One rank's half of the connector.

    Guaranteed by the caller: plans arrive in order, each once; `begin` before the forward or right after it was
    launched, `end` after it was launched. Promised: every job of a plan gets exactly one result per phase; a load's
    blocks are whole before its request is reported.
    """

    def __init__(
        self,
        config: Config,
        kv_cache_config: Any,
        rank: int,
        executor: Executor | None = None,
        backend: Backend | None = None,
    ) -> None:
        self._config = config
        self._kv_cache_config = kv_cache_config
        self._rank = rank
        self._executor = executor or ThreadPoolExecutor(_IO_THREADS, thread_name_prefix="ucmcache-io")
        self._backend = backend
        if backend is None and config.backend is not None:
            self._backend = open_backend(config.backend.url, config.backend.capacity_bytes)
        self._storages = Storages()
        self._units: dict[int, UnitMap] = {}
        self._facts: WorkerFacts | None = None
        self._setup: Setup | None = None
        self._slots: dict[int, SlotMemory] = {}
        self._paged: dict[int, PagedMemory] = {}
        self._paging: Future[None] | None = None
        self._transfer: Transfer | None = None
        self._running: deque[_Running] = deque()
        self._results: deque[Result] = deque()  # appended to by I/O threads too
        self._io: set[Future[None]] = set()
        self._epoch = 0  # counts resets: what was saved before one is not written after it
        self._clearing: Future[None] | None = None
        self._progress = threading.Condition()
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self.counters = Counters()

    # -- start ----------------------------------------------------------------------------------------------------

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Learn where the engine keeps its KV; called once."""
        groups = {}
        for group_id, group in enumerate(self._kv_cache_config.kv_cache_groups):
            unit = unit_map(kv_caches, group.layer_names, self._kv_cache_config.num_blocks, self._storages)
            self._units[group_id] = unit
            groups[group_id] = GroupGeometry(unit.unit_bytes, content_text(group, unit))
        self._facts = WorkerFacts(groups)

    @property
    def facts(self) -> WorkerFacts | None:
        """What the scheduler side must know of this worker; None before `register`."""
        return self._facts

    def _set_up(self, setup: Setup) -> None:
        self._setup = setup
        on_cuda = any(storage.is_cuda for storage in self._storages.flat)
        pinned: dict[int, torch.Tensor] = {}
        for plan in (*setup.block_arenas, *setup.state_arenas):
            size = plan.slots * plan.slot_bytes
            if on_cuda:
                tensor = torch.empty(size, dtype=torch.uint8, pin_memory=True)
                memory = SlotMemory(plan, tensor.numpy())
                pinned.update(dict.fromkeys(plan.groups, tensor.view(plan.slots, plan.slot_bytes)))
            else:
                paged = PagedMemory(size)
                memory = SlotMemory(plan, paged.buffer)
                self._paged.update(dict.fromkeys(plan.groups, paged))
            self._slots.update(dict.fromkeys(plan.groups, memory))
        if on_cuda:
            device = next(storage.device for storage in self._storages.flat if storage.is_cuda)
            self._transfer = StreamTransfer(CudaDevice(device, self._storages, self._units, pinned))
        else:
            self._transfer = HostTransfer(self._storages, self._units, self._slots)
        if self._backend is not None:
            self._submit(self._describe, setup)

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
        if plan.clear:
            self._clear_bucket()
        for start in range(0, len(plan.stages), _STAGES_A_TASK):
            self._submit(self._stage_all, plan.stages[start : start + _STAGES_A_TASK])
        for load in plan.loads:
            self._load(load)
        self._page_ahead(plan)

    def _page_ahead(self, plan: StepPlan) -> None:
        for group, slot in [
            *((save.key.group, save.copy.slot) for save in plan.saves),
            *((stage.key.group, stage.slot) for stage in plan.stages),
        ]:
            if group in self._paged:
                self._paged[group].use((slot + 1) * self._slots[group].plan.slot_bytes)
        lagging = [paged for paged in set(self._paged.values()) if paged.behind]
        if lagging and (self._paging is None or self._paging.done()):
            self._paging = self._executor.submit(_advance, lagging)

    def end(self, plan: StepPlan) -> None:
        """Start the saves of this step, whose bytes the forward just wrote."""
        if not plan.saves:
            return
        saves = tuple(plan.saves)
        try:
            ticket = self._ready_transfer().save([save.copy for save in saves])
        except Exception as error:
            self._copies_done(_Running(None, self._epoch, saves=saves), self.counters.failure("save", error))
            return
        self._running.append(_Running(ticket, self._epoch, saves=saves))

    def poll(self, idle: bool) -> None:
        """Collect finished copies; in an idle step, first give storage a moment."""
        if idle and self._io and not self._running:
            with self._progress:
                self._progress.wait_for(lambda: not self._io, _IDLE_WAIT_S)
        for _ in range(len(self._running)):
            running = self._running.popleft()
            try:
                if not self._ready_transfer().done(running.ticket):
                    self._running.append(running)
                    continue
                cause = ""
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
        return WorkerReport(results) if results else None

    # -- jobs -----------------------------------------------------------------------------------------------------

    def _load(self, load: LoadJob) -> None:
        cause = "broken" if load.broken else ""
        if not cause:
            try:
                ticket = self._ready_transfer().load(load.copies)
                self._running.append(_Running(ticket, self._epoch, load=load))
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
        self._results.append(Result(load.job, Phase.LOADED, cause))

    def _copies_done(self, running: _Running, cause: str) -> None:
        if running.load is not None:
            self._load_done(running.load, cause)
        for save in running.saves:
            self._results.append(Result(save.job, Phase.COPIED, cause))
            if not cause:
                self.counters.add("saved_bytes", self._units[save.copy.group].unit_bytes)
            if self._backend is None:
                continue
            if cause or running.epoch != self._epoch:
                self._results.append(Result(save.job, Phase.WRITTEN, cause or "reset"))
            else:
                self._submit(self._write, save, self._clearing)

    def _stage_all(self, stages: Sequence[StageJob]) -> None:
        for stage in stages:
            self._stage(stage)

    def _stage(self, stage: StageJob) -> None:
        try:
            payload = self._payload(stage.key, stage.slot)
            cause = "" if record.read_into(self._bucket(), self._record_key(stage.key), payload) else "gone"
            if cause:
                self.counters.add("failures", 1, "stage:gone")
            else:
                self.counters.add("read_bytes", payload.nbytes)
        except RecordError as error:
            cause = self.counters.failure("stage", error, error.cause)
        except Exception as error:
            cause = self.counters.failure("stage", error)
        self._results.append(Result(stage.job, Phase.STAGED, cause))

    def _write(self, save: SaveJob, clearing: Future[None] | None) -> None:
        if clearing is not None:
            wait([clearing])  # what is written after a reset must outlive its clearing
        cause = ""
        try:
            payload = self._payload(save.key, save.copy.slot)
            self.counters.add("written_bytes", record.write(self._bucket(), self._record_key(save.key), payload))
        except Exception as error:
            cause = self.counters.failure("write", error)
        self._results.append(Result(save.job, Phase.WRITTEN, cause))

    def _clear_bucket(self) -> None:
        self._epoch += 1
        self._clearing = self._submit(self._clear_after, tuple(self._io))

    def _clear_after(self, earlier: tuple[Future[None], ...]) -> None:
        wait(earlier)
        try:
            self._bucket().clear()
        except Exception as error:
            self.counters.failure("clear", error)

    # -- shared ---------------------------------------------------------------------------------------------------

    def _ready_transfer(self) -> Transfer:
        if self._transfer is None:
            raise RuntimeError("a job arrived before the plan that sets this worker up")
        return self._transfer

    def _bucket(self) -> Bucket:
        # Opened anew for every job, which is free: a backend that could not be opened once is not given up.
        if self._backend is None or self._setup is None:
            raise BackendError("there is no backend, or it is closed")
        return self._backend.bucket(self._setup.namespace, self._rank)

    def _payload(self, key: UnitKey, slot: int) -> memoryview:
        return self._slots[key.group].view(slot, self._units[key.group].unit_bytes)

    def _record_key(self, key: UnitKey) -> record.RecordKey:
        if self._setup is None:
            raise RuntimeError("a record is named before the plan that sets this worker up")
        return record.RecordKey(
            namespace=self._setup.namespace,
            group_seed=self._setup.seeds[key.group],
            kind="snapshot" if isinstance(key, SnapshotKey) else "block",
            prefix=key.prefix,
            parent=key.parent,
            depth_tokens=key.depth_tokens,
            rank=self._rank,
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
        """Let writes in flight finish, within a deadline; may be called again."""
        pending = wait(tuple(self._io), timeout=timeout_s).not_done
        if pending:
            logger.warning(
                "ucmcache: %d storage jobs did not end within %.0f s and are given up", len(pending), timeout_s
            )
        self._executor.shutdown(wait=not pending, cancel_futures=True)
        if self._backend is not None and not pending:
            try:
                self._backend.close()
            except Exception as error:
                self.counters.failure("close", error)
            self._backend = None
