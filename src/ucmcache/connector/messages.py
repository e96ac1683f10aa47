"""What crosses between the scheduler side and the worker side, in both directions.

Plain data: pickled by vLLM when the two live in different processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from ucmcache.keys import UnitKey
from ucmcache.store.arena import ArenaPlan
from ucmcache.store.memory import MemoryHandle


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """One KV cache group as a worker holds it: bytes of one unit, and canonical text of what shapes them.

    `alike`: how many neighbouring ranks hold the same. Only a worker can tell: where the layers of a group differ, vLLM
    gives the scheduler the first one's spec for all.
    """

    unit_bytes: int
    content: str
    alike: int = 1


@dataclass(frozen=True)
class WorkerFacts(KVConnectorHandshakeMetadata):
    """What the scheduler side must know of a worker before it can plan; sent once, after the KV caches exist."""

    groups: Mapping[int, GroupGeometry]
    # By kind of group, where the ranks beside this one may map its host memory; empty if nothing is shared.
    memory: Mapping[str, MemoryHandle] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Setup:
    """What every worker needs before its first job; carried by the first plan, and by the first one after a reset.

    Only the namespace differs then: arenas are made once.
    """

    namespace: bytes
    fields: Mapping[str, str]
    seeds: Mapping[int, bytes]
    block_arenas: tuple[ArenaPlan, ...]
    state_arenas: tuple[ArenaPlan, ...]
    memory: tuple[Mapping[str, MemoryHandle], ...] = ()  # of every rank, where arenas are spread


class UnitCopy(NamedTuple):
    """One unit between a host slot and an engine block."""

    group: int
    slot: int
    block: int


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Copy one unit out of the engine, by default after this step's forward; write it to the backend if wanted."""

    job: int
    key: UnitKey
    copy: UnitCopy
    ranks: tuple[int, ...] | None = None  # who does it; None for all
    copied: bool = False  # the bytes are in the slot already: only write
    written: bool = True  # to the backend, if there is one
    is_final: bool = False  # an earlier step left the bytes, whose request is over: nothing to wait for
    is_volatile: bool = False  # the next forward overwrites the bytes: it has to wait for the copy


@dataclass(frozen=True, slots=True)
class StageJob:
    """Read one unit from the backend into a host slot and verify it."""

    job: int
    key: UnitKey
    slot: int
    ranks: tuple[int, ...] | None = None  # who does it; None for all


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Copy a request's units into its blocks, then let it run. `broken` jobs are reported as failed, untouched."""

    job: int
    request_id: str
    copies: tuple[UnitCopy, ...]
    broken: bool = False


@dataclass
class StepPlan(KVConnectorMetadata):
    """All work of one engine step."""

    setup: Setup | None = None
    saves: list[SaveJob] = field(default_factory=list)
    stages: list[StageJob] = field(default_factory=list)
    loads: list[LoadJob] = field(default_factory=list)
    touches: list[UnitKey] = field(default_factory=list)  # stored units that were used from host memory
    idle: bool = False  # no tokens are computed in this step, so waiting a little hurts nobody


class Phase(Enum):
    """What a result is about."""

    COPIED = "copied"  # a save's bytes are in the host slot
    WRITTEN = "written"  # a save's bytes are durable in the backend
    STAGED = "staged"  # verified bytes are in the host slot
    LOADED = "loaded"  # a request's bytes are in its blocks


class Result(NamedTuple):
    """One rank's result of one phase of one job. `cause` is empty for success, else a short, countable word.

    A phase that failed is the rank's last one of the job.
    """

    job: int
    phase: Phase
    rank: int
    cause: str = ""


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Results since the last report; several ranks' reports are concatenated, the scheduler side counts them."""

    results: list[Result] = field(default_factory=list)
    # By rank, whether its backend is left alone for a while; told when that changes.
    down: dict[int, bool] = field(default_factory=dict)
    # By rank, bytes that it read from the backend and seconds that the calls took together.
    reads: dict[int, tuple[int, float]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """This report with another rank's results appended."""
        if not isinstance(other, WorkerReport):
            raise TypeError(f"a ucmcache report cannot be combined with {type(other).__name__}")
        return WorkerReport(self.results + other.results, self.down | other.down, self.reads | other.reads)
