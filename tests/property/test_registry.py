"""The registry against plain rules: what is held, who may write, which session a prompt continues, who goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ucmcache.errors import ContractError
from ucmcache.registry.lanes import LaneLayout, Mode
from ucmcache.registry.registry import Kept, Lease, Limits, Match, SessionRegistry, Size, Tokens
from ucmcache.registry.session import Event, State, after

SESSIONS = ["a", "b", "c", "d", "e"]
TENANTS = ["x", "y"]
SALTS = [b"", b"salt"]
TTL_S, QUOTA, BLOCKS, SNAPSHOTS = 100.0, 40, 50, 30

# Few tokens and short, so that prefixes meet.
token_lists = st.lists(st.integers(0, 1), min_size=1, max_size=6)


def tokens(values: list[int]) -> Tokens:
    return np.array(values, dtype=np.int32)


def prefix_of(values: list[int], image: int = 0) -> bytes:
    """What stands for tokens, of which the first may be a picture."""
    return bytes([image, *values])


def prefix_at(prompt: list[int], image: int = 0) -> Callable[[int], bytes]:
    return lambda position: prefix_of(prompt[:position], image)


def kept_of(values: list[int], turn: int, salt: bytes = b"", tenant: str = "x", size: int = 1, image: int = 0) -> Kept:
    sizes = Size(3 * size, size, size), Size(2 * size, size, 0)
    return Kept(
        tokens(values), turn, salt, prefix_of(values, image), prefix_of(values[:turn], image), tenant, *sizes, object()
    )


class Sessions(RuleBasedStateMachine):
    """Requests that begin, finish, are aborted and continue, and writers that come too late."""

    @initialize(
        lanes=st.integers(1, 2),
        entries=st.integers(0, 3),
        mode=st.sampled_from(["keep-current", "drop-current"]),
        limited=st.booleans(),
    )
    def start(self, lanes: int, entries: int, mode: Mode, limited: bool) -> None:
        self.now_s = 0.0
        self.released: Counter[object] = Counter()
        self.dropped: list[object] = []
        self.given: list[object] = []
        limits = Limits(TTL_S, QUOTA, BLOCKS, SNAPSHOTS) if limited else Limits(TTL_S)
        self.limits = limits
        self.registry = SessionRegistry(
            LaneLayout(lanes, entries, mode),
            limits,
            b"engine",
            lambda kept: self.released.update([kept.hold]),
            lambda: self.now_s,
            lambda kept: self.dropped.append(kept.hold),
        )
        self.running: dict[str, Lease] = {}
        self.ended: list[Lease] = []

    def known(self, *states: State) -> list[str]:
        return [name for name in SESSIONS if self.registry.state(name) in states]

    @rule(prompt=token_lists, salt=st.sampled_from(SALTS), image=st.integers(0, 1))
    def a_prompt_continues_the_longest_of_the_first_pass(self, prompt: list[int], salt: bytes, image: int) -> None:
        expected: Match | None = None
        for at_frontier in (True, False):
            found = []
            for name, session in self.registry._sessions.items():
                kept = session.kept
                if kept is None or session.state is State.RUNNING or kept.isolation != salt:
                    continue
                own = kept.tokens.tolist()
                own = own if at_frontier else own[: kept.turn_tokens]
                if kept.prefix[0] != image:
                    continue
                if (
                    own
                    and len(own) < len(prompt)
                    and prompt[: len(own)] == own
                    and (kept.has_current or not at_frontier)
                ):
                    found.append(Match(name, len(own), at_frontier))
            if found and expected is None:
                expected = next(one for one in found if one.tokens == max(other.tokens for other in found))
        assert self.registry.match(prompt, salt, prefix_at(prompt, image)) == expected

    @rule(name=st.sampled_from(SESSIONS), pin_s=st.sampled_from([0.0, 0.0, 150.0]), continues=st.booleans())
    def begin(self, name: str, pin_s: float, continues: bool) -> None:
        before = self.registry.state(name)
        match = Match(name, 1, True) if continues and before in (State.RETAINED, State.DETACHED) else None
        lease = self.registry.begin(name, match, pin_s)
        if name in self.running or len(self.running) == self.registry.layout.lanes:
            assert lease is None
            return
        assert lease is not None and self.registry.state(name) is State.RUNNING
        assert lease.lane not in {one.lane for one in self.running.values()}
        self.running[name] = lease

    @precondition(lambda self: self.running)
    @rule(
        data=st.data(),
        values=token_lists,
        salt=st.sampled_from(SALTS),
        tenant=st.sampled_from(TENANTS),
        size=st.integers(1, 12),
        image=st.integers(0, 1),
    )
    def finish(self, data: st.DataObject, values: list[int], salt: bytes, tenant: str, size: int, image: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        turn = data.draw(st.integers(0, len(values)))
        kept = kept_of(values, turn, salt, tenant, size, image)
        lease = self.running.pop(name)
        self.given.append(kept.hold)
        taken = self.registry.finish(lease, kept)
        self.ended.append(lease)
        assert taken == (self.registry.state(name) is State.RETAINED and not self.released[kept.hold])
        if self.limits.quota_bytes is None:
            assert taken

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        had = self.registry._sessions[name].kept
        lease = self.running.pop(name)
        assert not self.registry.finish(lease, None)
        self.ended.append(lease)
        assert self.registry.state(name) is (State.CLOSED if had is None else State.RETAINED)

    @rule(name=st.sampled_from(SESSIONS))
    def close(self, name: str) -> None:
        self.registry.close(name)
        self.running.pop(name, None)
        assert self.registry.state(name) is State.CLOSED

    @rule(seconds=st.sampled_from([1.0, 60.0, 200.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        late = {
            name
            for name in self.known(State.RETAINED, State.DETACHED)
            for one in [self.registry._sessions[name]]
            if self.now_s >= max(one.used_s + TTL_S, one.pinned_until_s)
        }
        before = set(self.known(State.RETAINED, State.DETACHED))
        assert self.registry.expire() == len(late)
        assert set(self.known(State.RETAINED, State.DETACHED)) == before - late

    @rule()
    def reset(self) -> None:
        self.registry.reset()
        self.running.clear()
        assert not len(self.registry)

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def a_late_writer_changes_nothing(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.ended))
        session = self.registry._sessions.get(lease.session)
        before = (self.registry.held.size, len(self.registry), self.registry.counts["fenced_writers"])
        admitted = self.registry.admits(lease)
        assert admitted == (session is not None and lease in (session.lease, session.kept_lease))
        late = kept_of([1], 1)
        assert not self.registry.finish(lease, late)  # it is over: nothing that it brings is taken any more
        assert self.released[late.hold] == 1
        after_ = (self.registry.held.size, len(self.registry), self.registry.counts["fenced_writers"])
        assert after_[:2] == before[:2] and after_[2] == before[2] + 1 + (not admitted)

    @invariant()
    def everything_is_accounted_for(self) -> None:
        if not hasattr(self, "registry"):
            return
        registry = self.registry
        kept = [one.kept for one in registry._sessions.values() if one.kept is not None]
        assert registry.held.size == Size(
            *(sum(part) for part in zip(Size(), *(one.size for one in kept), strict=True))
        )
        by_tenant: Counter[str] = Counter()
        for one in kept:
            by_tenant[one.tenant] += one.size.total
        assert registry.held.by_tenant == by_tenant
        if self.limits.quota_bytes is not None:
            assert all(nbytes <= QUOTA for nbytes in by_tenant.values())
            assert registry.held.size.blocks <= BLOCKS
            assert registry.held.size.tails + registry.held.size.states <= SNAPSHOTS
        held = {one.hold for one in kept}
        assert all(self.released[hold] == (hold not in held) for hold in self.given)
        drops = not registry.layout.keeps_current
        for session in registry._sessions.values():
            assert (session.lane is None) == (session.state is State.DETACHED)
            assert session.entry is None or registry._entries[session.entry] is session
            assert session.lane is None or registry._lanes[session.lane] is session
            if session.state is State.DETACHED:
                assert session.entry is not None and session.kept is not None
                assert session.kept.has_current != drops
                assert session.kept.has_current == (session.kept.hold not in self.dropped)
        leases = list(self.running.values())
        assert len({lease.epoch for lease in leases}) == len(leases)
        assert all(registry.admits(lease) for lease in leases)


TestSessions = Sessions.TestCase
TestSessions.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(("entries", "fourth"), [(0, 0), (1, 0), (2, 6), (3, 6), (4, 6)])
@pytest.mark.parametrize("mode", ["keep-current", "drop-current"])
def test_abab_on_one_lane(entries: int, fourth: int, mode: Mode) -> None:
    """A conversation, a side request that takes its lane, and again: what each of the four hops continues from."""
    registry = SessionRegistry(LaneLayout(1, entries, mode), Limits(1e9), b"e", lambda kept: None, lambda: 0.0)
    turns = {"a": [1] * 10, "b": [2] * 8}
    found = []
    for name in ("a", "b", "a", "b"):
        prompt = [*turns[name], 3]
        match = registry.match(prompt, b"", prefix_at(prompt))
        found.append(match.tokens if match else 0)
        lease = registry.begin(name, match)
        assert lease is not None
        turns[name] = [*prompt, 4, 5]
        # The template writes the answer anew, so a prompt continues from the end of the turn only.
        registry.finish(lease, kept_of([*prompt, 9, 9], len(turns[name]) - 5))
    assert found == [0, 0, 8 if entries else 0, fourth]


def test_a_longer_turn_does_not_beat_a_frontier() -> None:
    registry = SessionRegistry(LaneLayout(2, 0, "keep-current"), Limits(1e9), b"e", lambda kept: None, lambda: 0.0)
    for name, kept in (("short", kept_of([1, 2], 1)), ("long", kept_of([1, 2, 3, 9], 3))):
        lease = registry.begin(name)
        assert lease is not None and registry.finish(lease, kept)
    assert registry.match([1, 2, 3, 4], b"", prefix_at([1, 2, 3, 4])) == Match("short", 2, True)
    assert registry.match([1, 2, 3, 9, 4], b"", prefix_at([1, 2, 3, 9, 4])) == Match("long", 4, True)
    assert registry.match([1, 2, 3, 9, 4], b"other", prefix_at([1, 2, 3, 9, 4])) is None
    assert registry.match([1, 2], b"", prefix_at([1, 2])) == Match("short", 1, False)  # one token is left to compute


def test_what_is_being_continued_stays_until_it_is_replaced() -> None:
    released: list[Kept] = []
    registry = SessionRegistry(LaneLayout(1, 1, "keep-current"), Limits(1e9), b"e", released.append, lambda: 0.0)
    first, second = kept_of([1, 2], 1), kept_of([1, 2, 3], 2)
    for name, kept in (("a", first), ("side", kept_of([7], 1))):
        lease = registry.begin(name)
        assert lease is not None and registry.finish(lease, kept)
    lease = registry.begin("a", registry.match([1, 2, 5], b"", prefix_at([1, 2, 5])))
    assert lease is not None and [one.tokens.tolist() for one in released] == [[7]]  # nowhere to go
    assert registry.begin("a") is None and registry.begin("b") is None  # one request a session, one a lane
    assert registry.finish(lease, second) and released[-1] is first


def test_whatever_is_not_in_the_table_is_refused() -> None:
    allowed = 0
    for state, event in product(State, Event):
        try:
            after(state, event)
            allowed += 1
        except ContractError as error:
            assert state.value in str(error) and event.value in str(error)
    assert allowed == 8
