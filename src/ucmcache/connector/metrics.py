"""What ucmcache counts: one table, from which the stats that travel, the log line and the Prometheus names all come."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import Any

from prometheus_client import Counter as PromCounter
from prometheus_client import Gauge as PromGauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

logger = logging.getLogger(__name__)

# name -> what it counts. Prometheus: vllm:ucmcache_<name>; a name with a label is kept as "name/label value".
METRICS: dict[str, str] = {
    "promised_tokens": "Tokens that a lookup promised the engine and the engine made room for.",
    "loaded_tokens": "Promised tokens whose bytes reached the engine's blocks.",
    "adopted_tokens": "Loaded tokens that a request then really resumed from.",
    "failed_tokens": "Promised tokens whose load failed; they are recomputed.",
    "chain_tokens": "Tokens that the chain groups had, beyond the engine's own, for requests as they were admitted.",
    "lost_tokens": "Chain tokens that were not adopted, by cause.",
    "saved_bytes": "Bytes copied out of the engine into host memory.",
    "loaded_bytes": "Bytes copied from host memory into the engine.",
    "written_bytes": "Bytes written to the backend.",
    "read_bytes": "Bytes read from the backend and verified.",
    "saved_blocks": "Blocks of chain groups kept.",
    "saved_states": "States of recurrent groups kept.",
    "state_saves": "Positions whose states were kept, by why.",
    "state_first_reads": "Of these, resumed from at least once.",
    "state_saved_tokens": "Tokens that requests resumed past, by why there was a state.",
    "evicted_units": "Units that left host memory to make room.",
    "refused_units": "Units not kept, since host memory was full of units in use.",
    "taken_over_units": "Saves that a rank failed in and another, which has the same bytes, was given.",
    "breaker_openings": "Times that a rank's backend was left alone for a while, after failing again and again.",
    "retried_calls": "Calls to the backend that failed and were made again.",
    "slow_lookups": "Lookups that left stored bytes alone, since to compute was faster than to read.",
    "late_lookups": "Lookups that stopped waiting for the backend at the promise deadline.",
    "frontier_appends": "Requests that continued a session from the last token that it had computed.",
    "turn_restores": "Requests that continued a session from the end of its last prompt.",
    "full_resets": "Requests that continued no session that was kept.",
    "attaches": "Sessions that came back to a lane after another had theirs.",
    "detaches": "Sessions that gave their lane to another and were kept.",
    "evicted_sessions": "Sessions that were given up for another.",
    "expired_sessions": "Sessions that nobody came for within sessions.ttl.",
    "refused_sessions": "Sessions that were not kept, for want of room.",
    "fenced_writers": "Late results of a session that had gone on, or gone, which changed nothing.",
    "failures": "Failed jobs, by operation and cause.",
}
# What is now and not how much has been; counted as changes, so that they add up like the rest.
GAUGES: dict[str, str] = {
    "session_kv_bytes": "Host memory that sessions hold for blocks, whole ones and those that are full in part.",
    "session_state_bytes": "Host memory that sessions hold for recurrent states.",
}
LABELS: dict[str, str] = {
    "lost_tokens": "cause",
    "failures": "cause",
    "state_saves": "trigger",
    "state_first_reads": "trigger",
    "state_saved_tokens": "trigger",
}


class Counters:
    """Counts since the last `take`; threads may add at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._warned: set[str] = set()

    def add(self, name: str, amount: int, label: str = "") -> None:
        """Add to a metric of METRICS or GAUGES; `label` for those in LABELS."""
        if amount:
            with self._lock:
                self._counts[f"{name}/{label}" if label else name] += amount

    def failure(self, operation: str, error: BaseException, cause: str = "") -> str:
        """Count a failed job and return its cause; logged once per operation and cause."""
        cause = cause or type(error).__name__
        label = f"{operation}:{cause}"
        self.add("failures", 1, label)
        if label not in self._warned:
            self._warned.add(label)
            logger.warning("ucmcache: %s failed (%s): %s; further ones are only counted", operation, cause, error)
        return cause

    def take(self) -> dict[str, int]:
        """Counts since the last call."""
        if not self._counts:
            return {}  # what another thread adds just now is of the next call
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return dict(counts)


class UcmCacheStats(KVConnectorStats):
    """Counts of one interval; both sides' are summed."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> UcmCacheStats:
        total = Counter(self.data)
        total.update(other.data)
        self.data = dict(total)
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(sorted(self.data.items()))

    def is_empty(self) -> bool:
        return not self.data


class UcmCachePromMetrics(KVConnectorPromMetrics):
    """METRICS as counters, and GAUGES, on vLLM's own Prometheus endpoint."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter, gauge = metric_types[PromCounter], metric_types[PromGauge]
        self._counters = {
            name: counter(
                name=f"vllm:ucmcache_{name}",
                documentation=text,
                labelnames=[*labelnames, *([LABELS[name]] if name in LABELS else [])],
            )
            for name, text in METRICS.items()
        }
        self._counters |= {
            name: gauge(
                name=f"vllm:ucmcache_{name}", documentation=text, labelnames=labelnames, multiprocess_mode="sum"
            )
            for name, text in GAUGES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for key, amount in transfer_stats_data.items():
            name, _, label = key.partition("/")
            if name in self._counters:
                self._counters[name].labels(*values, *([label] if name in LABELS else [])).inc(amount)
