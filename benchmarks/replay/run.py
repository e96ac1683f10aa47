"""A trace through the real Coordinator and the real stores, with the bytes switched off."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from replay.baselines import Baseline, Clock
from replay.traces import BLOCK_TOKENS, Trace
from ucmcache.coordinator.binding import GroupFacts, bind
from ucmcache.coordinator.coordinator import Coordinator
from ucmcache.coordinator.hit import Hit, Prompt
from ucmcache.coordinator.joint import Claims
from ucmcache.keys import UnitKey
from ucmcache.store.arena import ArenaPlan, Owner
from ucmcache.store.block import BlockStore
from ucmcache.store.eviction import EvictionPolicy, GreedyDual
from ucmcache.store.snapshot import SnapshotStore
from ucmcache.store.units import UnitStore

_CHAIN, _STATE = 0, 1
BLOCK_BYTES, STATE_BYTES = 1, 1
_SEEDS = {_CHAIN: b"chain".ljust(16), _STATE: b"state".ljust(16)}
_NAMESPACE = b"replay".ljust(16)
UNLIMITED = 1 << 18
REGRET_REQUESTS = 1000  # what is wanted within so many requests should not have been evicted


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


class Event(NamedTuple):
    """What one request did with states."""

    read: bytes  # prefix of the state that it resumed from; b"" for none
    resume_tokens: int
    written: tuple[bytes, ...]


@dataclass(slots=True)
class Outcome:
    """What one replay gave, in tokens unless it says otherwise."""

    prompt_tokens: int = 0
    chain_tokens: int = 0
    resumed_tokens: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    written: Counter[str] = field(default_factory=Counter)  # states, by trigger
    first_reads: Counter[str] = field(default_factory=Counter)  # states, by trigger
    reads: Counter[str] = field(default_factory=Counter)  # by trigger
    saved: Counter[str] = field(default_factory=Counter)  # by trigger
    evicted: Counter[str] = field(default_factory=Counter)  # states, by trigger
    regretted: Counter[str] = field(default_factory=Counter)  # evicted states wanted soon after, by trigger
    regretted_tokens: int = 0
    events: list[Event] = field(default_factory=list)  # one a request

    @property
    def hit(self) -> float:
        """Share of all prompt tokens that were resumed past."""
        return self.resumed_tokens / self.prompt_tokens


class _Blocks(UnitStore):
    """Blocks that leave by themselves, by CLOCK, whatever states build on them."""

    whole_chains: frozenset[int] = frozenset()

    def _policy(self, plan: ArenaPlan) -> EvictionPolicy:
        return Clock(plan.slots)

    def need(self, groups: Any, prefixes: Any, times: int = 1) -> None:
        pass

    def release(self, groups: Any, prefixes: Any, times: int = 1) -> None:
        pass

    def needs(self, group: int, prefix: bytes) -> int:
        return 0


class _States(SnapshotStore):
    """The real store, with another policy if one is given."""

    def __init__(self, slots: int, policy: Callable[[int], EvictionPolicy]) -> None:
        self._make = policy
        self.policy: Any = None
        self.saved_tokens: Callable[[bytes], int] = lambda prefix: 0
        self.on_evicted: Callable[[bytes], None] = lambda prefix: None
        super().__init__([ArenaPlan(STATE_BYTES, slots, (_STATE,))], _SEEDS, _NAMESPACE)

    def _policy(self, plan: ArenaPlan) -> EvictionPolicy:
        self.policy = self._make(plan.slots)
        return self.policy  # type: ignore[no-any-return]

    def _evicted(self, owner: Owner) -> None:
        self.on_evicted(owner.prefix)
        super()._evicted(owner)

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
    joint: bool = True,
) -> Outcome:
    """Every prompt looked up, then kept as the coordinator says: the chain's blocks, and the states it wants."""
    run = _Replay(keep, state_slots, policy, block_slots, joint)
    for number, prompt in enumerate(trace.prompts):
        run.request(number, prompt)
    return run.outcome


