"""A trace through the real Coordinator and the real stores, with the bytes switched off."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from replay.baselines import Baseline
from replay.traces import BLOCK_TOKENS, Trace
from ucmcache.coordinator.coordinator import Coordinator
from ucmcache.coordinator.spec import GroupFacts, bind
from ucmcache.keys import UnitKey
from ucmcache.store.arena import ArenaPlan
from ucmcache.store.block import BlockStore
from ucmcache.store.eviction import EvictionPolicy, GreedyDual
from ucmcache.store.snapshot import SnapshotStore

_CHAIN, _STATE = 0, 1
_SEEDS = {_CHAIN: b"chain".ljust(16), _STATE: b"state".ljust(16)}
_NAMESPACE = b"replay".ljust(16)
UNLIMITED = 1 << 18


@dataclass(frozen=True, slots=True)
class Keep:
    """Which triggers are on."""

    name: str
    interval_tokens: int | None
    junctions: bool = True


END = Keep("end", UNLIMITED * BLOCK_TOKENS, junctions=False)
END_JUNCTION = Keep("end + junction", UNLIMITED * BLOCK_TOKENS)
SHIPPED = Keep("end + junction + interval 8,192", 8192)
DENSE = Keep("dense", None)


@dataclass(slots=True)
class Outcome:
    """What one replay gave, in tokens unless it says otherwise."""

    prompt_tokens: int = 0
    chain_tokens: int = 0
    resumed_tokens: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    written: Counter[str] = field(default_factory=Counter)  # states, by trigger
    first_reads: Counter[str] = field(default_factory=Counter)  # states, by trigger
    saved: Counter[str] = field(default_factory=Counter)  # by trigger

    @property
    def hit(self) -> float:
        """Share of all prompt tokens that were resumed past."""
        return self.resumed_tokens / self.prompt_tokens


class _States(SnapshotStore):
    """The real store, with another policy if one is given."""

    def __init__(self, slots: int, policy: Callable[[int], EvictionPolicy]) -> None:
        self._make = policy
        self.policy: Any = None
        self.saved_tokens: Callable[[bytes], int] = lambda prefix: 0
        super().__init__([ArenaPlan(1, slots, (_STATE,))], _SEEDS, _NAMESPACE)

    def _policy(self, plan: ArenaPlan) -> EvictionPolicy:
        self.policy = self._make(plan.slots)
        return self.policy  # type: ignore[no-any-return]

    def reserve(self, keys: Sequence[UnitKey]) -> list[int] | None:
        slots = super().reserve(keys)
        if isinstance(self.policy, Baseline):
            self.policy.name_of.update((slot, key.prefix) for slot, key in zip(slots or (), keys, strict=True))
        return slots

    def commit(self, group: int, slot: int) -> None:
        super().commit(group, slot)
        if isinstance(self.policy, Baseline):
            self.policy.revalue(slot, self.saved_tokens(self.policy.name_of[slot]))

    def revalue(self, prefix: bytes, worth: float) -> None:
        super().revalue(prefix, worth)
        slot = self.arenas[0].slot(_STATE, prefix)
        if slot is not None and isinstance(self.policy, Baseline):
            self.policy.revalue(slot, self.saved_tokens(prefix))


class _Spec:
    sliding_window = None


def replay(
    trace: Trace,
    keep: Keep,
    state_slots: int,
    policy: Callable[[int], EvictionPolicy] = GreedyDual,
    block_slots: int = UNLIMITED,
) -> Outcome:
    """Every prompt looked up, then kept as the coordinator says: the chain's blocks, and the states it wants."""
    rows = bind(
        GroupFacts(group, spec_class, BLOCK_TOKENS, _Spec(), "", True, False)
        for group, spec_class in ((_CHAIN, "FullAttentionSpec"), (_STATE, "MambaSpec"))
    )
    blocks = BlockStore([ArenaPlan(1, block_slots, (_CHAIN,))], _SEEDS, _NAMESPACE)
    states = _States(state_slots, policy)
    coordinator = Coordinator(rows, blocks, states, keep.interval_tokens)
    states.saved_tokens = coordinator.lineage.saved_tokens
    outcome = Outcome()
    for prompt in trace.prompts:
        hit = coordinator.lookup(prompt)
        outcome.prompt_tokens += prompt.num_tokens
        outcome.chain_tokens += hit.chain_tokens
        outcome.resumed_tokens += hit.resume_tokens
        outcome.lost.update(hit.lost)
        pinned = []
        if hit.resume_tokens:
            read = coordinator.lineage.read(prompt.prefix(hit.resume_tokens))
            if read is not None:
                outcome.saved[read[0]] += hit.resume_tokens
                outcome.first_reads[read[0]] += read[1]
            # The tail first, so that a chain's beginning outlives its end.
            for key, _ in reversed(coordinator.needed(prompt, hit.resume_tokens)):
                store = coordinator.store_of(key)
                slot = store.slot(key)
                if slot is not None:
                    store.touch(key.group, slot)
                    store.pin(key.group, slot)
                    pinned.append((store, key.group, slot))
        junction = coordinator.junction(hit) if keep.junctions else 0
        missing, _ = coordinator.missing_blocks(prompt, rows[_CHAIN], 0, prompt.num_tokens)
        for placed in missing:
            slots = blocks.reserve([placed.key])
            if slots is None:
                break
            blocks.commit(_CHAIN, slots[0])
        last = hit.resume_tokens
        for end in range(last + BLOCK_TOKENS, prompt.hashed_tokens + 1, BLOCK_TOKENS):
            trigger = coordinator.retention.trigger(end, prompt.num_tokens, junction, last)
            if trigger is None:
                continue
            last = end
            units = [placed.key for placed in coordinator.missing_states(prompt, end)]
            if units:
                slots = states.reserve(units)
                if slots is None:
                    continue
                coordinator.keep(prompt, end, trigger)
                for slot in slots:
                    states.commit(_STATE, slot)
                outcome.written[trigger] += 1
            else:
                coordinator.keep(prompt, end, trigger)
        for store, group, slot in pinned:
            store.unpin(group, slot)
    return outcome
