"""The ledger against a model: holders, stand-ins, failures in every order, resets in between."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ucmcache.connector.jobs import Job, Ledger
from ucmcache.connector.messages import Phase, Result
from ucmcache.connector.ranks import Ranks

SAVE = (Phase.COPIED, Phase.WRITTEN)


@given(
    stages=st.integers(1, 3),
    per_stage=st.integers(1, 4),
    slot=st.integers(0, 20),
    alike=st.booleans(),
    fails=st.sets(st.tuples(st.integers(0, 11), st.sampled_from(SAVE))),
    data=st.data(),
)
def test_a_save_ends_as_its_holders_do(
    stages: int, per_stage: int, slot: int, alike: bool, fails: set[tuple[int, Phase]], data: st.DataObject
) -> None:
    ranks = Ranks(stages * per_stage, per_stage)
    holders = ranks.holders(per_stage if alike else 1, slot)
    assert sorted(rank for one in holders for rank in one) == list(range(ranks.count))
    ledger = Ledger(lambda: 0.0)
    number = ledger.start([], SAVE, holders)
    queue = [(one[0], Phase.COPIED) for one in holders]
    ended: dict[Phase, str] = {}
    tried: list[tuple[int, Phase]] = []
    while queue:
        rank, phase = queue.pop(data.draw(st.integers(0, len(queue) - 1)))
        tried.append((rank, phase))
        failed = (rank, phase) in fails
        for _, one, cause in ledger.ended([Result(number, phase, rank, f"{rank}" if failed else "")]):
            assert one not in ended
            ended[one] = cause
        if not failed and phase is Phase.COPIED:
            queue.append((rank, Phase.WRITTEN))
        queue += [(one.rank, one.phase) for one in ledger.take_overs()]
    assert list(ended) in ([*SAVE], [*reversed(SAVE)])
    assert len(ledger) == 0
    assert len(tried) == len(set(tried))  # nobody is asked twice
    copies = [any((rank, Phase.COPIED) not in fails for rank in one) for one in holders]
    assert bool(ended[Phase.COPIED]) == (not all(copies))
    # Who takes over a copy goes on to write it; who takes over a write did not copy.
    for holder in holders:
        wrote = [rank for rank in holder if (rank, Phase.WRITTEN) in tried and (rank, Phase.WRITTEN) not in fails]
        assert len(wrote) <= 1
        if not wrote:
            assert ended[Phase.WRITTEN]
    if not ended[Phase.WRITTEN]:
        assert not ended[Phase.COPIED]


@given(per_stage=st.integers(2, 4), failing=st.sampled_from(SAVE))
def test_nobody_takes_over_across_a_reset(per_stage: int, failing: Phase) -> None:
    for late in (False, True):  # the failure arrives before the reset, or after it
        ledger = Ledger(lambda: 0.0)
        holders = Ranks(per_stage, per_stage).holders(per_stage, 0)
        number = ledger.start([], SAVE, holders)
        seen: list[tuple[Job, Phase, str]] = []
        results = [Result(number, Phase.COPIED, 0)] if failing is Phase.WRITTEN else []
        seen += ledger.ended(results)
        failure = [Result(number, failing, 0, "broken")]
        if not late:
            seen += ledger.ended(failure)
        seen += ledger.reset()
        if late:
            seen += ledger.ended(failure)
        assert [(phase, bool(cause)) for _, phase, cause in seen] == [
            (phase, phase is failing or failing is Phase.COPIED) for phase in SAVE
        ]
        assert not ledger.take_overs()
        assert len(ledger) == 0
