"""Identity: what must be equal for stored bytes to answer for a prefix.

Inside one engine a unit is named by what the engine already computed: its KV cache group and the engine's hash of the
whole prefix. Only where bytes leave for a backend is the 16-byte physical id cut from it. The id is an index; the
record behind it embeds the full key, which is checked when the bytes come back (requirements C6).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import xxhash

PHYSICAL_ID_BYTES = 16
_HEAD_BYTES = 10
_PARENT_BYTES, _LENGTH_BYTES, _EXACT_BYTES = 4, 2, 32
_EXACT = 1 << 16  # from a group to the one that stands for it at positions inside a block


class BlockKey(NamedTuple):
    """One block of one chain group: `prefix` is the engine's hash of all tokens up to the block's end."""

    group: int
    prefix: bytes
    depth_tokens: int
    parent: bytes = b""


class SnapshotKey(NamedTuple):
    """The recurrent state of one group after exactly `depth_tokens` tokens of the prefix hashed as `prefix`."""

    group: int
    prefix: bytes
    depth_tokens: int
    parent: bytes = b""


UnitKey = BlockKey | SnapshotKey


@dataclass(frozen=True)
class Namespace:
    """Everything that shapes bytes or rights, field by field; two namespaces share data only if all fields are equal.

    `fields` maps a field's name to its canonical text. The digest is independent of their order and of Python's own
    hash seed.
    """

    fields: Mapping[str, str]

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that stand for all fields."""
        canonical = json.dumps(dict(self.fields), sort_keys=True, ensure_ascii=True, separators=(",", ":"))
        return xxhash.xxh3_128_digest(canonical.encode())

    def differing(self, other: Mapping[str, str]) -> list[str]:
        """Names of the fields in which `other` is not equal to this namespace, sorted."""
        names = {*self.fields, *other}
        return sorted(name for name in names if self.fields.get(name) != other.get(name))


def exact_group(group: int) -> int:
    """The group under which a group's units at positions off the grid are kept: its states, or its partial blocks."""
    return group + _EXACT


def engine_group(group: int) -> int:
    """The KV cache group of the engine that a unit's group stands for."""
    return group % _EXACT


def is_exact(group: int) -> bool:
    """Whether a group is one for positions off the grid."""
    return group >= _EXACT


def exact_seed(seed: bytes) -> bytes:
    """The seed of the exact group of a group."""
    return xxhash.xxh3_128_digest(seed + b"exact")


def exact_prefix(parent: bytes, tail: bytes, tail_tokens: int) -> bytes:
    """32 bytes for a prefix that the engine has no hash of: `tail_tokens` more than the prefix hashed as `parent`.

    `tail` is everything that tells the tail from another one. As a hash of an id's first 10 bytes finds a block, so
    these find, from a listing alone, what there is behind a parent: its head, the tail's length, the digest's head.
    """
    digest = hashlib.sha256(len(parent).to_bytes(1, "little") + parent + tail).digest()
    return parent_head(parent) + tail_tokens.to_bytes(_LENGTH_BYTES, "little") + digest[: _EXACT_BYTES - 6]


def parent_head(parent: bytes) -> bytes:
    """What an exact prefix tells of its parent."""
    return parent[:_PARENT_BYTES].ljust(_PARENT_BYTES, b"\0")


def exact_prefix_head(prefix: bytes) -> bytes:
    """What an id tells of an exact prefix; of what an id tells, the same."""
    return prefix[:_HEAD_BYTES].ljust(_HEAD_BYTES, b"\0")


def exact_parts(head: bytes) -> tuple[bytes, int]:
    """The head of the parent of an exact prefix, and the tail's tokens."""
    return head[:_PARENT_BYTES], int.from_bytes(head[_PARENT_BYTES : _PARENT_BYTES + _LENGTH_BYTES], "little")


def physical_id(namespace: bytes, group_seed: bytes, prefix: bytes) -> bytes:
    """16-byte id of one unit in a backend: the head of its prefix hash, and 6 bytes that name namespace and group.

    Nothing is hashed per unit, and an id tells its group and the head of its prefix, so what a scan finds is looked up
    by prefix. Two prefixes that share 80 bits share an id: the later one replaces the other, which is then a miss.
    """
    return id_of(prefix, group_tag(namespace, group_seed))


def id_of(prefix: bytes, tag: bytes) -> bytes:
    """The physical id of a prefix in the group of a tag."""
    return prefix[:_HEAD_BYTES].ljust(_HEAD_BYTES, b"\0") + tag


def group_tag(namespace: bytes, group_seed: bytes) -> bytes:
    """The last 6 bytes of all ids of one group; `namespace` and `group_seed` are 16 bytes each."""
    return xxhash.xxh3_128_digest(namespace + group_seed)[: PHYSICAL_ID_BYTES - _HEAD_BYTES]


def split_id(id: bytes) -> tuple[bytes, bytes]:
    """Head of the prefix hash, as `heads` gives it, and group tag of a physical id."""
    return id[:_HEAD_BYTES].rstrip(b"\0"), id[_HEAD_BYTES:]


def heads(prefixes: Sequence[bytes]) -> list[bytes]:
    """What ids say of their prefixes: the first 10 bytes of each, without zeros at the end."""
    # numpy's byte strings are cut and stripped in C: a prompt may have tens of thousands.
    found: list[bytes] = np.array(prefixes, dtype=f"S{_HEAD_BYTES}").tolist()
    return found
