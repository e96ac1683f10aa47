"""The pipeline of calls: order, limits, retries, hung calls, and how it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucmcache.errors import BackendError, BackendFullError, RecordError
from ucmcache.store.breaker import Breaker
from ucmcache.store.pipeline import FULL, QUEUE_FULL, REFUSED, SHUTDOWN, Call, Pipeline


class Calls:
    """Makes calls that note when they run and how they end."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.ended: dict[str, str] = {}
        self.release = threading.Event()

    def make(self, name: str, *, read: bool = False, nbytes: int = 0, hangs: bool = False, **options: object) -> Call:
        outcomes = list(options.pop("outcomes", []))  # type: ignore[call-overload]

        def run() -> str:
            self.ran.append(name)
            if hangs:
                self.release.wait(30)
            outcome = outcomes.pop(0) if outcomes else ""
            if isinstance(outcome, Exception):
                raise outcome
            return str(outcome)

        def done(cause: str, error: Exception | None) -> None:
            assert name not in self.ended, "a call ends once"
            self.ended[name] = cause

        return Call(run, done, is_read=read, nbytes=nbytes, key=name, **options)  # type: ignore[arg-type]


@pytest.fixture
def calls() -> Iterator[Calls]:
    made = Calls()
    yield made
    made.release.set()


def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.001)


def test_reads_go_first_and_never_wait_for_a_write(calls: Calls) -> None:
    pipeline = Pipeline(60.0, threads=2)
    pipeline.submit([calls.make("hangs", hangs=True)])
    until(lambda: calls.ran == ["hangs"])
    pipeline.submit([calls.make(f"w{i}") for i in range(5)])
    pipeline.submit([calls.make(f"r{i}", read=True) for i in range(20)])
    until(lambda: sum(name.startswith("r") for name in calls.ended) == 20)
    assert not any(name.startswith("w") for name in calls.ran)  # one write at a time, with two threads
    calls.release.set()
    assert pipeline.wait_idle(10) and len(calls.ended) == 26
    assert calls.ran.index("w0") > calls.ran.index("r19")
    assert pipeline.close(1.0) == 0


def test_a_full_queue_refuses_writes_and_takes_reads(calls: Calls) -> None:
    pipeline = Pipeline(60.0, queue_bytes=100)
    pipeline.submit([calls.make("hangs", nbytes=1000, hangs=True)])  # larger than the queue, and alone
    until(lambda: calls.ran == ["hangs"])
    pipeline.submit([calls.make("a", nbytes=60), calls.make("b", nbytes=60), calls.make("c", nbytes=40)])
    pipeline.submit([calls.make("describes"), calls.make("r", read=True, nbytes=1000)])
    assert calls.ended.get("b") == QUEUE_FULL
    calls.release.set()
    assert pipeline.wait_idle(10)
    assert {name for name, cause in calls.ended.items() if not cause} == {"hangs", "a", "c", "describes", "r"}
    pipeline.submit([calls.make("later", nbytes=100)])
    assert pipeline.wait_for(["later"], 10) and calls.ended["later"] == ""
    pipeline.close(1.0)


@pytest.mark.parametrize(
    ("outcomes", "cause", "runs"),
    [
        ([""], "", 1),
        (["gone"], "gone", 1),
        ([RecordError("checksum", "x")], "checksum", 1),
        ([BackendError("x")] * 2, "", 3),
        ([OSError("x")] * 9, "OSError", 3),
        ([BackendFullError("x")] * 9, FULL, 3),
        ([BackendError("x"), RecordError("length", "x")], "length", 2),
    ],
)
def test_what_is_tried_again(calls: Calls, outcomes: list[object], cause: str, runs: int) -> None:
    retried: list[int] = []
    pipeline = Pipeline(60.0, on_retry=lambda: retried.append(1))
    pipeline.submit([calls.make("one", outcomes=outcomes, backoff_s=(0.001, 0.002))])
    assert pipeline.wait_idle(10)
    assert calls.ended == {"one": cause} and len(calls.ran) == runs and len(retried) == runs - 1
    assert pipeline.answers
    pipeline.close(1.0)


def test_a_call_that_waits_to_be_tried_again_keeps_no_thread(calls: Calls) -> None:
    pipeline = Pipeline(60.0, threads=1)
    pipeline.submit([calls.make("slow", outcomes=[BackendError("x")], backoff_s=(0.2,)), calls.make("other")])
    assert pipeline.wait_idle(10)
    assert calls.ran == ["slow", "other", "slow"]
    pipeline.close(1.0)


def test_calls_that_hang_are_bounded_refuse_the_rest_and_end(calls: Calls) -> None:
    now = [0.0]
    pipeline = Pipeline(10.0, threads=2, breaker=Breaker(clock=lambda: now[0]), clock=lambda: now[0])
    before = threading.active_count()
    pipeline.submit([calls.make(f"h{i}", read=True, hangs=True) for i in range(10)])
    until(lambda: len(calls.ran) == 2)
    assert threading.active_count() <= before + 2
    pipeline.watch()
    assert pipeline.answers and not calls.ended
    now[0] = 10.1
    pipeline.watch()
    assert not pipeline.answers
    assert calls.ended == {f"h{i}": REFUSED for i in range(2, 10)}
    # Also after the breaker's pause: no thread is left to try with.
    now[0] = 1000.0
    pipeline.submit([calls.make("refused", read=True)])
    assert calls.ended["refused"] == REFUSED
    calls.release.set()
    until(lambda: "h0" in calls.ended and "h1" in calls.ended)
    assert calls.ended["h0"] == calls.ended["h1"] == ""  # late, and right all the same
    pipeline.submit([calls.make("again", read=True)])
    assert pipeline.wait_idle(10) and calls.ended["again"] == "" and pipeline.answers
    assert pipeline.close(1.0) == 0


