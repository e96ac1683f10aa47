"""Load or recompute: stored bytes are of use only where reading them takes less time than computing their tokens."""

from __future__ import annotations

from collections.abc import Callable

# What is judged by less says nothing.
_LEAST_TOKENS, _LEAST_READS = 256, 4
_FADING = 0.9  # of what was measured before, with every new measurement
_PROBE_S = 10.0  # how often one request may load all the same, to measure again


class _Rate:
    """Amount per second, the latest measurements first in weight."""

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0
        self.measured = 0.0

    def add(self, amount: float, seconds: float) -> None:
        self._amount = self._amount * _FADING + amount
        self._seconds = self._seconds * _FADING + seconds
        self.measured += amount

    def seconds(self, amount: float) -> float:
        """How long `amount` would take."""
        return amount * self._seconds / self._amount if self._amount else 0.0


class LoadGate:
    """Compares what reads and prefills took lately; single-threaded.

    With too little measured of either, everything is loaded. A tier that is too slow is tried with one request in
    `_PROBE_S`, so that it comes back when it has become faster.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._computing, self._reading = _Rate(), _Rate()
        self._reads = 0
        self._probe_s = 0.0

    def computed(self, tokens: int, seconds: float) -> None:
        """A step computed so many tokens of prefills."""
        if tokens > 0 and seconds > 0:
            self._computing.add(tokens, seconds)

    def read(self, nbytes: int, seconds: float) -> None:
        """The slowest rank read so many bytes in so much time."""
        if nbytes > 0 and seconds > 0:
            self._reads += 1
            self._reading.add(nbytes, seconds)

    def allows(self, nbytes: int, tokens: int) -> bool:
        """Whether to read so many bytes of each rank to save computing so many tokens."""
        if self._computing.measured < _LEAST_TOKENS or self._reads < _LEAST_READS:
            return True
        if self._reading.seconds(nbytes) <= self._computing.seconds(tokens):
            return True
        if self._clock() < self._probe_s:
            return False
        self._probe_s = self._clock() + _PROBE_S
        return True
