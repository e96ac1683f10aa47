"""A record is accepted only bit for bit, and every refusal names its cause."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from ucmcache.errors import BackendError, ContractError, RecordError
from ucmcache.keys import physical_id
from ucmcache.store import record
from ucmcache.store.backends.memory import MemoryBackend
from ucmcache.store.record import HEADER_BYTES, RecordKey, decode_header, encode_header, read_into, verify, write
from ucmcache.store.testing import FlakyBackend

KEY = RecordKey(b"n" * 16, b"g" * 16, "block", b"prefix", b"parent", 384, 1)
PAYLOAD = bytes(range(256)) * 3

keys = st.builds(
    RecordKey,
    namespace=st.binary(min_size=16, max_size=16),
    group_seed=st.binary(min_size=16, max_size=16),
    kind=st.sampled_from(["block", "snapshot"]),
    prefix=st.binary(min_size=1, max_size=64),
    parent=st.binary(max_size=64),
    depth_tokens=st.integers(0, 2**64 - 1),
    rank=st.integers(0, 2**32 - 1),
)


def cause_of(header: bytes, payload: bytes, key: RecordKey = KEY) -> str:
    with pytest.raises(RecordError) as caught:
        verify(header, key, payload)
    return caught.value.cause


def resealed(header: bytearray) -> bytes:
    """`header` with a checksum that holds again, as a foreign or hostile writer could make it."""
    body = bytes(header[:-16])
    return body + xxhash.xxh3_128_digest(body)


@settings(deadline=None)
@given(keys, st.binary(max_size=2000))
def test_round_trip(key: RecordKey, payload: bytes) -> None:
    header = encode_header(key, payload)
    assert len(header) == HEADER_BYTES
    assert decode_header(header).key == key
    verify(header, key, payload)
    bucket = MemoryBackend().bucket(key.namespace, key.rank)
    out = bytearray(len(payload))
    assert not read_into(bucket, key, memoryview(out))
    assert write(bucket, key, memoryview(payload)) == HEADER_BYTES + len(payload)
    assert read_into(bucket, key, memoryview(out))
    assert out == payload


def test_every_flipped_bit_of_the_header_is_refused() -> None:
    header = encode_header(KEY, PAYLOAD)
    causes = set()
    for bit in range(8 * HEADER_BYTES):
        bad = bytearray(header)
        bad[bit // 8] ^= 1 << bit % 8
        causes.add(cause_of(bytes(bad), PAYLOAD))
    assert causes == {"magic", "version", "header"}


@settings(max_examples=300, deadline=None)
@given(keys, st.binary(min_size=1, max_size=5000), st.data())
def test_any_flipped_bit_is_refused(key: RecordKey, payload: bytes, data: st.DataObject) -> None:
    stored = bytearray(encode_header(key, payload) + payload)
    bit = data.draw(st.integers(0, 8 * len(stored) - 1))
    stored[bit // 8] ^= 1 << bit % 8
    cause = cause_of(bytes(stored[:HEADER_BYTES]), bytes(stored[HEADER_BYTES:]), key)
    assert cause in ({"magic", "version", "header"} if bit < 8 * HEADER_BYTES else {"checksum"})


def test_every_truncation_is_refused_and_quarantined() -> None:
    stored = encode_header(KEY, PAYLOAD) + PAYLOAD
    for length in range(len(stored)):
        bucket = MemoryBackend().bucket(KEY.namespace, KEY.rank)
        bucket.put(KEY.id, [stored[:length]])
        with pytest.raises(RecordError) as caught:
            read_into(bucket, KEY, memoryview(bytearray(len(PAYLOAD))))
        assert caught.value.cause == "length"
        assert not bucket.contains(KEY.id)
    for length in range(HEADER_BYTES):
        assert cause_of(stored[:length], PAYLOAD) == "header"
    assert cause_of(stored[:HEADER_BYTES], PAYLOAD[:-1]) == "length"
    assert cause_of(stored[:HEADER_BYTES], PAYLOAD + b"\0") == "length"


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(KEY, namespace=b"m" * 16),
        dataclasses.replace(KEY, group_seed=b"h" * 16),
        dataclasses.replace(KEY, kind="snapshot"),
        dataclasses.replace(KEY, prefix=b"prefix\0"),
        dataclasses.replace(KEY, parent=b""),
        dataclasses.replace(KEY, depth_tokens=385),
        dataclasses.replace(KEY, rank=0),
    ],
)
def test_a_swapped_object_is_refused_by_its_key(other: RecordKey) -> None:
    bucket = MemoryBackend().bucket(KEY.namespace, KEY.rank)
    bucket.put(KEY.id, [encode_header(other, PAYLOAD), PAYLOAD])
    with pytest.raises(RecordError) as caught:
        read_into(bucket, KEY, memoryview(bytearray(len(PAYLOAD))))
    assert caught.value.cause == "key"
    assert not bucket.contains(KEY.id)


def test_swapped_payloads_are_refused() -> None:
    assert cause_of(encode_header(KEY, PAYLOAD), PAYLOAD[::-1]) == "checksum"


@pytest.mark.parametrize("offset", [36, 37, 38, 39, 10, *range(212, 240)])
def test_a_sealed_header_must_still_be_canonical(offset: int) -> None:
    # Kind, the two hash lengths, zero bytes and the header length: a checksum that holds does not make them right.
    header = bytearray(encode_header(KEY, PAYLOAD))
    header[offset] = 0xFF
    assert cause_of(resealed(header), PAYLOAD) == "header"


def test_hidden_bytes_behind_a_short_prefix_are_refused() -> None:
    header = bytearray(encode_header(KEY, PAYLOAD))
    header[84 + len(KEY.prefix)] = 1
    assert cause_of(resealed(header), PAYLOAD) == "header"


def test_a_prefix_of_no_bytes_is_refused() -> None:
    header = bytearray(encode_header(KEY, PAYLOAD))
    header[37] = 0
    assert cause_of(resealed(header), PAYLOAD) == "header"


def test_another_format_version_says_so() -> None:
    header = bytearray(encode_header(KEY, PAYLOAD))
    header[8] = record.FORMAT_VERSION + 1
    assert cause_of(resealed(header), PAYLOAD) == "version"
    assert cause_of(bytes(HEADER_BYTES), PAYLOAD) == "magic"


@pytest.mark.parametrize(
    "fields",
    [
        {"namespace": b""},
        {"group_seed": b"g" * 17},
        {"kind": "chain"},
        {"prefix": b""},
        {"prefix": b"p" * 65},
        {"parent": b"p" * 65},
        {"depth_tokens": -1},
        {"depth_tokens": 2**64},
        {"rank": -1},
        {"rank": 2**32},
    ],
)
def test_a_key_that_does_not_fit_is_no_key(fields: dict[str, Any]) -> None:
    with pytest.raises(ContractError):
        dataclasses.replace(KEY, **fields)


def test_the_id_is_the_physical_id() -> None:
    assert KEY.id == physical_id(KEY.namespace, KEY.group_seed, KEY.prefix)
    assert dataclasses.replace(KEY, rank=7).id == KEY.id


def test_the_layout_does_not_drift() -> None:
    # Records outlive the process: a change here needs a new FORMAT_VERSION.
    assert xxhash.xxh3_128_hexdigest(encode_header(KEY, PAYLOAD)) == "cdbe2fdef381a8df2c412765b817ad3f"


@pytest.mark.parametrize("told", [[], [1], [HEADER_BYTES - 1, 1, 1], [HEADER_BYTES, 3], [HEADER_BYTES + len(PAYLOAD)]])
@pytest.mark.parametrize("damaged", [False, True])
def test_a_payload_is_checked_whatever_the_backend_tells_meanwhile(told: list[int], damaged: bool) -> None:
    backend = MemoryBackend()
    bucket = backend.bucket(KEY.namespace, KEY.rank)
    write(bucket, KEY, PAYLOAD)
    payload = memoryview(bytearray(len(PAYLOAD)))

    class Telling:
        """Fills everything, then tells; a damaged one changes a byte before anything is told of."""

        def __getattr__(self, name: str) -> object:
            return getattr(bucket, name)

        def get_into(self, id: bytes, parts: Sequence[memoryview], filled: Callable[[int], None]) -> bool:
            assert bucket.get_into(id, parts)
            if damaged:
                payload[-1] ^= 1
            for nbytes in told:
                filled(nbytes)
            return True

    if damaged:
        with pytest.raises(RecordError) as caught:
            read_into(Telling(), KEY, payload)  # type: ignore[arg-type]
        assert caught.value.cause == "checksum"
        assert not bucket.contains(KEY.id)
    else:
        assert read_into(Telling(), KEY, payload)  # type: ignore[arg-type]
        assert bytes(payload) == PAYLOAD


def test_a_failing_quarantine_hides_nothing() -> None:
    inner = MemoryBackend()
    inner.bucket(KEY.namespace, KEY.rank).put(KEY.id, [b"junk"])
    bucket = FlakyBackend(inner, lambda operation: operation == "quarantine").bucket(KEY.namespace, KEY.rank)
    with pytest.raises(RecordError) as caught:
        read_into(bucket, KEY, memoryview(bytearray(4)))
    assert caught.value.cause == "length"
    assert "quarantine" in caught.value.__notes__[0]


def test_an_io_error_quarantines_nothing() -> None:
    inner = MemoryBackend()
    plain = inner.bucket(KEY.namespace, KEY.rank)
    write(plain, KEY, PAYLOAD)
    bucket = FlakyBackend(inner, lambda operation: operation == "get_into").bucket(KEY.namespace, KEY.rank)
    with pytest.raises(BackendError):
        read_into(bucket, KEY, memoryview(bytearray(len(PAYLOAD))))
    assert plain.contains(KEY.id)
