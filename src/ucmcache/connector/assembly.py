"""Puts the scheduler side together from vLLM's configuration and what the workers told."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ucmcache.config import Config
from ucmcache.connector.identity import namespace_of
from ucmcache.connector.layout import group_facts
from ucmcache.connector.messages import Setup, WorkerFacts
from ucmcache.connector.scheduler import SchedulerSide
from ucmcache.coordinator.coordinator import Coordinator
from ucmcache.coordinator.spec import BoundRow, Kind, bind
from ucmcache.keys import Namespace
from ucmcache.store.arena import plan_arenas
from ucmcache.store.backend import Backend, open_backend
from ucmcache.store.block import BlockStore
from ucmcache.store.snapshot import SnapshotStore

logger = logging.getLogger(__name__)


def worker_rank(vllm_config: Any) -> int:
    """This worker's rank among all that hold KV of one engine."""
    return int(getattr(vllm_config.parallel_config, "rank", 0))


def worker_count(vllm_config: Any) -> int:
    """How many workers hold KV of one engine."""
    return int(getattr(vllm_config.parallel_config, "world_size", 1))


def build_scheduler_side(
    config: Config, vllm_config: Any, kv_cache_config: Any, workers: Sequence[WorkerFacts]
) -> SchedulerSide:
    """The scheduler side of an engine whose ranks are `workers`, with the index of what the backend already holds.

    Raises UnsupportedModelError for a group that no row covers, ConfigError where the host budget holds not one unit.
    """
    contents = {
        group: "\n".join(worker.groups[group].content for worker in workers)
        for group in range(len(kv_cache_config.kv_cache_groups))
    }
    rows = bind(group_facts(i, group, contents[i]) for i, group in enumerate(kv_cache_config.kv_cache_groups))
    namespace = namespace_of(config.namespace, vllm_config, kv_cache_config, contents.values())
    world_size = len(workers)
    setup = _setup(config, rows, workers, namespace)
    blocks = BlockStore(setup.block_arenas, setup.seeds, namespace.digest)
    states = SnapshotStore(setup.state_arenas, setup.seeds, namespace.digest)
    backend = open_backend(config.backend.url, config.backend.capacity_bytes) if config.backend is not None else None
    if backend is not None:
        _index_backend(backend, namespace, world_size, blocks, states)
        backend.close()
    coordinator = Coordinator(rows, blocks, states, config.retention.interval_tokens)
    chunked = getattr(vllm_config.scheduler_config, "enable_chunked_prefill", True)
    logger.info("ucmcache: namespace %s; %s", namespace.digest.hex(), coordinator.describe())
    _warn(vllm_config, namespace, rows)
    return SchedulerSide(
        config,
        coordinator,
        setup,
        world_size=world_size,
        hash_block_tokens=_hash_block_tokens(vllm_config, kv_cache_config),
        only_last=not chunked,
        speculative=getattr(vllm_config, "speculative_config", None) is not None,
        has_backend=backend is not None,
    )


def _setup(config: Config, rows: Sequence[BoundRow], workers: Sequence[WorkerFacts], namespace: Namespace) -> Setup:
    def units(kind: Kind) -> Mapping[int, tuple[int, int]]:
        # Every rank uses the same slot numbers, so a slot is as wide as the widest rank's unit.
        return {
            row.group: (max(worker.groups[row.group].unit_bytes for worker in workers), row.block_tokens)
            for row in rows
            if row.kind is kind
        }

    host = config.host.of_one_rank(len(workers))
    return Setup(
        namespace=namespace.digest,
        fields=dict(namespace.fields),
        seeds={row.group: row.seed for row in rows},
        block_arenas=tuple(plan_arenas("host.blocks", host.blocks_bytes, units(Kind.CHAIN), True)),
        state_arenas=tuple(plan_arenas("host.snapshots", host.snapshots_bytes, units(Kind.SNAPSHOT), False)),
    )


def _hash_block_tokens(vllm_config: Any, kv_cache_config: Any) -> int:
    return int(getattr(kv_cache_config, "hash_block_size", None) or vllm_config.cache_config.block_size)


def _index_backend(
    backend: Backend, namespace: Namespace, ranks: int, blocks: BlockStore, states: SnapshotStore
) -> None:
    try:
        # A unit is of use only where every rank has its part.
        found = set.intersection(
            *({info.id for info in backend.bucket(namespace.digest, rank).scan()} for rank in range(ranks))
        )
        others = backend.namespaces()
    except Exception as error:
        logger.warning(
            "ucmcache: the backend cannot be read at start (%s); serving goes on without what it holds", error
        )
        return
    blocks.add_stored(found)
    states.add_stored(found)
    logger.info("ucmcache: the backend holds %d units of this namespace", len(found))
    for digest, fields in others.items():
        differing = namespace.differing(fields)
        if digest == namespace.digest or differing != ["hash_seed"]:
            continue
        logger.warning(
            "ucmcache: the backend also holds a namespace that differs only in the engine's hash seed (%s there, %s "
            "here), so its prefixes cannot be found; start all engines that share it with the same PYTHONHASHSEED",
            fields["hash_seed"],
            namespace.fields["hash_seed"],
        )


def _warn(vllm_config: Any, namespace: Namespace, rows: Sequence[BoundRow]) -> None:
    if namespace.fields["hash_seed"].startswith("random "):
        logger.warning(
            "ucmcache: prefix_caching_hash_algo=%s without PYTHONHASHSEED draws a new seed in every process, so "
            "nothing stored will be found after a restart; set PYTHONHASHSEED to one value, or use sha256",
            namespace.fields["hash_algorithm"],
        )
    interval = getattr(vllm_config.cache_config, "prefix_cache_retention_interval", None)
    if any(row.kind is Kind.SNAPSHOT for row in rows) and interval == 0:
        logger.info(
            "ucmcache: this engine leaves states at the ends of prompts and prefill chunks only; tokens that are lost "
            'for want of others are counted as lost_tokens{cause="not_offered"}, and '
            "--prefix-cache-retention-interval N makes it leave one every N tokens"
        )
    if any(row.kind is Kind.SNAPSHOT for row in rows) and not vllm_config.cache_config.enable_prefix_caching:
        logger.warning(
            "ucmcache: this model keeps recurrent states and prefix caching is off, so the engine makes no state that "
            "could be kept and every lookup is a miss; start with --enable-prefix-caching"
        )
