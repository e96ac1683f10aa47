"""Jobs in flight: what each one holds, and when all ranks have answered."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ucmcache.connector.messages import Phase, Result
from ucmcache.keys import UnitKey

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Job:
    """Work in flight, and what it holds until its last result."""

    units: Sequence[tuple[UnitKey, int]]  # keys and their host slots
    waiting: dict[Phase, int]  # results still to come, per phase
    started_s: float
    epoch: int  # resets seen before it started
    blocks: list[Any] = field(default_factory=list)  # engine blocks held while they are copied
    request_id: str = ""
    tokens: int = 0
    causes: dict[Phase, str] = field(default_factory=dict)


class Ledger:
    """All jobs in flight, by number.

    Promised: a phase ends exactly once, when every rank has reported it, with the cause of one that failed, if any.
    Results of unknown jobs are logged and ignored.
    """

    def __init__(self, world_size: int, clock: Callable[[], float]) -> None:
        self._world_size = world_size
        self.epoch = 0  # resets so far
        self._clock = clock
        self._jobs: dict[int, Job] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def start(
        self,
        units: Sequence[tuple[UnitKey, int]],
        phases: Iterable[Phase],
        *,
        blocks: Sequence[Any] = (),
        request_id: str = "",
        tokens: int = 0,
    ) -> int:
        """Number of a new job that every rank will report each of `phases` of."""
        number = self._next
        self._next += 1
        waiting = dict.fromkeys(phases, self._world_size)
        self._jobs[number] = Job(units, waiting, self._clock(), self.epoch, list(blocks), request_id, tokens)
        return number

    def ended(self, results: Iterable[Result]) -> Iterator[tuple[Job, Phase, str]]:
        """Count results; yields each phase that they end, with its cause."""
        for number, phase, cause in results:
            job = self._jobs.get(number)
            if job is None or phase not in job.waiting:
                logger.warning("ucmcache: a result for job %d (%s), which is not in flight, is ignored", number, phase)
                continue
            if cause:
                job.causes[phase] = cause
            job.waiting[phase] -= 1
            if job.waiting[phase] == 0:
                del job.waiting[phase]
                if not job.waiting:
                    del self._jobs[number]
                yield job, phase, job.causes.get(phase, "")

    def any_younger_than(self, age_s: float) -> bool:
        """Whether a job in flight was started less than `age_s` ago."""
        now = self._clock()
        return any(now - job.started_s < age_s for job in self._jobs.values())
