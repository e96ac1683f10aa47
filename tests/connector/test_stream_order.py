"""StreamTransfer's ordering rules on a fake device that may interleave its streams in any order the events allow."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from ucmcache.connector.messages import UnitCopy
from ucmcache.connector.transfer import StreamTransfer, Ticket

BLOCKS, SLOTS, SEEDS = 6, 4, 500


@dataclass
class Event:
    reached: bool = False


@dataclass
class FakeDevice:
    """In-order streams; `advance` runs the head of a random stream that is not waiting for an event."""

    random: random.Random
    without: str = ""  # the one ordering rule that this device drops
    blocks: list[int] = field(default_factory=lambda: [0] * BLOCKS)
    slots: list[int] = field(default_factory=lambda: [0] * SLOTS)
    mismatches: int = 0

    def __post_init__(self) -> None:
        self.queues: dict[str, deque[Callable[[], bool]]] = {name: deque() for name in ("compute", "save", "load")}

    def submit(self, stream: str, work: Callable[[], None]) -> None:
        def run() -> bool:
            work()
            return True

        self.queues[stream].append(run)

    def record(self, stream: str) -> Event:
        event = Event()

        def reach() -> None:
            event.reached = True

        self.submit(stream, reach)
        return event

    def wait(self, stream: str, event: Event) -> None:
        if self.without != (f"{stream} waits for compute" if stream != "compute" else "compute waits for save"):
            self.queues[stream].append(lambda: event.reached)

    def copy_out(self, stream: str, copy: UnitCopy) -> None:
        self.submit(stream, lambda: self.slots.__setitem__(copy.slot, self.blocks[copy.block]))

    def copy_in(self, stream: str, copy: UnitCopy) -> None:
        self.submit(stream, lambda: self.blocks.__setitem__(copy.block, self.slots[copy.slot]))

    def reached(self, event: Event) -> bool:
        return event.reached

    def advance(self, steps: int) -> None:
        for _ in range(steps):
            busy = [queue for queue in self.queues.values() if queue]
            if not busy:
                return
            queue = self.random.choice(busy)
            if queue[0]():
                queue.popleft()

    def drain(self) -> None:
        while any(self.queues.values()):
            self.advance(1)

    def write(self, block: int, value: int) -> None:
        self.submit("compute", lambda: self.blocks.__setitem__(block, value))

    def read(self, block: int, value: int) -> None:
        def check() -> None:
            self.mismatches += self.blocks[block] != value

        self.submit("compute", check)


def simulate(seed: int, without: str = "") -> int:
    """Byte mismatches of a random run of saves, loads and reuse, as the scheduler side would drive them."""
    rng = random.Random(seed)
    device = FakeDevice(rng, without)
    transfer = StreamTransfer(device)
    free_blocks, free_slots = list(range(BLOCKS)), list(range(SLOTS))
    saves: list[tuple[Ticket, int, int, int]] = []
    loads: list[tuple[Ticket, int, int, int]] = []
    ready: dict[int, int] = {}
    for value in range(1, 60):
        action = rng.random()
        if action < 0.45 and free_blocks and free_slots:
            block, slot = free_blocks.pop(rng.randrange(len(free_blocks))), free_slots.pop()
            device.write(block, 0)  # zeroing
            device.write(block, value)  # the forward
            # A state that the next forward overwrites: that has to wait for the copy.
            volatile = rng.random() < 0.5
            saves.append((transfer.save([UnitCopy(0, slot, block)], before_next=volatile), slot, block, value))
            if volatile:
                device.write(block, value + 1000)
        elif action < 0.8 and free_blocks and ready:
            slot = rng.choice(sorted(ready))
            held = ready.pop(slot)
            block = free_blocks.pop(rng.randrange(len(free_blocks)))
            device.write(block, 0)  # zeroing, and whoever had the block before is already on the compute stream
            loads.append((transfer.load([UnitCopy(0, slot, block)]), slot, block, held))
        device.advance(rng.randrange(6))
        for one in [one for one in saves if without == "a save is done when finished" or transfer.done(one[0])]:
            saves.remove(one)
            _, slot, block, saved = one
            device.mismatches += device.slots[slot] != saved  # a checksum is taken, a backend write starts
            ready[slot] = saved
            free_blocks.append(block)
        for one in [one for one in loads if without == "a load is done when finished" or transfer.done(one[0])]:
            loads.remove(one)
            _, slot, block, held = one
            device.read(block, held)  # the request runs
            free_blocks.append(block)
            free_slots.append(slot)
    device.drain()
    return device.mismatches


def test_no_legal_interleaving_moves_wrong_bytes() -> None:
    assert sum(simulate(seed) for seed in range(SEEDS)) == 0


@pytest.mark.parametrize(
    "rule",
    [
        "save waits for compute",
        "load waits for compute",
        "compute waits for save",
        "a save is done when finished",
        "a load is done when finished",
    ],
)
def test_every_wait_is_needed(rule: str) -> None:
    assert sum(simulate(seed, without=rule) for seed in range(SEEDS)) > 0


@pytest.mark.parametrize("direction", ["save", "load"])
def test_copies_before_a_failing_one_keep_their_memory_until_they_are_done(direction: str) -> None:
    """A copy list that fails halfway: what was submitted still runs, so the ticket is not done before."""
    device = FakeDevice(random.Random(1))
    transfer = StreamTransfer(device)
    copies: list[UnitCopy] = [UnitCopy(0, 1, 1), UnitCopy(0, 2, 2)]

    def fail_at_second(stream: str, copy: UnitCopy) -> None:
        if copy.slot == 2:
            raise RuntimeError("no more")
        FakeDevice.copy_out(device, stream, copy)

    device.copy_out = device.copy_in = fail_at_second  # type: ignore[method-assign]
    ticket = getattr(transfer, direction)(copies)
    assert isinstance(ticket.error, RuntimeError)
    assert not transfer.done(ticket)
    device.drain()
    assert transfer.done(ticket)
