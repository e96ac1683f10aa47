"""How long the scheduler waits for a lookup, beside vLLM's OffloadingConnector and the Mooncake store's coordinator.

One process, one prompt, the same groups, everything in memory. A first lookup is that of a new request, whose hashes no
index has seen as objects; later ones are what a waiting request costs in every step. OffloadingConnector's is
`OffloadingConnectorScheduler.get_num_new_matched_tokens` over its own CPU manager. Mooncake's is
`MooncakeStoreWorker.lookup`, which does the same for the scheduler in another process: left out are the messages
between the two, and its question to the store is answered at once from a prepared list, so that only its own work is
timed.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import lcm
from types import SimpleNamespace
from typing import Any

import torch
from _common import Neighbours, below, console, median_ratio, options, print_goals, table, write_report
from rich.table import Table
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator import MooncakeStoreCoordinator
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import (
    BlobBlockHashes,
    ChunkedTokenDatabase,
    KeyMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import MooncakeStoreWorker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from ucmcache.connector.layout import group_facts
from ucmcache.coordinator.binding import BoundRow, bind
from ucmcache.coordinator.coordinator import Coordinator
from ucmcache.coordinator.hit import Hit, Prompt
from ucmcache.coordinator.spec import Kind
from ucmcache.demo.report import Goal
from ucmcache.keys import BlockKey, SnapshotKey, physical_id
from ucmcache.store.arena import ArenaPlan
from ucmcache.store.block import BlockStore
from ucmcache.store.snapshot import SnapshotStore

MILLION_TOKENS = 65_536 * 16
LENGTHS = (8 << 10, 128 << 10, MILLION_TOKENS)
_SEED = 43
_HASH_BYTES = 32  # sha256, vLLM's default
_NAMESPACE = b"lookup benchmark"


def _full(block_tokens: int = 16) -> KVCacheSpec:
    return FullAttentionSpec(block_size=block_tokens, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)


def _window(tokens: int) -> KVCacheSpec:
    return SlidingWindowSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=torch.bfloat16, sliding_window=tokens)


def _state(block_tokens: int = 16) -> KVCacheSpec:
    return MambaSpec(block_size=block_tokens, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode="align")


@dataclass(frozen=True, slots=True)
class Case:
    """A model's groups, a prompt that ends one token behind a block, and what of it is kept where."""

    name: str
    specs: tuple[KVCacheSpec, ...]
    tokens: int
    host: float = 1.0  # part of the prompt whose units are in host memory
    stored: float = 0.0  # part of the prompt whose other units are in the backend, known from a scan at start
    state_every: int = 1  # blocks from one position with states to the next

    @property
    def block_tokens(self) -> int:
        return lcm(*(spec.block_size for spec in self.specs))

    @property
    def blocks(self) -> int:
        return self.tokens // self.block_tokens


_CHAINS = (_full(),) * 4
_HYBRID = (_full(), _state(), _state(), _state())
MILLION = (
    Case("4 chains, all in host memory", _CHAINS, MILLION_TOKENS),
    Case("4 chains, first half in host memory", _CHAINS, MILLION_TOKENS, host=0.5),
    Case("4 chains, half host, half backend", _CHAINS, MILLION_TOKENS, host=0.5, stored=1.0),
    Case("4 chains, all in the backend", _CHAINS, MILLION_TOKENS, host=0.0, stored=1.0),
    Case("1 chain + 3 states at each 64th block", _HYBRID, MILLION_TOKENS, state_every=64),
    Case("1 chain + 3 states at each 50,000th", _HYBRID, MILLION_TOKENS, state_every=50_000),
    Case("the same, backend holds other prompts", _HYBRID, MILLION_TOKENS, state_every=50_000, stored=1e-4),
    Case("1 chain + 3 states, all in the backend", _HYBRID, MILLION_TOKENS, host=0.0, stored=1.0),
    Case("nothing anywhere", _HYBRID, MILLION_TOKENS, host=0.0),
)
MODELS: dict[str, tuple[KVCacheSpec, ...]] = {
    "Qwen3-Next": (_full(528), _state(528), _state(528), _state(528)),
    "Gemma 3": (_full(), *(_window(1024),) * 5),
    "gpt-oss": (_full(), _window(128)),
    "Llama": (_full(),),
}


