"""Identity: what must be equal for stored bytes to answer for a prefix.

Inside one engine a unit is named by what the engine already computed: its KV cache group and the engine's hash of the
whole prefix. Only where bytes leave for a backend is the 16-byte physical id derived from it. The id is an index; the
record behind it embeds the full key, which is checked when the bytes come back (requirements C6).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import xxhash

PHYSICAL_ID_BYTES = 16


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


def physical_id(namespace: bytes, group_seed: bytes, prefix: bytes) -> bytes:
    """16-byte id of one unit in a backend.

    `namespace` and `group_seed` are 16 bytes each, so the concatenation is injective for any prefix hash length.
    """
    return xxhash.xxh3_128_digest(namespace + group_seed + prefix)
