"""Which objects go first when a root is full: what is of no use any more, then what was not used for the longest time.

A chain whose beginning is gone is worth nothing, so a listing must tell where each object belongs without opening it.
That is kept in the digits below one second of the file's two times, which a listing reads anyway: the depth in those of
the modification, and of what the object continues 28 bits of its prefix in those of the access. Times that something
else has changed cost order, never correctness.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ucmcache.store import record
from ucmcache.store.backend import Buffer
from ucmcache.store.backends import byte_views

SECOND_NS = 10**9
# Objects of one prompt are written and read within about this time, and are then told apart by depth.
_SAME_USE_S = 60
_LINK_BITS = 28
_DEEPEST_TOKENS = SECOND_NS - 2


class Place(NamedTuple):
    """Where an object is in its chain. `depth_tokens` 0 is unknown, `link` 0 is nothing before it."""

    depth_tokens: int = 0
    link: int = 0  # 28 bits of the prefix that it continues; for a state, of the one that it is the state of
    is_state: bool = False


class Listed(NamedTuple):
    """One object as a listing found it."""

    path: str
    bucket: str
    id: bytes
    stored_bytes: int
    used_s: int  # last read or write, as far as it is kept
    place: Place


def link_of(prefix: bytes) -> int:
    """28 bits, none of them 0 at once, that stand for a prefix, or for an id, which begins as its prefix does."""
    return int.from_bytes(prefix[:4].ljust(4, b"\0"), "big") >> (32 - _LINK_BITS) or 1


def place_of(parts: Sequence[Buffer]) -> Place:
    """The place of an object that begins with a record's header; an unknown one for any other."""
    views = byte_views(parts)
    if not views or len(views[0]) < record.HEADER_BYTES:
        return Place()
    claim = record.claim_of(views[0])
    if claim is None:
        return Place()
    before = claim.prefix if claim.is_state else claim.parent
    link = link_of(before) if before else 0
    return Place(min(claim.depth_tokens, _DEEPEST_TOKENS), link, claim.is_state)


def times_of(used_ns: int, place: Place) -> tuple[int, int]:
    """Access and modification time, in ns, of a file that is used now."""
    second = used_ns // SECOND_NS * SECOND_NS
    return second + (place.link << 1 | place.is_state), second + place.depth_tokens


def touched(used_ns: int, access_ns: int) -> int:
    """The access time of a file that is used again."""
    return used_ns // SECOND_NS * SECOND_NS + access_ns % SECOND_NS


def place_from(access_ns: int, modified_ns: int) -> Place:
    """What the times of a file say of its place."""
    digits = access_ns % SECOND_NS
    return Place(modified_ns % SECOND_NS, digits >> 1 & (1 << _LINK_BITS) - 1, bool(digits & 1))


def eviction_order(objects: Sequence[Listed]) -> list[Listed]:
    """All objects, what to remove first in front.

    First the stranded: something between them and the beginning is missing in their bucket. Then by last use, where an
    object counts as used when something that continues it was; in one minute from the deepest, so that what is left can
    still be reached.
    """
    by_depth = sorted(objects, key=lambda one: (one.place.depth_tokens, one.place.is_state))
    chained = {one.bucket for one in objects if not one.place.is_state}
    reached: set[tuple[str, int]] = set()  # where chains end that begin at the beginning
    stranded = []
    for one in by_depth:
        # States of a model without any chain need none.
        apart = one.place.link > 0 and one.bucket in chained and (one.bucket, one.place.link) not in reached
        stranded.append(apart)
        if not one.place.is_state and not apart:
            reached.add((one.bucket, link_of(one.id)))
    used: dict[tuple[str, int], int] = {}  # by where they begin: the last use of objects and of all that continues them
    ranked = []
    for one, apart in zip(reversed(by_depth), reversed(stranded), strict=True):
        begins, ends = (one.bucket, one.place.link), (one.bucket, link_of(one.id))
        used_s = one.used_s if one.place.is_state else max(one.used_s, used.get(ends, 0))
        used[begins] = max(used.get(begins, 0), used_s)
        # The id last: the ranks of one engine then give up the parts of the same units.
        rank = (not apart, used_s // _SAME_USE_S, -one.place.depth_tokens, not one.place.is_state, used_s, one.id)
        ranked.append((rank, one))
    ranked.sort(key=lambda pair: pair[0])
    return [one for _, one in ranked]