@dataclass(slots=True)
class Times:
    """Seconds of a request's first lookups and of later ones, and what they found."""

    first_s: list[float] = field(default_factory=list)
    again_s: list[float] = field(default_factory=list)
    tokens: int = 0


Lookup = Callable[[], int]  # tokens found


class World:
    """One case: the prompt's hashes and the same content for all three."""

    def __init__(self, case: Case) -> None:
        self._case = case
        draw = random.Random(_SEED)
        self.hashes = [draw.randbytes(_HASH_BYTES) for _ in range(case.blocks)]
        self._groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(case.specs)]
        facts = [group_facts(i, group, content=f"layer{i}") for i, group in enumerate(self._groups)]
        self._rows = bind(facts)
        self._config = KVCacheConfig(
            num_blocks=1, kv_cache_tensors=[], kv_cache_groups=self._groups, hash_block_size=case.block_tokens
        )
        self._requests = 0
        self._coordinator = self._our_store()
        self._offloading = self._offloading_scheduler()
        self._mooncake = self._mooncake_worker()

    def fresh(self) -> list[bytes]:
        """The hashes as new objects, as a new request brings them."""
        return [bytes(bytearray(one)) for one in self.hashes]

    # -- what is timed: each gives a first lookup, which can be called again for later ones --------------------------

    def ours(self, hashes: Sequence[bytes]) -> Lookup:
        def lookup() -> int:
            hit: Hit = self._coordinator.lookup(Prompt(self._num_tokens, hashes, self._case.block_tokens))
            return hit.reachable_tokens

        return lookup

    def offloading(self, hashes: Sequence[bytes]) -> Lookup:
        self._requests += 1
        request: Any = SimpleNamespace(
            request_id=str(self._requests),
            block_hashes=hashes,
            num_tokens=self._num_tokens,
            num_prompt_tokens=self._num_tokens,
            kv_transfer_params=None,
            kv_hints=None,
            skip_reading_prefix_cache=False,
        )
        self._offloading.on_new_request(request)
        return lambda: self._offloading.get_num_new_matched_tokens(request, 0)[0] or 0

    def mooncake(self, hashes: Sequence[bytes]) -> Lookup:
        blob = memoryview(b"".join(hashes))  # as they come out of the message
        return lambda: self._mooncake.lookup(self._num_tokens, BlobBlockHashes(blob, _HASH_BYTES)).hit_length

    # -- the same content, three times ------------------------------------------------------------------------------

    @property
    def _num_tokens(self) -> int:
        return self._case.blocks * self._case.block_tokens + 1

    def _units(self, row: BoundRow, start: float, end: float) -> Iterator[tuple[bytes, int]]:
        """Prefix and end in blocks of the units of a row between two parts of the prompt."""
        every = self._case.state_every if row.kind is Kind.SNAPSHOT else 1
        first, last = (int(part * self._case.blocks) // every for part in (start, end))
        return ((self.hashes[i * every - 1], i * every) for i in range(first + 1, last + 1))

    def _our_store(self) -> Coordinator:
        case, rows, seeds = self._case, self._rows, {row.group: row.seed for row in self._rows}
        stores: list[BlockStore | SnapshotStore] = []
        for kind, store_class, key_class in (
            (Kind.CHAIN, BlockStore, BlockKey),
            (Kind.SNAPSHOT, SnapshotStore, SnapshotKey),
        ):
            mine = [row for row in rows if row.kind is kind]
            plans = [ArenaPlan(1, case.blocks * len(mine), tuple(row.group for row in mine))] if mine else []
            store = store_class(plans, seeds, _NAMESPACE)
            for row in mine:
                units = self._units(row, 0.0, case.host)
                keys = [key_class(row.group, prefix, end * case.block_tokens) for prefix, end in units]
                for slot in store.reserve(keys) or ():
                    store.commit(row.group, slot)
                stored = self._units(row, case.host, case.stored)
                store.add_stored(physical_id(_NAMESPACE, row.seed, prefix) for prefix, _ in stored)
                # A backend of any use holds other prompts as well.
                others = random.Random(row.group)
                if case.stored:
                    ids = (physical_id(_NAMESPACE, row.seed, others.randbytes(_HASH_BYTES)) for _ in range(10_000))
                    store.add_stored(ids)
            stores.append(store)
        blocks, states = stores
        assert isinstance(blocks, BlockStore)
        assert isinstance(states, SnapshotStore)
        return Coordinator(rows, blocks, states, None)

    def _offloading_scheduler(self) -> OffloadingConnectorScheduler:
        case = self._case
        config = OffloadingConfig(
            groups=tuple(
                OffloadingGroupConfig(spec.block_size, (f"layer{i}",), i) for i, spec in enumerate(case.specs)
            ),
            worker_kv_bytes_per_block=4096,
            enable_kv_cache_events=False,
            extra_config={"cpu_bytes_to_use": 4096 * (case.blocks * len(case.specs) + 1)},
            engine_id="benchmark",
            model=OffloadingModelConfig("benchmark", "bfloat16"),
            cache=OffloadingCacheConfig(case.block_tokens, 1),
            parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
        )
        scheduler = OffloadingConnectorScheduler(CPUOffloadingSpec(config), _vllm_config(), self._config)
        context = ReqContext("fill")
        for row in self._rows:
            units = self._units(row, 0.0, max(case.host, case.stored))
            keys = [make_offload_key(prefix, row.group) for prefix, _ in units]
            assert scheduler.manager.prepare_store(keys, context) is not None
            scheduler.manager.complete_store(keys, context)
        return scheduler

    def _mooncake_worker(self) -> Any:
        case = self._case
        # What `lookup` reads of a worker, made by the parts that the worker itself makes it of; one rank.
        worker: Any = object.__new__(MooncakeStoreWorker)
        worker._capacity_only = False
        worker._kv_cache_groups = self._groups
        worker.hash_block_size = case.block_tokens
        worker.coord = MooncakeStoreCoordinator(self._groups, case.block_tokens, case.block_tokens)
        worker.token_dbs = [
            ChunkedTokenDatabase(KeyMetadata("benchmark", 0, 0, 0, 0, row.group), row.block_tokens, case.block_tokens)
            for row in self._rows
        ]
        worker._lookup_key_prefixes = tuple(
            db.store_layout.lookup_key_prefixes([(0, 0, 0, 0)]) for db in worker.token_dbs
        )
        worker._record_kv_connector_operation = lambda *_, **__: None
        present = {
            worker.token_dbs[row.group].key_for(prefix)
            for row in self._rows
            for prefix, _ in self._units(row, 0.0, max(case.host, case.stored))
        }
        # The keys are the same in every lookup, and so is the answer.
        answers: list[list[int]] = []

        def first_answer(keys: Sequence[str]) -> list[int]:
            answers.append([int(key in present) for key in keys])
            return answers[-1]

        worker.store = SimpleNamespace(batch_is_exist=first_answer)
        worker.lookup(self._num_tokens, self.hashes)
        worker.store = SimpleNamespace(batch_is_exist=lambda keys: answers[-1])
        return worker


def _vllm_config() -> Any:
    """What OffloadingConnectorScheduler reads of an engine's configuration."""
    return SimpleNamespace(
        cache_config=SimpleNamespace(prefix_cache_retention_interval=None, enable_prefix_caching=True),
        parallel_config=SimpleNamespace(world_size=1, decode_context_parallel_size=1),
        speculative_config=None,
    )


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """One row: all three take turns, so that what else the machine does meets them alike; times in seconds."""
    world = World(case)
    lookups = {"ours": world.ours, "offloading": world.offloading, "mooncake": world.mooncake}
    times = {name: Times() for name in lookups}
    neighbours = Neighbours()
    for _ in range(rounds):
        for name, lookup_of in lookups.items():
            lookup = lookup_of(world.fresh())
            for measured in (times[name].first_s, times[name].again_s):
                started = time.perf_counter()
                times[name].tokens = lookup()
                measured.append(time.perf_counter() - started)
    row: dict[str, Any] = {
        "case": case.name,
        "tokens": case.tokens,
        "groups": len(case.specs),
        "rounds": rounds,
        "neighbour_cpus": neighbours.cpus(),
    }
    for name, one in times.items():
        row[f"{name}_s"] = statistics.median(one.first_s)
        row[f"{name}_again_s"] = statistics.median(one.again_s)
        row[f"{name}_tokens"] = one.tokens
    ours = times["ours"]
    for peer in ("offloading", "mooncake"):
        first = median_ratio(times[peer].first_s, ours.first_s)
        row[f"over_{peer}"], row[f"over_{peer}_again"] = first, median_ratio(times[peer].again_s, ours.again_s)
    return row


def lookup_table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    """The rows of one kind of case."""
    names = ("ours", "offloading", "mooncake")
    return table(
        title,
        (
            *("ms", "tokens", "groups", "ours", "ours\nagain", "Offload-\ning", "\nagain", "Moon-\ncake", "\nagain"),
            *(
                "over\nOffl.",
                "\nagain",
                "over\nMoonc.",
                "\nagain",
                "found\nours",
                "\nOffl.",
                "\nMoonc.",
                "neigh-\nbours",
            ),
        ),
        [
            (
                row["case"],
                f"{row['tokens']:,}",
                str(row["groups"]),
                *(f"{row[f'{name}{which}_s'] * 1000:,.2f}" for name in names for which in ("", "_again")),
                *(f"{row[f'over_{peer}{which}']:,.1f}" for peer in names[1:] for which in ("", "_again")),
                *(f"{row[f'{name}_tokens']:,}" for name in names),
                f"{row['neighbour_cpus']:.1f}",
            )
            for row in rows
        ],
    )


def above(name: str, value: float, limit: float, unit: str = "ratio") -> Goal:
    """A goal that is met from `limit` on."""
    value = round(value, 4)
    return Goal(name, value, f">= {limit:g}", unit, value >= limit)


def goals_of(million: Sequence[dict[str, Any]]) -> list[Goal]:
    """The goals, for a request's first lookup and for those it repeats while it waits; the worst case counts."""
    goals = []
    for kind, which in (("lookup", ""), ("repeated_lookup", "_again")):
        goals.append(below(f"{kind}_1m_s", max(row[f"ours{which}_s"] for row in million), 0.030, "s"))
        # Where nothing is anywhere, nobody has anything to do.
        rows = [row for row in million if row["ours_tokens"]]
        goals += [
            above(f"{kind}_over_{peer}", min(float(row[f"over_{peer}{which}"]) for row in rows), 5)
            for peer in ("offloading", "mooncake")
        ]
    return goals


def _arguments() -> argparse.Namespace:
    return options("Time of a lookup on the scheduler's thread, beside two peers.").parse_args()


def main() -> int:
    """Measure, show, and write the report; 0 if all goals are met."""
    arguments = _arguments()
    rounds = 3 if arguments.quick else 15
    million_cases = MILLION[:: 3 if arguments.quick else 1]
    lengths = LENGTHS[:2] if arguments.quick else LENGTHS
    million = [measure(case, rounds) for case in million_cases]
    models = [measure(Case(name, specs, tokens), rounds) for name, specs in MODELS.items() for tokens in lengths]
    out = console()
    out.print(lookup_table("65,536 blocks of 16 tokens, 4 groups; medians in ms", million))
    out.print(lookup_table("Groups as in these models, all in host memory; medians in ms", models))
    goals = goals_of(million)
    print_goals(goals)
    rows = [{"measured": kind, **row} for kind, found in (("million", million), ("model", models)) for row in found]
    write_report(arguments.json_file, rows, goals)
    return 0 if all(goal.met for goal in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
