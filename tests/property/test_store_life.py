"""Both stores with their bytes and their backend through saves, loads, damage, reopening and death in a write.

The model knows which units must be in the backend. Whatever happens: a slot that is READY holds the right bytes, what
was reported durable is found and loaded by every later engine, and nothing else that is loaded is wrong.
"""

from __future__ import annotations

import hashlib
import random
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.crash.system_calls import watched
from ucmcache.errors import RecordError
from ucmcache.keys import BlockKey, SnapshotKey, UnitKey
from ucmcache.store import record
from ucmcache.store.arena import ArenaPlan, Presence
from ucmcache.store.backends.file import FileBackend
from ucmcache.store.block import BlockStore
from ucmcache.store.memory import SlotMemory
from ucmcache.store.snapshot import SnapshotStore
from ucmcache.store.units import UnitStore

NAMESPACE = b"n" * 16
SEEDS = {0: b"a" * 16, 1: b"b" * 16}
UNIT_BYTES = {0: 3000, 1: 70_000}  # by way of the page cache, and around it
PREFIXES = [hashlib.sha256(bytes([i])).digest() for i in range(3)]

units = st.tuples(st.sampled_from(sorted(SEEDS)), st.sampled_from(PREFIXES))


class Killed(BaseException):
    """The process ended here."""


def content(key: UnitKey) -> bytes:
    """The only right bytes of a unit."""
    return random.Random(key.prefix + bytes([key.group])).randbytes(UNIT_BYTES[key.group])


