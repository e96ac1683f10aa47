"""The load-or-recompute gate against plain arithmetic, and that a slow tier goes and comes back."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from ucmcache.coordinator.gate import LoadGate

RATES = st.floats(1, 1e9)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def measured(clock: Clock, bytes_per_s: float, tokens_per_s: float, times: int = 10) -> LoadGate:
    gate = LoadGate(clock)
    for _ in range(times):
        gate.read(1000, 1000 / bytes_per_s)
        gate.computed(1000, 1000 / tokens_per_s)
    return gate


@given(RATES, RATES, st.integers(1, 10**9), st.integers(1, 10**6))
def test_steady_rates_decide(bytes_per_s: float, tokens_per_s: float, nbytes: int, tokens: int) -> None:
    load_s, compute_s = nbytes / bytes_per_s, tokens / tokens_per_s
    assume(abs(load_s - compute_s) > 1e-6 * max(load_s, compute_s))
    gate = measured(Clock(), bytes_per_s, tokens_per_s)
    first, second = gate.allows(nbytes, tokens), gate.allows(nbytes, tokens)
    assert first  # one is let through to measure, if it was not worth it anyway
    assert second == (load_s < compute_s)


@given(st.integers(1, 10**9), st.integers(1, 10**6))
def test_nothing_measured_is_no_reason_to_recompute(nbytes: int, tokens: int) -> None:
    clock = Clock()
    gate = LoadGate(clock)
    assert gate.allows(nbytes, tokens) and gate.allows(nbytes, tokens)
    for _ in range(10):
        gate.read(1, 1e6)
    assert gate.allows(nbytes, tokens)  # how fast it computes is still unknown
    gate.computed(0, 1.0)
    gate.computed(100, 0.0)
    assert gate.allows(nbytes, tokens)


def test_a_slow_tier_goes_and_comes_back() -> None:
    clock = Clock()
    gate = measured(clock, 1e9, 1e4)
    assert all(gate.allows(1_000_000, 100) for _ in range(5))
    for _ in range(40):
        gate.read(1_000, 1.0)
    answers = []
    for _ in range(100):
        clock.now_s += 1.0
        answers.append(gate.allows(1_000_000, 100))
    assert answers.count(True) == 10  # one in ten seconds tries
    # It is fast again: what the tries measure shows it.
    tries = 0
    while not (gate.allows(1_000_000, 100) and gate.allows(1_000_000, 100)):
        clock.now_s += 10.0
        gate.allows(1_000_000, 100)
        for _ in range(20):
            gate.read(1_000_000, 1e-3)
        tries += 1
        assert tries < 20
    assert tries <= 5