class _Replay:
    """One engine's index without its bytes: each request is over before the next arrives."""

    def __init__(
        self, keep: Keep, state_slots: int, policy: Callable[[int], EvictionPolicy], block_slots: int, joint: bool
    ) -> None:
        rows = bind(
            GroupFacts(group, spec_class, BLOCK_TOKENS, _Spec(), "", True, False)
            for group, spec_class in ((_CHAIN, "FullAttentionSpec"), (_STATE, "MambaSpec"))
        )
        self._keep = keep
        self._chain = rows[_CHAIN]
        store: Any = BlockStore if joint else _Blocks
        self._blocks = store([ArenaPlan(BLOCK_BYTES, block_slots, (_CHAIN,))], _SEEDS, _NAMESPACE)
        self._claims: Claims = {}
        self._states = _States(state_slots, policy)
        self._coordinator = Coordinator(rows, self._blocks, self._states, keep.interval_tokens)
        self._states.saved_tokens = self._coordinator.joint.lineage.saved_tokens
        self._states.on_evicted = self._evicted
        self._number = 0
        self._trigger_of: dict[bytes, str] = {}
        self._evicted_at: dict[bytes, int] = {}
        self.outcome = Outcome()

    def request(self, number: int, prompt: Prompt) -> None:
        """One request: resume, then keep."""
        self._number = number
        if isinstance(self._states.policy, Baseline):
            self._states.policy.now = number
        hit = self._coordinator.lookup(prompt)
        outcome = self.outcome
        outcome.prompt_tokens += prompt.num_tokens
        outcome.chain_tokens += hit.chain_tokens
        outcome.resumed_tokens += hit.resume_tokens
        outcome.lost.update(hit.lost)
        self._regret(prompt, hit)
        pinned = self._resume(prompt, hit.resume_tokens)
        junction = self._coordinator.junction(hit) if self._keep.junctions else 0
        self._keep_blocks(prompt)
        written = self._keep_states(prompt, hit.resume_tokens, junction)
        for store, group, slot in pinned:
            store.unpin(group, slot)
        self._coordinator.settle(self._claims)
        outcome.events.append(Event(prompt.prefix(hit.resume_tokens), hit.resume_tokens, written))

    def _resume(self, prompt: Prompt, resume_tokens: int) -> list[tuple[BlockStore | SnapshotStore, int, int]]:
        """Use what the resume needs; returns what is pinned for it."""
        pinned: list[tuple[BlockStore | SnapshotStore, int, int]] = []
        if not resume_tokens:
            return pinned
        read = self._coordinator.resumed(prompt.prefix(resume_tokens))
        if read is not None:
            trigger, first = read
            self.outcome.saved[trigger] += resume_tokens
            self.outcome.reads[trigger] += 1
            self.outcome.first_reads[trigger] += first
        # The tail first, so that a chain's beginning outlives its end.
        for key, _ in reversed(self._coordinator.needed(prompt, resume_tokens)):
            store = self._coordinator.store_of(key)
            slot = store.slot(key)
            if slot is not None:
                store.touch(key.group, slot)
                store.pin(key.group, slot)
                pinned.append((store, key.group, slot))
        return pinned

    def _keep_blocks(self, prompt: Prompt) -> None:
        self._coordinator.claim(self._claims, prompt, prompt.num_tokens)
        missing, _ = self._coordinator.missing_blocks(prompt, self._chain, 0, prompt.num_tokens)
        keys = [placed.key for placed in missing]
        # One by one: a chain's beginning is of use even if the rest finds no room.
        for key in keys:
            slots = self._blocks.reserve([key])
            if slots is None:
                return
            self._blocks.commit(_CHAIN, slots[0])

    def _keep_states(self, prompt: Prompt, resume_tokens: int, junction_tokens: int) -> tuple[bytes, ...]:
        """Keep what a trigger asks for; returns the prefixes of what was not here before."""
        coordinator, last, written = self._coordinator, resume_tokens, []
        for end in range(last + BLOCK_TOKENS, prompt.hashed_tokens + 1, BLOCK_TOKENS):
            trigger = coordinator.retention.trigger(end, prompt.num_tokens, junction_tokens, last)
            if trigger is None:
                continue
            last = end
            units = [placed.key for placed in coordinator.missing_states(prompt, end)]
            slots = self._states.reserve(units)
            if slots is None:
                continue
            coordinator.keep(prompt, end, trigger)
            for slot in slots:
                self._states.commit(_STATE, slot)
            if units:
                prefix = prompt.prefix(end)
                self.outcome.written[trigger] += 1
                self._trigger_of[prefix] = trigger
                self._evicted_at.pop(prefix, None)
                written.append(prefix)
        return tuple(written)

    def _evicted(self, prefix: bytes) -> None:
        self._evicted_at[prefix] = self._number
        self.outcome.evicted[self._trigger_of[prefix]] += 1

    def _regret(self, prompt: Prompt, hit: Hit) -> None:
        """Count the deepest state that would have been resumed from, had it not been evicted lately."""
        for end in range(hit.chain_tokens, hit.resume_tokens, -BLOCK_TOKENS):
            prefix = prompt.prefix(end)
            if self._number - self._evicted_at.get(prefix, -REGRET_REQUESTS - 1) <= REGRET_REQUESTS:
                del self._evicted_at[prefix]  # once for each eviction
                self.outcome.regretted[self._trigger_of[prefix]] += 1
                self.outcome.regretted_tokens += end - hit.resume_tokens
                return
