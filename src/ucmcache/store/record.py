"""The header in front of every stored payload, and the check that bytes are what was asked for.

A backend's id is an index only: two keys may meet in one id, files may be swapped, disks flip bits. So a record embeds
its whole key and two checksums, and only what `verify` accepts is ever promised to the engine (requirements C4, C6).

Layout, little-endian, HEADER_BYTES in all, the payload right behind it:
magic 8 | format version 2 | header bytes 2 | payload bytes 8 | payload xxh3_128 16 | kind 1 | prefix bytes 1 |
parent bytes 1 | zero 1 | rank 4 | depth tokens 8 | namespace 16 | group seed 16 | prefix 64 | parent 64 | zero 3868 |
xxh3_128 of all bytes before 16

A whole page, so that a payload of whole pages starts and ends with one, too: it is written straight from its slot, past
the page cache, and takes no more pages of a disk than it would behind a shorter header.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from ucmcache.errors import BackendError, ContractError, RecordError
from ucmcache.keys import physical_id
from ucmcache.store.backend import Bucket, Buffer

HEADER_BYTES = 4096
FORMAT_VERSION = 2

_MAGIC = b"ucmkv\r\n\x00"  # a transfer that rewrites line ends or stops at a zero byte does not get past it
_KINDS = ("block", "snapshot")
_HASH_BYTES = 64
_SEED_BYTES = 16
_FIELDS = struct.Struct("<8sHHQ16sBBBxIQ16s16s64s64s3868x")


# Why a stored unit is not to be had, and will not be until somebody stores it anew; other failures may pass.
GONE = "gone"
FOR_GOOD = frozenset({GONE, "header", "magic", "version", "key", "length", "checksum"})


@dataclass(frozen=True, slots=True)
class RecordKey:
    """Everything that one stored payload answers for.

    Sizes: `namespace` and `group_seed` 16 bytes, `prefix` 1..64, `parent` 0..64. Raises ContractError for any other.
    """

    namespace: bytes
    group_seed: bytes
    kind: str  # "block" or "snapshot"
    prefix: bytes  # the engine's hash of all tokens up to depth_tokens
    parent: bytes
    depth_tokens: int
    rank: int

    def __post_init__(self) -> None:
        if len(self.namespace) != _SEED_BYTES or len(self.group_seed) != _SEED_BYTES:
            raise ContractError(f"namespace and group seed of a record are {_SEED_BYTES} bytes each: {self}")
        if self.kind not in _KINDS:
            raise ContractError(f"a record's kind is one of {_KINDS}: {self}")
        if not 1 <= len(self.prefix) <= _HASH_BYTES or len(self.parent) > _HASH_BYTES:
            raise ContractError(f"a record's prefix is 1..{_HASH_BYTES} bytes, its parent 0..{_HASH_BYTES}: {self}")
        if not (0 <= self.depth_tokens < 1 << 64 and 0 <= self.rank < 1 << 32):
            raise ContractError(f"a record's depth fits 64 bits and its rank 32, neither is negative: {self}")

    @property
    def id(self) -> bytes:
        """16-byte id in a bucket; the rank is not part of it, since each rank has a bucket of its own."""
        return physical_id(self.namespace, self.group_seed, self.prefix)


class Header(NamedTuple):
    """What a header says of the payload behind it."""

    key: RecordKey
    payload_bytes: int
    payload_checksum: bytes


def encode_header(key: RecordKey, payload: Buffer) -> bytes:
    """The HEADER_BYTES that go in front of `payload` (contiguous, any item format)."""
    return _pack(Header(key, memoryview(payload).nbytes, xxhash.xxh3_128_digest(payload)))


def decode_header(header: Buffer) -> Header:
    """What `header` says, once it is proved to be one. Raises RecordError "magic", "version" or "header"."""
    raw = bytes(header)
    if len(raw) != HEADER_BYTES:
        raise RecordError("header", f"{len(raw)} bytes instead of {HEADER_BYTES}")
    magic, version, _, payload_bytes, checksum, kind, prefix_bytes, parent_bytes, rank, depth, *rest = (
        _FIELDS.unpack_from(raw)
    )
    if magic != _MAGIC:
        raise RecordError("magic", f"starts with {magic!r}")
    if version != FORMAT_VERSION:
        raise RecordError("version", f"format version {version}, this is {FORMAT_VERSION}")
    namespace, group_seed, prefix, parent = rest
    try:
        kind_name = _KINDS[kind] if kind < len(_KINDS) else f"code {kind}"
        key = RecordKey(namespace, group_seed, kind_name, prefix[:prefix_bytes], parent[:parent_bytes], depth, rank)
    except ContractError as error:
        raise RecordError("header", f"no valid key: {error}") from error
    decoded = Header(key, payload_bytes, checksum)
    # Written anew from what was understood: covers the checksum, all padding and every length at once.
    if _pack(decoded) != raw:
        raise RecordError("header", "checksum, padding or a length does not hold")
    return decoded


class Claim(NamedTuple):
    """What the bytes of a header claim of its place in a chain, unproved."""

    is_state: bool
    prefix: bytes
    parent: bytes
    depth_tokens: int


def claim_of(header: Buffer) -> Claim | None:
    """What HEADER_BYTES claim, unproved; None for what is no header of ours."""
    magic, version, _, _, _, kind, prefix_bytes, parent_bytes, _, depth, _, _, prefix, parent = _FIELDS.unpack_from(
        header
    )
    if magic != _MAGIC or version != FORMAT_VERSION:
        return None
    return Claim(kind == _KINDS.index("snapshot"), prefix[:prefix_bytes], parent[:parent_bytes], depth)


def verify(header: Buffer, key: RecordKey, payload: Buffer) -> None:
    """Return only if `header` and `payload` are, bit for bit, the record written for `key`.

    Raises RecordError with one of these causes: "magic" (no record), "version" (another format), "header" (damaged
    header: size, checksum or padding), "key" (a sound header of another key, for example swapped files), "length"
    (payload of another length), "checksum" (damaged payload).
    """
    _check(header, Header(key, memoryview(payload).nbytes, xxhash.xxh3_128_digest(payload)))


class _Checksum:
    """The checksum of a payload that comes piece by piece, behind its header."""

    def __init__(self, payload: memoryview) -> None:
        self._payload = payload.cast("B") if payload.nbytes else payload
        self._hash = xxhash.xxh3_128()
        self._at = -HEADER_BYTES

    def filled(self, nbytes: int) -> None:
        """So many more bytes of header and payload are in place."""
        begin, self._at = max(self._at, 0), self._at + nbytes
        if self._at > begin:
            self._hash.update(self._payload[begin : self._at])

    def digest(self) -> bytes:
        """The checksum, once all is in place."""
        self.filled(self._payload.nbytes - self._at)
        return self._hash.digest()


def write(bucket: Bucket, key: RecordKey, payload: Buffer) -> int:
    """Store `payload` as the record of `key`; returns the bytes it takes in the backend. Raises BackendError.

    Guaranteed by the caller: `payload` does not change until this returns.
    """
    return bucket.put(key.id, [encode_header(key, payload), payload])


def read_into(bucket: Bucket, key: RecordKey, payload: memoryview) -> bool:
    """Fill `payload` with the verified payload of `key`; False if the bucket has no such object.

    Raises RecordError (causes as in `verify`) after the object was quarantined, BackendError for I/O. `payload` holds
    anything unless True was returned.
    """
    header = bytearray(HEADER_BYTES)
    checksum = _Checksum(payload)
    try:
        if not bucket.get_into(key.id, [memoryview(header), payload], checksum.filled):
            return False
        _check(header, Header(key, payload.nbytes, checksum.digest()))
    except RecordError as error:
        try:
            bucket.quarantine(key.id)
        except BackendError as failure:
            # What the bytes proved to be matters more to the caller than where they lie now.
            error.add_note(f"and it could not be quarantined: {failure}")
        raise
    return True


def _check(header: Buffer, wanted: Header) -> None:
    """Return only if `header` is that of `wanted`, whose checksum is that of the bytes which are there."""
    # There is one way to write a header, so one that is right needs no reading.
    if header == _pack(wanted):
        return
    found = decode_header(header)
    if found.key != wanted.key:
        raise RecordError("key", f"holds {found.key}, asked for {wanted.key}")
    if found.payload_bytes != wanted.payload_bytes:
        raise RecordError("length", f"payload of {found.payload_bytes} bytes, asked for {wanted.payload_bytes}")
    raise RecordError("checksum", f"payload of {wanted.key}")


def _pack(header: Header) -> bytes:
    key = header.key
    fields = _FIELDS.pack(
        _MAGIC,
        FORMAT_VERSION,
        HEADER_BYTES,
        header.payload_bytes,
        header.payload_checksum,
        _KINDS.index(key.kind),
        len(key.prefix),
        len(key.parent),
        key.rank,
        key.depth_tokens,
        key.namespace,
        key.group_seed,
        key.prefix,
        key.parent,
    )
    return fields + xxhash.xxh3_128_digest(fields)