def test_one_hung_call_leaves_the_other_thread(calls: Calls) -> None:
    now = [0.0]
    pipeline = Pipeline(10.0, threads=2, breaker=Breaker(clock=lambda: now[0]), clock=lambda: now[0])
    pipeline.submit([calls.make("hangs", hangs=True)])
    until(lambda: calls.ran == ["hangs"])
    now[0] = 10.1
    pipeline.watch()
    assert not pipeline.answers
    now[0] = 30.0
    pipeline.submit([calls.make("try", read=True)])
    until(lambda: "try" in calls.ended)
    assert calls.ended["try"] == "" and pipeline.answers
    pipeline.close(0.01)


@pytest.mark.parametrize(
    ("threads", "hung_writes", "hung_reads"),
    [
        (threads, writes, hung - writes)
        for threads in (1, 2, 3, 4)
        for hung in range(1, threads + 1)
        for writes in range(min(hung, max(1, threads - 1)) + 1)
    ],
)
def test_what_no_thread_is_left_for_is_refused(calls: Calls, threads: int, hung_writes: int, hung_reads: int) -> None:
    most_writes = max(1, threads - 1)
    now = [0.0]
    pipeline = Pipeline(10.0, threads=threads, breaker=Breaker(clock=lambda: now[0]), clock=lambda: now[0])
    pipeline.submit([calls.make(f"hung write {i}", hangs=True) for i in range(hung_writes)])
    until(lambda: len(calls.ran) == hung_writes)
    pipeline.submit([calls.make(f"hung read {i}", read=True, hangs=True) for i in range(hung_reads)])
    until(lambda: len(calls.ran) == hung_writes + hung_reads)
    now[0] = 10.1
    pipeline.watch()
    # The breaker's pause is over; what is accepted from now on has to end.
    now[0] = 30.0
    free = threads - hung_writes - hung_reads
    pipeline.submit([calls.make("write")])
    assert ("write" in calls.ended) == (not free or hung_writes == most_writes)
    until(lambda: "write" in calls.ended)
    assert calls.ended["write"] == ("" if free and hung_writes < most_writes else REFUSED)
    pipeline.submit([calls.make("read", read=True)])
    until(lambda: "read" in calls.ended)
    assert calls.ended["read"] == ("" if free else REFUSED) and pipeline.answers == bool(free)
    pipeline.close(0.01)


def test_closing_drains_and_then_gives_up(calls: Calls) -> None:
    pipeline = Pipeline(60.0)
    pipeline.submit([calls.make(f"w{i}") for i in range(50)])
    pipeline.submit([calls.make("again", outcomes=[BackendError("x")], backoff_s=(30.0,))])
    assert pipeline.close(10.0) == 0  # what waits to be tried again has its last chance now
    assert len(calls.ended) == 51
    pipeline.submit([calls.make("too late")])
    assert calls.ended["too late"] == SHUTDOWN

    stuck = Pipeline(60.0, threads=2)
    stuck.submit([calls.make("stuck", hangs=True), *(calls.make(f"s{i}") for i in range(3))])
    began_s = time.monotonic()
    assert stuck.close(0.2) == 4
    assert time.monotonic() - began_s < 5.0
    assert {calls.ended[f"s{i}"] for i in range(3)} == {SHUTDOWN} and "stuck" not in calls.ended


def test_threads_end(calls: Calls) -> None:
    before = threading.active_count()
    for number in range(20):
        pipeline = Pipeline(60.0)
        pipeline.submit([calls.make(f"{number}")])
        pipeline.close(5.0)
    until(lambda: threading.active_count() <= before)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_call_ends_once_and_nothing_is_left(data: st.DataObject) -> None:
    calls = Calls()
    pipeline = Pipeline(
        60.0,
        queue_bytes=data.draw(st.sampled_from([None, 0, 50])),
        threads=data.draw(st.integers(1, 3)),
        breaker=Breaker(failures=data.draw(st.integers(1, 4)), cool_down_s=0.002),
    )
    outcomes = st.sampled_from(["", "gone", BackendError("x"), RecordError("key", "x"), BackendFullError("x")])
    total = 0
    for _ in range(data.draw(st.integers(1, 6))):
        batch = []
        for _ in range(data.draw(st.integers(0, 5))):
            total += 1
            batch.append(
                calls.make(
                    str(total),
                    read=data.draw(st.booleans()),
                    nbytes=data.draw(st.integers(0, 40)),
                    outcomes=data.draw(st.lists(outcomes, max_size=4)),
                    backoff_s=(0.0,) * data.draw(st.integers(0, 3)),
                )
            )
        pipeline.submit(batch)
        if data.draw(st.booleans()):
            pipeline.watch()
    pipeline.close(10.0)  # gives up what is left where the breaker is open just then
    until(lambda: len(calls.ended) == total and not pipeline.pending)
    assert not pipeline._keys and not pipeline._queued_bytes
