"""The registry against a plain model: what is held, who may write, and which entry a prompt continues."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ucmcache.errors import ContractError
from ucmcache.registry.lanes import LaneLayout, Mode
from ucmcache.registry.registry import Kept, Lease, Limits, Match, SessionRegistry, Tokens
from ucmcache.registry.session import Event, State, after

SESSIONS = ["a", "b", "c", "d"]
TENANTS = ["x", "y"]
SALTS = [b"", b"salt"]
TTL_S = 100.0

# Few tokens and short, so that prefixes meet.
token_lists = st.lists(st.integers(0, 1), min_size=1, max_size=6)


def tokens(values: list[int]) -> Tokens:
    return np.array(values, dtype=np.int64)


def oracle(
    entries: dict[int, tuple[str, Kept]], prompt: list[int], salt: bytes, most: int, keeps_current: bool
) -> Match | None:
    """The rule of requirements G4 in as many words."""
    for at_frontier in (True, False) if keeps_current else (False,):
        best: Match | None = None
        for number in sorted(entries):
            session, kept = entries[number]
            own = [int(token) for token in kept.tokens]
            own = own if at_frontier else own[: kept.turn_tokens]
            fits = 0 < len(own) <= most and prompt[: len(own)] == own and kept.isolation == salt
            if fits and (best is None or len(own) > best.resume_tokens):
                best = Match(session, number, len(own), at_frontier)
        if best is not None:
            return best
    return None


class Sessions(RuleBasedStateMachine):
    """Requests that begin, finish, are aborted and continue, and writers that come too late."""

    @initialize(
        lanes=st.integers(1, 2),
        entries=st.integers(0, 3),
        mode=st.sampled_from(["keep-current", "drop-current"]),
        quota=st.sampled_from([None, 25]),
    )
    def start(self, lanes: int, entries: int, mode: Mode, quota: int | None) -> None:
        self.now_s = 0.0
        self.released: list[Kept] = []
        self.given: list[Kept] = []
        self.quota = quota
        self.registry = SessionRegistry(
            LaneLayout(lanes, entries, mode), Limits(TTL_S, quota), b"e", self.released.append, lambda: self.now_s
        )
        self.lanes = lanes
        self.valid: dict[str, Lease] = {}
        self.old: list[Lease] = []
        self.filling: list[tuple[Lease, Kept]] = []

    def entries(self, *states: State) -> dict[int, tuple[str, Kept]]:
        return {
            entry.number: (entry.session, entry.kept)
            for entry in self.registry._entries
            if entry is not None and (not states or entry.state in states)
        }

    def takes(self, session: str, lease: Lease | None) -> None:
        """The session's lease is another now, or none."""
        if session in self.valid:
            self.old.append(self.valid.pop(session))
        if lease is not None:
            self.valid[session] = lease

    @rule(session=st.sampled_from(SESSIONS), lane=st.integers(0, 1), pin_s=st.sampled_from([0.0, 500.0]))
    def begin(self, session: str, lane: int, pin_s: float) -> None:
        self.takes(session, self.registry.begin(session, lane % self.lanes, pin_s))

    @precondition(lambda self: self.valid)
    @rule(
        data=st.data(),
        values=token_lists,
        turn=st.integers(0, 6),
        salt=st.sampled_from(SALTS),
        tenant=st.sampled_from(TENANTS),
        kv=st.integers(1, 15),
        state=st.integers(0, 5),
    )
    def detach(
        self, data: st.DataObject, values: list[int], turn: int, salt: bytes, tenant: str, kv: int, state: int
    ) -> None:
        session = data.draw(st.sampled_from(sorted(self.valid)))
        if any(lease == self.valid[session] for lease, _ in self.filling):
            return  # it has no state yet that it could leave
        kept = Kept(tokens(values), min(turn, len(values)), salt, tenant, kv, state, object())
        self.given.append(kept)
        before = self.entries()
        done = self.registry.detach(self.valid[session], kept)
        self.takes(session, None)
        if not done:
            assert self.entries() == before, "a refusal evicted something"
        gone = [one for number, (_, one) in before.items() if self.entries().get(number, ("", None))[1] is not one]
        assert all(any(one is released for released in self.released) for one in gone)

    @rule(values=token_lists, salt=st.sampled_from(SALTS), lane=st.integers(0, 1))
    def arrive(self, values: list[int], salt: bytes, lane: int) -> None:
        most = len(values) - 1
        match = self.registry.match(tokens(values), salt, most)
        keeps = self.registry.layout.keeps_current
        assert match == oracle(self.entries(State.DETACHED), values, salt, most, keeps)
        if match is not None:
            kept = self.entries()[match.entry][1]
            lease = self.registry.attach(match, lane % self.lanes)
            self.takes(match.session, lease)
            self.filling.append((lease, kept))
            with pytest.raises(ContractError):
                self.registry.attach(match, 0)

    @precondition(lambda self: self.filling)
    @rule(data=st.data(), event=st.sampled_from([Event.ATTACHED, Event.GIVEN_BACK, Event.FAILED]))
    def settle(self, data: st.DataObject, event: Event) -> None:
        number = data.draw(st.integers(0, len(self.filling) - 1))
        lease, kept = self.filling.pop(number)
        assert not any(kept is one for one in self.released), "a lane was filled from what was given away"
        closed = self.valid.get(lease.session) != lease
        self.registry.settle(lease, event)
        assert any(kept is one for one in self.released) == (closed or event is not Event.GIVEN_BACK)
        if event is not Event.ATTACHED and not closed:
            self.takes(lease.session, None)
        with pytest.raises(ContractError):
            self.registry.settle(lease, event)

    @precondition(lambda self: self.old)
    @rule(data=st.data())
    def a_late_writer(self, data: st.DataObject) -> None:
        """It is told so, counted, and changes nothing; what it brings is released."""
        lease = data.draw(st.sampled_from(self.old))
        fenced, before, held = self.registry.counts["fenced"], self.entries(), self.registry.held.kv_bytes
        kept = Kept(tokens([1]), 1, b"", "x", 1, 1, object())
        self.given.append(kept)
        assert not self.registry.admits(lease)
        assert not self.registry.detach(lease, kept)
        self.registry.end(lease)
        assert self.registry.counts["fenced"] == fenced + 3
        assert self.entries() == before and self.registry.held.kv_bytes == held
        assert any(kept is one for one in self.released)

    @precondition(lambda self: self.valid)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.valid)))
        self.registry.end(self.valid[session])
        self.takes(session, None)

    @rule(session=st.sampled_from(SESSIONS))
    def close(self, session: str) -> None:
        self.registry.close(session)
        self.takes(session, None)
        assert not any(name == session for name, _ in self.entries(State.DETACHED, State.ATTACHING).values())

    @rule()
    def reset(self) -> None:
        self.registry.reset()
        for session in list(self.valid):
            self.takes(session, None)
        assert not self.entries(State.DETACHED, State.ATTACHING)

    @rule(seconds=st.sampled_from([1.0, 60.0, 1000.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        detached = len(self.entries(State.DETACHED))
        gone = self.registry.expire()
        assert len(self.entries(State.DETACHED)) == detached - gone
        if seconds == 1000.0:
            assert gone == detached

    @invariant()
    def accounts(self) -> None:
        if not hasattr(self, "registry"):
            return
        held = [kept for _, kept in self.entries().values()]
        registry = self.registry
        assert len(held) <= registry.layout.entries
        assert registry.held.kv_bytes == sum(kept.kv_bytes for kept in held)
        assert registry.held.state_bytes == sum(kept.state_bytes for kept in held)
        by_tenant: Counter[str] = Counter()
        for kept in held:
            by_tenant[kept.tenant] += kept.kv_bytes + kept.state_bytes
        assert registry.held.by_tenant == by_tenant
        assert self.quota is None or all(nbytes <= self.quota for nbytes in by_tenant.values())
        # Everything that was given is held or was released, once.
        assert Counter(map(id, self.given)) == Counter(map(id, [*held, *self.released]))
        assert all(registry._leases.get(session) == lease for session, lease in self.valid.items())
        assert len(registry._leases) == len(self.valid)
        assert all(any(kept is one for one in held) for _, kept in self.filling)

    def teardown(self) -> None:
        if hasattr(self, "registry"):
            for lease, _ in self.filling:
                self.registry.settle(lease, Event.ATTACHED)
            self.registry.reset()
            assert self.registry.held.kv_bytes == self.registry.held.state_bytes == 0
            assert not self.registry.held.by_tenant and len(self.released) == len(self.given)


TestSessions = Sessions.TestCase
TestSessions.settings = settings(max_examples=400, stateful_step_count=50, deadline=None)


def test_what_is_not_in_the_table_is_refused() -> None:
    known = 0
    for state, event in product(State, Event):
        try:
            assert isinstance(after(state, event), State)
            known += 1
        except ContractError as error:
            assert event.value in str(error) and state.value in str(error)
    assert known == 13
    for event in Event:
        with pytest.raises(ContractError):
            after(State.CLOSED, event)


def test_no_two_engines_have_the_same_lease() -> None:
    layout, limits = LaneLayout(1, 1, "keep-current"), Limits(TTL_S)
    one, two = (SessionRegistry(layout, limits, engine, lambda kept: None, lambda: 0.0) for engine in (b"1", b"2"))
    first, second = one.begin("a", 0), two.begin("a", 0)
    assert first.epoch == second.epoch and first != second
    assert not one.admits(second) and not two.admits(first)
    assert one.admits(first) and two.admits(second)
