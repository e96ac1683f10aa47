"""Copies between engine blocks and host slots, and the order they must keep.

Two implementations of one interface. `HostTransfer` copies at once: on CPU the engine's memory is host memory, and the
forward that wrote it has returned. `StreamTransfer` submits to a device and holds these rules:

1. a save starts after the forward that wrote its blocks (the save stream waits for the compute stream);
2. a load starts after the zeroing of its blocks and after their last reader or writer (the load stream waits too);
3. the next forward starts after a save of what it overwrites (the compute stream waits for the save stream);
4. a ticket is done only when the device has finished the copies: until then the scheduler keeps a save's blocks and
   slots, and a load's slots, from reuse, and no reader is started on a load's blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from ucmcache.connector.layout import Region, Storages, UnitMap
from ucmcache.connector.messages import UnitCopy
from ucmcache.store.memory import SlotMemory


class Ticket(NamedTuple):
    """Submitted copies. With an `error`, some were not submitted; those that were still end with `event`."""

    event: Any
    error: Exception | None = None


class Transfer(Protocol):
    """Moves units. A ticket is polled until `done`, also one with an error: its memory is in use until then."""

    def save(self, copies: Sequence[UnitCopy], before_next: bool = False) -> Ticket:
        """Engine blocks -> host slots, after everything that the compute stream was given so far.

        With `before_next` what it is given from now on comes after the copies.
        """

    def load(self, copies: Sequence[UnitCopy]) -> Ticket:
        """Host slots -> engine blocks, after everything that the compute stream was given so far."""

    def done(self, ticket: Ticket) -> bool:
        """Whether the copies of a ticket are finished; never blocks."""


class HostTransfer:
    """Synchronous copies where the engine's memory is host memory."""

    def __init__(self, storages: Storages, units: Mapping[int, UnitMap], slots: Mapping[int, SlotMemory]) -> None:
        flat: list[NDArray[np.uint8]] = [storage.numpy() for storage in storages.flat]
        self._runs = {group: _runs_of(unit, flat) for group, unit in units.items()}
        self._slots = slots

    def save(self, copies: Sequence[UnitCopy], before_next: bool = False) -> Ticket:
        for group, slot, block in copies:
            row = self._slots[group].row(slot)
            for blocks, begin, end in self._runs[group]:
                source = blocks[block]
                row[begin:end].reshape(source.shape)[...] = source
        return Ticket(None)

    def load(self, copies: Sequence[UnitCopy]) -> Ticket:
        for group, slot, block in copies:
            row = self._slots[group].row(slot)
            for blocks, begin, end in self._runs[group]:
                target = blocks[block]
                target[...] = row[begin:end].reshape(target.shape)
        return Ticket(None)

    def done(self, ticket: Ticket) -> bool:
        return True


class _Run(NamedTuple):
    """Regions that one copy moves, since they are as far from each other in the engine's memory as in every block."""

    blocks: NDArray[np.uint8]  # [blocks, regions, bytes of a region], or without the middle axis for one region
    begin: int  # in a unit
    end: int


def _runs_of(unit: UnitMap, flat: Sequence[NDArray[np.uint8]]) -> list[_Run]:
    """The regions of a unit as few copies, in slot order."""
    bundles: list[list[Region]] = []
    for region in unit.regions:
        last = bundles[-1] if bundles else []
        if last and region == last[-1]._replace(offset_bytes=region.offset_bytes):
            step = region.offset_bytes - last[-1].offset_bytes
            if step > 0 and (len(last) == 1 or step == last[-1].offset_bytes - last[-2].offset_bytes):
                last.append(region)
                continue
        bundles.append([region])
    runs, at = [], 0
    for bundle in bundles:
        first, count = bundle[0], len(bundle)
        step = bundle[1].offset_bytes - first.offset_bytes if count > 1 else first.nbytes
        bytes_from_first = flat[first.storage].nbytes - first.offset_bytes - (count - 1) * step - first.nbytes
        blocks = bytes_from_first // first.stride_bytes + 1 if first.stride_bytes > 0 else 1
        view = as_strided(
            flat[first.storage][first.offset_bytes :],
            (blocks, count, first.nbytes),
            (first.stride_bytes, step, 1),
        )
        end = at + count * first.nbytes
        runs.append(_Run(view if count > 1 else view[:, 0], at, end))
        at = end
    return runs


class Device(Protocol):
    """What StreamTransfer needs of a device: three in-order streams, "compute", "save" and "load", and events."""

    def record(self, stream: str) -> Any:
        """An event that is reached when all work given to `stream` so far is finished."""

    def wait(self, stream: str, event: Any) -> None:
        """Work given to `stream` from now on starts only after `event`."""

    def copy_out(self, stream: str, copy: UnitCopy) -> None:
        """Block -> slot, asynchronously on `stream`."""

    def copy_in(self, stream: str, copy: UnitCopy) -> None:
        """Slot -> block, asynchronously on `stream`."""

    def reached(self, event: Any) -> bool:
        """Whether an event is reached; never blocks."""


class StreamTransfer:
    """Ordered, asynchronous copies on a device's own copy streams."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def save(self, copies: Sequence[UnitCopy], before_next: bool = False) -> Ticket:
        ticket = self._submit("save", self._device.copy_out, copies)
        if before_next:
            self._device.wait("compute", ticket.event)
        return ticket

    def load(self, copies: Sequence[UnitCopy]) -> Ticket:
        return self._submit("load", self._device.copy_in, copies)

    def done(self, ticket: Ticket) -> bool:
        return self._device.reached(ticket.event)

    def _submit(self, stream: str, copy_one: Callable[[str, UnitCopy], None], copies: Sequence[UnitCopy]) -> Ticket:
        self._device.wait(stream, self._device.record("compute"))
        error = None
        try:
            for copy in copies:
                copy_one(stream, copy)
        except Exception as raised:
            error = raised
        return Ticket(self._device.record(stream), error)


class CudaDevice:
    """A CUDA device: the engine's current stream for compute, two streams of our own, pinned host slots."""

    def __init__(
        self, device: torch.device, storages: Storages, units: Mapping[int, UnitMap], slots: Mapping[int, SlotMemory]
    ) -> None:
        self._device = device
        self._flat = storages.flat
        self._units = units
        self._slots = slots
        self._streams = {"save": torch.cuda.Stream(device), "load": torch.cuda.Stream(device)}

    def record(self, stream: str) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream(stream))
        return event

    def wait(self, stream: str, event: torch.cuda.Event) -> None:
        self._stream(stream).wait_event(event)

    def copy_out(self, stream: str, copy: UnitCopy) -> None:
        with torch.cuda.stream(self._stream(stream)):
            for host, block in self._pairs(copy):
                host.copy_(block, non_blocking=True)

    def copy_in(self, stream: str, copy: UnitCopy) -> None:
        with torch.cuda.stream(self._stream(stream)):
            for host, block in self._pairs(copy):
                block.copy_(host, non_blocking=True)

    def reached(self, event: torch.cuda.Event) -> bool:
        return bool(event.query())

    def _stream(self, stream: str) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device) if stream == "compute" else self._streams[stream]

    def _pairs(self, copy: UnitCopy) -> list[tuple[torch.Tensor, torch.Tensor]]:
        row = torch.from_numpy(self._slots[copy.group].row(copy.slot))
        pairs = []
        at = 0
        for storage, offset, stride, nbytes in self._units[copy.group].regions:
            begin = offset + copy.block * stride
            pairs.append((row[at : at + nbytes], self._flat[storage][begin : begin + nbytes]))
            at += nbytes
        return pairs
