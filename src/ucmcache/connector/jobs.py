"""Jobs in flight: what each one holds, and when all ranks that it needs have answered."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ucmcache.connector.messages import Phase, Result
from ucmcache.connector.ranks import Holders
from ucmcache.keys import UnitKey

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Job:
    """Work in flight, and what it holds until its last result."""

    units: Sequence[tuple[UnitKey, int]]  # keys and their host slots
    waiting: dict[Phase, int]  # results still to come, per phase, in the order of phases
    stand_ins: dict[int, tuple[int, ...]]  # rank at work -> ranks that can take over from it
    started_s: float
    epoch: int  # resets seen before it started
    blocks: list[Any] = field(default_factory=list)  # engine blocks held while they are copied
    request_id: str = ""
    tokens: int = 0
    checkpoint: Any = None  # of a session, that the copy is a part of
    causes: dict[Phase, str] = field(default_factory=dict)


class TakeOver(NamedTuple):
    """A job whose phase failed on one rank, and the rank that is to do it, and what follows, instead."""

    number: int
    job: Job
    phase: Phase
    rank: int


class Ledger:
    """All jobs in flight, by number.

    Promised: a phase ends exactly once, when one rank of each holder has done it or all ranks of one have failed, with
    the cause of one that failed for good, if any. Results of unknown jobs are logged and ignored.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.epoch = 0  # resets so far
        self._clock = clock
        self._jobs: dict[int, Job] = {}
        self._next = 0
        self._take_overs: list[TakeOver] = []

    def __len__(self) -> int:
        return len(self._jobs)

    def start(
        self,
        units: Sequence[tuple[UnitKey, int]],
        phases: Iterable[Phase],
        holders: Holders,
        *,
        blocks: Sequence[Any] = (),
        request_id: str = "",
        tokens: int = 0,
        checkpoint: Any = None,
    ) -> int:
        """Number of a new job that the first rank of each holder will report each of `phases` of."""
        number = self._next
        self._next += 1
        self._jobs[number] = Job(
            units,
            dict.fromkeys(phases, len(holders)),
            {ranks[0]: ranks[1:] for ranks in holders if ranks[1:]},
            self._clock(),
            self.epoch,
            list(blocks),
            request_id,
            tokens,
            checkpoint,
        )
        return number

    def ended(self, results: Iterable[Result]) -> Iterator[tuple[Job, Phase, str]]:
        """Count results; yields each phase that they end, with its cause."""
        for number, phase, rank, cause in results:
            job = self._jobs.get(number)
            if job is None or phase not in job.waiting:
                logger.warning("ucmcache: a result for job %d (%s), which is not in flight, is ignored", number, phase)
                continue
            if not (cause and self._taken_over(number, job, phase, rank)):
                yield from self._count(number, job, phase, cause)

    def reset(self) -> Iterator[tuple[Job, Phase, str]]:
        """Go on to the next epoch; yields each phase that thereby ends, as `ended` does."""
        self.epoch += 1
        # The ranks now work under another identity: nobody takes over what belongs to the one before.
        for number, job, phase, _ in self.take_overs():
            yield from self._count(number, job, phase, "reset")

    def take_overs(self) -> list[TakeOver]:
        """What is to be given to other ranks, since the last call."""
        taken, self._take_overs = self._take_overs, []
        return taken

    @property
    def has_take_overs(self) -> bool:
        """Whether something waits to be given to another rank."""
        return bool(self._take_overs)

    def any_younger_than(self, age_s: float) -> bool:
        """Whether a job in flight was started less than `age_s` ago."""
        now = self._clock()
        return any(now - job.started_s < age_s for job in self._jobs.values())

    def _count(self, number: int, job: Job, phase: Phase, cause: str) -> Iterator[tuple[Job, Phase, str]]:
        phases = list(job.waiting)
        # A rank that failed does not come to what follows.
        for one in phases[phases.index(phase) :] if cause else [phase]:
            if cause:
                job.causes[one] = cause
            job.waiting[one] -= 1
            if job.waiting[one] == 0:
                del job.waiting[one]
                if not job.waiting:
                    del self._jobs[number]
                yield job, one, job.causes.get(one, "")

    def _taken_over(self, number: int, job: Job, phase: Phase, rank: int) -> bool:
        others = job.stand_ins.pop(rank, ()) if job.epoch == self.epoch else ()
        if not others:
            return False
        job.stand_ins[others[0]] = others[1:]
        self._take_overs.append(TakeOver(number, job, phase, others[0]))
        return True
