"""Puts the scheduler side together from vLLM's configuration and what the workers told."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ucmcache.config import Config
from ucmcache.connector.identity import namespace_of
from ucmcache.connector.layout import group_facts
from ucmcache.connector.messages import Setup, WorkerFacts
from ucmcache.connector.ranks import Ranks
from ucmcache.connector.scheduler import SchedulerSide
from ucmcache.coordinator.binding import BoundRow, bind
from ucmcache.coordinator.coordinator import Coordinator
from ucmcache.coordinator.discovery import Discovery
from ucmcache.coordinator.spec import Kind
from ucmcache.errors import ConfigError, ContractError
from ucmcache.keys import Namespace, exact_group, exact_seed
from ucmcache.store.arena import plan_arenas
from ucmcache.store.backend import open_backend
from ucmcache.store.block import BlockStore
from ucmcache.store.memory import map_shared
from ucmcache.store.snapshot import SnapshotStore

logger = logging.getLogger(__name__)


def worker_rank(vllm_config: Any) -> int:
    """This worker's rank among all that hold KV of one engine."""
    return int(getattr(vllm_config.parallel_config, "rank", 0))


def worker_ranks(vllm_config: Any) -> Ranks:
    """All workers that hold KV of one engine, in pipeline stages."""
    parallel = vllm_config.parallel_config
    return Ranks(int(getattr(parallel, "world_size", 1)), int(getattr(parallel, "tensor_parallel_size", 1)))


def check_sessions(config: Config, vllm_config: Any) -> None:
    """Raises ConfigError for an engine in which sessions cannot be kept, if they are to be."""
    wanted = f"sessions.entries is {config.sessions.entries}"
    if not config.sessions.are_kept:
        return
    if not vllm_config.cache_config.enable_prefix_caching:
        raise ConfigError(
            f"{wanted}, but prefix caching is off, so the engine has no hashes to find a conversation by; accepted is "
            "0 then — start with --enable-prefix-caching, or drop sessions"
        )
    if getattr(vllm_config, "speculative_config", None) is not None:
        raise ConfigError(
            f"{wanted}, but this engine decodes speculatively, so it is not known at which token a state stands; "
            "accepted is 0 then — start without --speculative-config, or drop sessions"
        )


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
    ranks = worker_ranks(vllm_config)
    if len(workers) != ranks.count:
        raise ContractError(f"{len(workers)} workers told of their KV caches, of an engine with {ranks.count} ranks")
    spread = {row.group: _spread(row, workers, ranks) for row in rows}
    setup = _setup(config, rows, workers, ranks, spread, namespace)
    blocks = BlockStore(setup.block_arenas, setup.seeds, namespace.digest)
    states = SnapshotStore(setup.state_arenas, setup.seeds, namespace.digest)
    coordinator = Coordinator(rows, blocks, states, config.retention.interval_tokens)
    discovery = _discovery(config, namespace, ranks, setup, coordinator) if config.backend is not None else None
    chunked = getattr(vllm_config.scheduler_config, "enable_chunked_prefill", True)
    logger.info("ucmcache: namespace %s\n%s", namespace.digest.hex(), coordinator.describe())
    _warn(vllm_config, namespace, rows)
    return SchedulerSide(
        config,
        coordinator,
        setup,
        ranks=ranks,
        hash_block_tokens=_hash_block_tokens(vllm_config, kv_cache_config),
        only_last=not chunked,
        speculative=getattr(vllm_config, "speculative_config", None) is not None,
        has_backend=config.backend is not None,
        discovery=discovery,
        lanes=int(vllm_config.scheduler_config.max_num_seqs),
    )


def _setup(
    config: Config,
    rows: Sequence[BoundRow],
    workers: Sequence[WorkerFacts],
    ranks: Ranks,
    spread: Mapping[int, int],
    namespace: Namespace,
) -> Setup:
    def units(kind: Kind) -> Mapping[int, tuple[int, int]]:
        # Every rank uses the same slot numbers, so a slot is as wide as the widest rank's unit.
        return {
            row.group: (max(worker.groups[row.group].unit_bytes for worker in workers), row.block_tokens)
            for row in rows
            if row.kind is kind
        }

    host = config.host.of_one_rank(ranks.count)
    states, seeds = units(Kind.SNAPSHOT), {row.group: row.seed for row in rows}
    if config.sessions.are_kept:
        # Off the grid states lie beside those on it, and so do the blocks that are full in part.
        voting = [row for row in rows if row.spec.votes]
        exact = {
            exact_group(group): unit for kind in (Kind.CHAIN, Kind.SNAPSHOT) for group, unit in units(kind).items()
        }
        states = {**states, **exact}
        seeds |= {exact_group(row.group): exact_seed(row.seed) for row in voting}
        spread = {**spread, **{exact_group(row.group): spread[row.group] for row in voting}}
    return Setup(
        namespace=namespace.digest,
        fields=dict(namespace.fields),
        seeds=seeds,
        block_arenas=tuple(plan_arenas("host.blocks", host.blocks_bytes, units(Kind.CHAIN), True, spread)),
        state_arenas=tuple(plan_arenas("host.snapshots", host.snapshots_bytes, states, False, spread)),
        memory=tuple(worker.memory for worker in workers),
    )


def _hash_block_tokens(vllm_config: Any, kv_cache_config: Any) -> int:
    return int(getattr(kv_cache_config, "hash_block_size", None) or vllm_config.cache_config.block_size)


def _spread(row: BoundRow, workers: Sequence[WorkerFacts], ranks: Ranks) -> int:
    """How many ranks share the slots of a row's units: those that hold the same bytes, where all can reach them."""
    spread = min(worker.groups[row.group].alike for worker in workers)
    if spread == 1:
        return 1
    for first in range(0, ranks.count, spread):
        alike = [workers[rank] for rank in ranks.alike(spread, first)]
        if any(worker.groups[row.group] != alike[0].groups[row.group] for worker in alike):
            return 1
        try:
            for worker in alike:
                map_shared(worker.memory[row.kind.value]).close()
        except OSError as error:
            logger.warning(
                "ucmcache: the ranks hold %s alike, but cannot share one copy of it in host memory (%s), so each keeps "
                "its own; let all of them run on one machine and in one process namespace",
                row.name,
                error,
            )
            return 1
    return spread


def _discovery(
    config: Config, namespace: Namespace, ranks: Ranks, setup: Setup, coordinator: Coordinator
) -> Discovery | None:
    """What finds out what the backend holds, which it begins to; None if the backend cannot be opened from here."""
    if config.backend is None:
        return None
    try:
        backend = open_backend(config.backend.url, config.backend.capacity_bytes)
    except ConfigError:
        raise
    except Exception as error:
        logger.warning("ucmcache: the backend cannot be opened (%s); serving goes on without what it holds", error)
        return None
    discovery = Discovery(
        backend,
        coordinator.rows,
        setup.seeds,
        {
            group: sorted({ranks.bucket(plan.spread, rank) for rank in range(ranks.count)})
            for plan in (*setup.block_arenas, *setup.state_arenas)
            for group in plan.groups
        },
        lambda prompt, tokens: [key for key, _ in coordinator.needed(prompt, tokens)],
        coordinator.blocks.whole_chains,
        config.backend.deadline_s,
        log_namespaces=lambda found: _warn_of_seeds(namespace, found),
    )
    discovery.list_all(namespace.digest)
    return discovery


def _warn_of_seeds(namespace: Namespace, found: Mapping[bytes, Mapping[str, str]]) -> None:
    for digest, fields in found.items():
        if digest == namespace.digest or namespace.differing(fields) != ["hash_seed"]:
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