class StoreLife(RuleBasedStateMachine):
    """One engine after the other on one root."""

    @initialize(kind=st.sampled_from([BlockStore, SnapshotStore]), slots=st.integers(1, 3))
    def start(self, kind: type[UnitStore], slots: int) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="ucmcache-life-"))
        self.kind = kind
        self.plans = [ArenaPlan(nbytes, slots, (group,)) for group, nbytes in UNIT_BYTES.items()]
        self.durable: set[UnitKey] = set()
        self.open()

    def teardown(self) -> None:
        if hasattr(self, "root"):
            shutil.rmtree(self.root)

    def open(self) -> None:
        """An engine starts, knowing nothing."""
        self.store = self.kind(self.plans, SEEDS, NAMESPACE)
        self.memory = {
            plan.groups[0]: SlotMemory(plan, memoryview(bytearray(b"\xa5" * (plan.rows * plan.slot_bytes))))
            for plan in self.plans
        }
        self.bucket = FileBackend(self.root).bucket(NAMESPACE, 0)
        self.store.add_stored(self.bucket.scan())
        self.loading: dict[UnitKey, int] = {}

    def key(self, unit: tuple[int, bytes]) -> UnitKey:
        return (BlockKey if self.kind is BlockStore else SnapshotKey)(*unit, 16)

    def record_key(self, key: UnitKey) -> record.RecordKey:
        kind = "block" if self.kind is BlockStore else "snapshot"
        return record.RecordKey(NAMESPACE, SEEDS[key.group], kind, key.prefix, b"", 16, 0)

    def presence(self, key: UnitKey) -> int:
        return int(self.store.presence(key.group, [key.prefix])[0])

    def bytes_of(self, key: UnitKey, slot: int) -> memoryview:
        return self.memory[key.group].view(slot, UNIT_BYTES[key.group])

    def path(self, key: UnitKey) -> Path | None:
        return next(self.root.glob(f"ns-*/r0/*/{self.record_key(key).id.hex()}.kv"), None)

    @rule(unit=units, written=st.booleans())
    def save(self, unit: tuple[int, bytes], written: bool) -> None:
        key = self.key(unit)
        if self.presence(key) in (Presence.ABSENT, Presence.STORED):
            slots = self.store.reserve([key])
            if slots is not None:
                self.bytes_of(key, slots[0])[:] = content(key)
                self.store.commit(key.group, slots[0])
        if written:
            self.write(unit)

    @rule(unit=units)
    def write(self, unit: tuple[int, bytes]) -> None:
        key = self.key(unit)
        slot = self.store.slot(key)
        if slot is not None:
            record.write(self.bucket, self.record_key(key), self.bytes_of(key, slot))
            self.store.set_stored(key, True)
            self.durable.add(key)

    @rule(unit=units, calls=st.integers(0, 25))
    def die_in_a_write(self, unit: tuple[int, bytes], calls: int) -> None:
        """Nothing happens after the system call at which a process dies, not even what cleans up."""
        key = self.key(unit)
        slot = self.store.slot(key)
        if slot is None:
            return
        left = [calls]

        def before(name: str, arguments: tuple[Any, ...]) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise Killed

        with suppress(Killed), watched(before):
            record.write(self.bucket, self.record_key(key), self.bytes_of(key, slot))
        self.open()

    @rule(unit=units, ended=st.booleans())
    def load(self, unit: tuple[int, bytes], ended: bool) -> None:
        key = self.key(unit)
        if self.presence(key) == Presence.STORED:
            slots = self.store.reserve([key])
            if slots is not None:
                self.bytes_of(key, slots[0])[:] = b"\x5a" * UNIT_BYTES[key.group]
                self.loading[key] = slots[0]
                if ended:
                    self.end_load(key)

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def end_a_load(self, data: st.DataObject) -> None:
        self.end_load(data.draw(st.sampled_from(sorted(self.loading))))

    def end_load(self, key: UnitKey) -> None:
        slot = self.loading.pop(key)
        cause = record.GONE
        try:
            if record.read_into(self.bucket, self.record_key(key), self.bytes_of(key, slot)):
                cause = ""
        except RecordError as error:
            cause = error.cause
        if cause:
            assert key not in self.durable, f"what was durable is {cause}"
            self.store.abort(key, slot, "failed")
            self.store.set_stored(key, False)
        else:
            self.store.commit(key.group, slot)

    @rule(unit=units, at=st.floats(0, 1), bit=st.integers(0, 7))
    def flip_a_bit(self, unit: tuple[int, bytes], at: float, bit: int) -> None:
        key = self.key(unit)
        path = self.path(key)
        if path is not None and path.stat().st_size:
            damaged = bytearray(path.read_bytes())
            damaged[int(at * (len(damaged) - 1))] ^= 1 << bit
            path.write_bytes(damaged)
            self.durable.discard(key)

    @rule(unit=units, another=units)
    def replace_by_another(self, unit: tuple[int, bytes], another: tuple[int, bytes]) -> None:
        ours, theirs = self.path(self.key(unit)), self.path(self.key(another))
        if ours is not None and theirs is not None and ours != theirs:
            shutil.copyfile(theirs, ours)
            self.durable.discard(self.key(unit))

    @rule(unit=units)
    def remove_behind_its_back(self, unit: tuple[int, bytes]) -> None:
        path = self.path(self.key(unit))
        if path is not None:
            path.unlink()
            self.durable.discard(self.key(unit))

    @rule()
    def reopen(self) -> None:
        """With loads in flight, too: what they reserved dies with the engine."""
        self.open()

    @invariant()
    def what_is_ready_is_right(self) -> None:
        if not hasattr(self, "store"):
            return
        for unit in ((group, prefix) for group in SEEDS for prefix in PREFIXES):
            key = self.key(unit)
            slot = self.store.slot(key)
            if slot is not None:
                assert self.bytes_of(key, slot) == content(key)
            if key in self.durable:
                assert self.presence(key) != Presence.ABSENT
            expected = Presence.PENDING if key in self.loading else Presence.READY if slot is not None else None
            if expected is not None:
                assert self.presence(key) == expected


TestStoreLife = StoreLife.TestCase
TestStoreLife.settings = settings(
    max_examples=300, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
