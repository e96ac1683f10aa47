"""A full root gives up its objects so that what is left can still be reached, and forgets nothing by being listed."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.files import NAMESPACE, Clock
from ucmcache.store import record
from ucmcache.store.backends.file import FileBackend
from ucmcache.store.backends.file_layout import walk_root
from ucmcache.store.backends.file_order import (
    Listed,
    Place,
    eviction_order,
    link_of,
    place_from,
    place_of,
    times_of,
    touched,
)

PLACES = st.builds(Place, st.integers(0, 10**9 - 2), st.integers(0, 2**28 - 1), st.booleans())


@given(PLACES, st.integers(0, 2**62), st.integers(0, 2**62))
def test_times_keep_the_place_and_the_use(place: Place, used_ns: int, later_ns: int) -> None:
    access_ns, modified_ns = times_of(used_ns, place)
    assert place_from(access_ns, modified_ns) == place
    assert access_ns // 10**9 == modified_ns // 10**9 == used_ns // 10**9
    again_ns = touched(later_ns, access_ns)
    assert place_from(again_ns, modified_ns) == place and again_ns // 10**9 == later_ns // 10**9


def prefix(chain: int, depth: int) -> bytes:
    """Hash of the first `depth` blocks of a chain; chains part after two blocks."""
    return hashlib.sha256(f"{chain if depth > 2 else 0}/{depth}".encode()).digest()[:10]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_what_is_left_can_be_reached(data: st.DataObject) -> None:
    chains = {
        c: data.draw(st.integers(1, 8), label=f"blocks of chain {c}") for c in range(data.draw(st.integers(1, 4)))
    }
    lost = data.draw(st.sets(st.tuples(st.integers(0, 3), st.integers(1, 8)), max_size=2), label="lost")
    blocks = {prefix(c, d): (c, d) for c, depth in chains.items() for d in range(1, depth + 1) if (c, d) not in lost}
    states = {prefix(c, d) for c, depth in chains.items() for d in range(1, depth + 1) if data.draw(st.booleans())}

    def used() -> int:
        return data.draw(st.integers(0, 600))

    objects = [
        Listed(p.hex(), "b", p, 1, used(), Place(d * 16, link_of(prefix(c, d - 1)) if d > 1 else 0))
        for p, (c, d) in blocks.items()
    ]
    depths = {prefix(c, d): d for c, depth in chains.items() for d in range(1, depth + 1)}
    objects += [
        Listed("s" + p.hex(), "b", p + b"s", 1, used(), Place(depths[p] * 16, link_of(p), True)) for p in states
    ]
    order = eviction_order(data.draw(st.permutations(objects)))
    assert sorted(order) == sorted(objects)

    chained = any(not one.place.is_state for one in objects)

    def all_reached(left: list[Listed]) -> bool:
        ends = {0}
        for one in sorted(left, key=lambda one: (one.place.depth_tokens, one.place.is_state)):
            if one.place.link not in ends:
                return False
            if not one.place.is_state:
                ends.add(link_of(one.id))
        return True

    # After the stranded, whatever the collector leaves is whole.
    whole = [gone for gone in range(len(order) + 1) if all_reached(order[gone:])]
    assert not chained or whole == list(range(whole[0], len(order) + 1))
    here = {link_of(one.id) for one in objects if not one.place.is_state} | {0}
    assert any(one.place.link not in here for one in objects) or not chained or whole[0] == 0


def test_the_least_recently_used_chain_goes_first() -> None:
    def chain(name: bytes, used_s: int) -> list[Listed]:
        heads = [name + bytes([d]) * 9 for d in range(5)]
        return [
            Listed(
                f"{name!r}{d}", "b", heads[d] + b"group1", 1, used_s, Place(d + 1, link_of(heads[d - 1]) if d else 0)
            )
            for d in range(5)
        ]

    order = eviction_order(chain(b"n", 1000) + chain(b"o", 100))
    assert [(one.id[:1], one.place.depth_tokens) for one in order] == [
        (name, depth) for name in (b"o", b"n") for depth in (5, 4, 3, 2, 1)
    ]


def test_records_are_placed_and_other_content_is_not(tmp_path: Path) -> None:
    clock = Clock()
    backend = FileBackend(tmp_path, clock_ns=clock)
    bucket = backend.bucket(NAMESPACE, 0)
    keys = [
        record.RecordKey(NAMESPACE, b"g" * 16, "block", b"first-prefix", b"", 16, 0),
        record.RecordKey(NAMESPACE, b"g" * 16, "block", b"second-prefix", b"first-prefix", 32, 0),
        record.RecordKey(NAMESPACE, b"s" * 16, "snapshot", b"second-prefix", b"first-prefix", 32, 0),
    ]
    for key in keys:
        record.write(bucket, key, b"payload")
    bucket.put(b"x" * 16, [os.urandom(400)])
    found = {file.listed().id: file.listed().place for file in walk_root(str(tmp_path))}
    assert found == {
        keys[0].id: Place(16, 0),
        keys[1].id: Place(32, link_of(b"first-prefix")),
        keys[2].id: Place(32, link_of(b"second-prefix"), True),
        b"x" * 16: Place(),
    }
    # Reading it, now and later, changes no place.
    payload = bytearray(7)
    for _ in range(3):
        clock.forward(100)
        assert record.read_into(bucket, keys[1], memoryview(payload))
        bucket.touch([keys[2].id])
    again = {file.listed().id: file.listed() for file in walk_root(str(tmp_path))}
    assert {id: one.place for id, one in again.items()} == found
    assert again[keys[1].id].used_s == again[keys[2].id].used_s == clock.now_ns // 10**9
    assert place_of([b""]) == Place()
