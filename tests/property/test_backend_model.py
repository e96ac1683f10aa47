"""Whatever is done to them, both backends hold what a dict holds."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ucmcache.errors import RecordError
from ucmcache.store.backend import Backend
from ucmcache.store.backends.file import FileBackend
from ucmcache.store.backends.memory import MemoryBackend

NAMESPACES = [b"\x00" * 16, b"\xff" * 16]
# Three ids of one two-hex folder and one of another.
IDS = [bytes(15) + bytes([last]) for last in (0, 1, 2)] + [b"\xab" * 16]

names = st.tuples(st.sampled_from(NAMESPACES), st.sampled_from([0, 1]))
ids = st.sampled_from(IDS)
parts_lists = st.lists(st.binary(max_size=300), max_size=4)


class BackendModel(RuleBasedStateMachine):
    """Every rule does one thing to a dict and to both backends, and compares."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="ucmcache-model-"))
        self.file: Backend = FileBackend(self.root)
        self.memory: Backend = MemoryBackend()
        self.objects: dict[tuple[bytes, int], dict[bytes, bytes]] = {}
        self.described: dict[bytes, dict[str, str]] = {}

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    @property
    def backends(self) -> tuple[Backend, Backend]:
        return self.file, self.memory

    @rule(name=names, id=ids, parts=parts_lists)
    def put(self, name: tuple[bytes, int], id: bytes, parts: list[bytes]) -> None:
        for backend in self.backends:
            backend.bucket(*name).put(id, parts)
        self.objects.setdefault(name, {})[id] = b"".join(parts)

    @rule(name=names, id=ids, cut=st.floats(0, 1))
    def get(self, name: tuple[bytes, int], id: bytes, cut: float) -> None:
        wanted = self.objects.get(name, {}).get(id)
        for backend in self.backends:
            out = bytearray(len(wanted or b""))
            at = int(cut * len(out))
            found = backend.bucket(*name).get_into(id, [memoryview(out)[:at], memoryview(out)[at:]])
            assert found == (wanted is not None)
            assert bytes(out) == (wanted or b"")

    @rule(name=names, id=ids, more=st.integers(1, 10))
    def get_another_length(self, name: tuple[bytes, int], id: bytes, more: int) -> None:
        wanted = self.objects.get(name, {}).get(id)
        for backend in self.backends:
            out = memoryview(bytearray(len(wanted or b"") + more))
            if wanted is None:
                assert not backend.bucket(*name).get_into(id, [out])
            else:
                with pytest.raises(RecordError):
                    backend.bucket(*name).get_into(id, [out])

    @rule(name=names, id=ids)
    def contains(self, name: tuple[bytes, int], id: bytes) -> None:
        for backend in self.backends:
            assert backend.bucket(*name).contains(id) == (id in self.objects.get(name, {}))

    @rule(name=names, id=ids)
    def delete(self, name: tuple[bytes, int], id: bytes) -> None:
        there = self.objects.get(name, {}).pop(id, None) is not None
        assert [backend.bucket(*name).delete(id) for backend in self.backends] == [there, there]

    @rule(name=names, id=ids)
    def quarantine(self, name: tuple[bytes, int], id: bytes) -> None:
        there = self.objects.get(name, {}).pop(id, None) is not None
        assert [backend.bucket(*name).quarantine(id) for backend in self.backends] == [there, there]

    @rule(name=names)
    def clear(self, name: tuple[bytes, int]) -> None:
        count = len(self.objects.pop(name, {}))
        assert [backend.bucket(*name).clear() for backend in self.backends] == [count, count]

    @rule(namespace=st.sampled_from(NAMESPACES), fields=st.dictionaries(st.text(max_size=5), st.text(max_size=5)))
    def describe(self, namespace: bytes, fields: dict[str, str]) -> None:
        for backend in self.backends:
            backend.describe(namespace, fields)
        self.described[namespace] = fields

    @rule(close=st.booleans())
    def reopen(self, close: bool) -> None:
        if close:
            self.file.close()
        self.file = FileBackend(self.root)

    @invariant()
    def scans_list_what_is_there(self) -> None:
        for namespace in NAMESPACES:
            for rank in (0, 1):
                held = self.objects.get((namespace, rank), {})
                wanted = sorted(held)
                for backend in self.backends:
                    assert sorted(backend.bucket(namespace, rank).scan()) == wanted

    @invariant()
    def descriptions_are_kept(self) -> None:
        for backend in self.backends:
            assert backend.namespaces() == self.described

    @invariant()
    def nothing_unfinished_is_left(self) -> None:
        assert list(self.root.glob("ns-*/r*/tmp/*")) == []

    @invariant()
    def memory_accounts_for_every_byte(self) -> None:
        held = sum(len(content) for bucket in self.objects.values() for content in bucket.values())
        assert self.memory.used_bytes() == held


TestBackendModel = BackendModel.TestCase
TestBackendModel.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
