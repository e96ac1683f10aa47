"""UcmCacheConnector: vLLM's hooks, dispatched to the scheduler side or the worker side. No decision is made here."""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from ucmcache.config import available_host_bytes, load_config
from ucmcache.connector.assembly import build_scheduler_side, check_sessions, worker_rank, worker_ranks
from ucmcache.connector.identity import Adapters, identify
from ucmcache.connector.messages import StepPlan, WorkerFacts, WorkerReport
from ucmcache.connector.metrics import UcmCachePromMetrics, UcmCacheStats
from ucmcache.connector.scheduler import SchedulerSide
from ucmcache.connector.worker import WorkerSide
from ucmcache.coordinator.spec import load_rows


class UcmCacheConnector(KVConnectorBase_V1, SupportsHMA):
    """The connector that `--kv-transfer-config` names; one instance per role.

    `kv_connector_extra_config` is described in ucmcache.config. Raises ConfigError and UnsupportedModelError at start,
    and nothing afterwards.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._config = load_config(self._kv_transfer_config.kv_connector_extra_config or {})
        load_rows(self._config.spec_modules)
        check_sessions(self._config, vllm_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._pool: Any = None
        self._adapters = Adapters()
        if role is KVConnectorRole.WORKER:
            # Here and not in the scheduler, which begins when the workers have taken the memory.
            self._config.check_fits(available_host_bytes())
            ranks = worker_ranks(vllm_config)
            self._worker = WorkerSide(self._config, kv_cache_config, worker_rank(vllm_config), ranks)
            atexit.register(self._worker.shutdown)  # an engine may end without calling `shutdown`

    # -- capabilities -----------------------------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a dropped save is a later miss, nothing more

    # -- worker side ------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        self._require(self._worker).register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._require(self._worker).facts

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._require(self._worker).begin(self._plan())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads are whole before their request runs, and recurrent layers never call this."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: recurrent layers never call this, so all groups are saved in `wait_for_save`."""

    def wait_for_save(self) -> None:
        self._require(self._worker).end(self._plan())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        worker = self._require(self._worker)
        worker.poll(self._plan().idle)
        finished, failed = worker.take_finished()
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self.get_transfer_results(finished_req_ids).finished_recving or None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._require(self._worker).take_report()

    # -- scheduler side ---------------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        # By pipeline stage and rank inside it, which is the order of the ranks themselves.
        facts = [facts for _, facts in sorted(metadata.items()) if isinstance(facts, WorkerFacts)]
        self._scheduler = build_scheduler_side(self._config, self._vllm_config, self._kv_cache_config, facts)
        self._scheduler.bind_pool(self._pool)

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): facts for rank, facts in metadata.items()})

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._pool = gpu_block_pool

    def on_new_request(self, request: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.track(request, identify(request, self._adapters))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        tokens = self._scheduler.lookup(request, num_computed_tokens)
        # Asynchronous whenever there is something to load: a synchronous load of a recurrent state comes after the
        # engine has copied the state onward, and is silently wrong (docs/adr/0002).
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        if not num_external_tokens:
            return {}
        staged = self._scheduler is not None and self._scheduler.from_backend(request.request_id)
        return {CacheHitSource.DISK if staged else CacheHitSource.HOST: num_external_tokens}

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._scheduler.plan(scheduler_output) if self._scheduler is not None else StepPlan()

    def update_connector_output(self, connector_output: Any) -> None:
        report = getattr(connector_output, "kv_connector_worker_meta", None)
        if self._scheduler is not None:
            self._scheduler.stepped()
            if isinstance(report, WorkerReport):
                self._scheduler.report(report)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is not None:
            self._scheduler.finished(request, block_ids)
        return False, None  # blocks still being copied are held one by one

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.busy()

    def reset_cache(self) -> bool | None:
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    # -- both -------------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        side = self._worker.counters.take() if self._worker is not None else {}
        if self._scheduler is not None:
            side = self._scheduler.take_counts()
        return UcmCacheStats(data=side) if side else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return UcmCacheStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        return UcmCachePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()
        if self._scheduler is not None:
            self._scheduler.shutdown()

    def _plan(self) -> StepPlan:
        plan = self._connector_metadata
        return plan if isinstance(plan, StepPlan) else StepPlan()

    @staticmethod
    def _require(worker: WorkerSide | None) -> WorkerSide:
        if worker is None:
            raise RuntimeError("a worker hook was called on the scheduler's connector")
        return worker
