"""The circuit breaker against a plain model of its states, with a clock moved by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ucmcache.store.breaker import Breaker

STEPS = st.lists(st.tuples(st.sampled_from(["call", "call", "call", "wait"]), st.booleans(), st.integers(1, 12)))


@given(STEPS, st.integers(1, 4))
def test_it_opens_after_failures_in_a_row_and_closes_after_one_success(
    steps: list[tuple[str, bool, int]], most: int
) -> None:
    now = 0.0
    breaker = Breaker(most, 10.0, lambda: now)
    in_a_row, retry_s = 0, None
    for action, good, seconds in steps:
        if action == "wait":
            now += seconds
            continue
        refused = retry_s is not None and now < retry_s
        assert breaker.is_open == refused
        assert breaker.allows() == (not refused)
        if refused:
            continue
        if good:
            breaker.succeeded()
            in_a_row, retry_s = 0, None
        else:
            breaker.failed()
            in_a_row += 1
            if in_a_row >= most:
                retry_s = now + 10.0


def test_one_call_tries_while_the_others_are_refused() -> None:
    now = 0.0
    breaker = Breaker(2, 10.0, lambda: now)
    for _ in range(2):
        assert breaker.allows()
        breaker.failed()
    assert breaker.is_open
    assert not breaker.allows()
    now = 10.0
    assert not breaker.is_open
    assert breaker.allows()
    assert breaker.is_open
    assert not breaker.allows()
    breaker.failed()
    now = 19.9
    assert not breaker.allows()
    now = 20.0
    assert breaker.allows()
    breaker.succeeded()
    assert breaker.allows()
    assert breaker.allows()
    assert breaker.openings == 1


def test_calls_that_were_under_way_when_it_opened_count_once() -> None:
    breaker = Breaker(2, 10.0, lambda: 0.0)
    assert all(breaker.allows() for _ in range(5))
    for _ in range(5):
        breaker.failed()
    assert breaker.openings == 1
    assert breaker.is_open
