"""Metrics: one table, from the counters to vLLM's own Prometheus registry."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ucmcache.connector.connector import UcmCacheConnector
from ucmcache.connector.metrics import GAUGES, LABELS, METRICS, Counters, UcmCacheStats


def test_every_metric_reaches_prometheus() -> None:
    registry = CollectorRegistry()

    def counter(**options: Any) -> Counter:
        return Counter(registry=registry, **options)

    def gauge(**options: Any) -> Gauge:
        return Gauge(registry=registry, **options)

    config = SimpleNamespace(kv_transfer_config=None)
    metrics = UcmCacheConnector.build_prom_metrics(
        config,
        {Counter: counter, Gauge: gauge, Histogram: Histogram},
        ["model_name", "engine"],
        {0: ["m", "0"], 1: ["m", "1"]},
    )
    assert metrics is not None
    counters = Counters()
    for i, name in enumerate(METRICS):
        counters.add(name, i + 1, "why" if name in LABELS else "")
    metrics.observe(counters.take(), engine_idx=1)
    metrics.observe({"promised_tokens": 10, "a name of a later version": 1}, engine_idx=1)
    text = generate_latest(registry).decode()
    for i, name in enumerate(METRICS):
        expected = i + 1 + (10 if name == "promised_tokens" else 0)
        lines = [line for line in text.splitlines() if line.startswith(f"vllm:ucmcache_{name}_total{{")]
        assert len(lines) == 1
        assert lines[0].endswith(f" {float(expected)}")
        assert 'engine="1"' in lines[0]
        assert ('="why"' in lines[0]) == (name in LABELS)
        assert name not in LABELS or f'{LABELS[name]}="why"' in lines[0]
    for changes, now in (([5, 7], 12), ([-3], 9)):
        for change in changes:
            metrics.observe(dict.fromkeys(GAUGES, change), engine_idx=1)
        text = generate_latest(registry).decode()
        for name in GAUGES:
            assert f'vllm:ucmcache_{name}{{engine="1",model_name="m"}} {float(now)}' in text


def test_stats_add_up_over_ranks_and_steps_and_travel() -> None:
    one, other = UcmCacheStats(data={"saved_bytes": 3}), UcmCacheStats(data={"saved_bytes": 4, "read_bytes": 1})
    total = pickle.loads(pickle.dumps(one)).aggregate(pickle.loads(pickle.dumps(other)))
    assert total.reduce() == {"read_bytes": 1, "saved_bytes": 7}
    assert not total.is_empty()
    rebuilt = UcmCacheConnector.build_kv_connector_stats(total.to_dict())
    assert rebuilt is not None
    assert rebuilt.reduce() == total.reduce()
    total.reset()
    assert total.is_empty()


def test_counting_from_threads_loses_nothing() -> None:
    from concurrent.futures import ThreadPoolExecutor

    counters = Counters()
    with ThreadPoolExecutor(8) as pool:
        for _ in range(800):
            pool.submit(counters.add, "saved_bytes", 1)
    assert counters.take() == {"saved_bytes": 800}
    assert counters.take() == {}
