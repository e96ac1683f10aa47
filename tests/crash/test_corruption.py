"""Whatever lies under an object's name, only the record that was written is ever read; the rest is a miss by a name."""

from __future__ import annotations

import os
import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.crash.records import NAMESPACE, key_of, object_path, outcome, payload_of, put
from ucmcache.store import record
from ucmcache.store.backend import Bucket
from ucmcache.store.backends.file import QUARANTINE_FILES, FileBackend
from ucmcache.store.record import HEADER_BYTES, RecordKey

SIZES = [1000, 70_001]  # written through the page cache; written around it, and not in whole pages
VICTIM, NEIGHBOURS = 1, range(2, 6)
MAGIC, VERSION = range(8), range(8, 10)  # offsets; see record.py
PAGE = 4096


def opened(root: Path, nbytes: int) -> Bucket:
    bucket = FileBackend(root).bucket(NAMESPACE, 0)
    for number in (VICTIM, *NEIGHBOURS):
        put(bucket, number, nbytes)
    return bucket


def quarantined(root: Path) -> list[Path]:
    return sorted(root.glob("ns-*/r*/quarantine/*"))


@contextmanager
def neighbours_unharmed(bucket: Bucket, nbytes: int) -> Iterator[None]:
    yield
    assert [outcome(bucket, number, nbytes) for number in NEIGHBOURS] == [""] * len(NEIGHBOURS)


def refused_once(root: Path, bucket: Bucket, nbytes: int, content: bytes) -> str:
    """The cause for which the victim, being `content`, is refused; then it is gone, and kept as it was found."""
    before = set(quarantined(root))
    cause = outcome(bucket, VICTIM, nbytes)
    assert cause not in ("", record.GONE)
    assert outcome(bucket, VICTIM, nbytes) == record.GONE and not bucket.contains(key_of(VICTIM).id)
    [kept] = set(quarantined(root)) - before
    assert kept.read_bytes() == content
    kept.unlink()
    return cause


def flip(path: Path, offset: int, bit: int) -> None:
    fd = os.open(path, os.O_RDWR)
    try:
        [byte] = os.pread(fd, 1, offset)
        os.pwrite(fd, bytes([byte ^ 1 << bit]), offset)
    finally:
        os.close(fd)


def cause_of_flip(offset: int) -> str:
    if offset in MAGIC:
        return "magic"
    if offset in VERSION:
        return "version"
    return "header" if offset < HEADER_BYTES else "checksum"


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_flipped_bit_anywhere_is_refused(tmp_path: Path, nbytes: int) -> None:
    bucket = opened(tmp_path, nbytes)
    path, end = object_path(tmp_path, key_of(VICTIM)), HEADER_BYTES + nbytes
    assert path.stat().st_size == end
    chance = random.Random(nbytes)
    edges = {edge + by for edge in range(0, end + PAGE, PAGE) for by in (-1, 0, 1) if 0 <= edge + by < end}
    drawn = chance.sample(range(HEADER_BYTES, end), 900)
    offsets = sorted({*range(HEADER_BYTES), *edges, *drawn, end - 1})  # fields and padding of the header: all of them
    assert len(offsets) >= 1000
    causes: Counter[str] = Counter()
    with neighbours_unharmed(bucket, nbytes):
        for offset in offsets:
            bit = chance.randrange(8)
            flip(path, offset, bit)
            cause = outcome(bucket, VICTIM, nbytes)
            assert cause == cause_of_flip(offset), f"bit {bit} of byte {offset}"
            causes[cause] += 1
            assert outcome(bucket, VICTIM, nbytes) == record.GONE and not path.exists()
            [kept] = quarantined(tmp_path)
            flip(kept, offset, bit)
            os.rename(kept, path)
    assert outcome(bucket, VICTIM, nbytes) == ""  # every flip was undone, so each was all that was wrong
    assert causes == Counter(map(cause_of_flip, offsets)) and set(causes) == {"magic", "version", "header", "checksum"}


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_file_of_another_length_is_refused(tmp_path: Path, nbytes: int) -> None:
    bucket = opened(tmp_path, nbytes)
    path, end = object_path(tmp_path, key_of(VICTIM)), HEADER_BYTES + nbytes
    whole = path.read_bytes()
    pages = [edge + by for edge in range(PAGE, end, PAGE) for by in (-1, 0, 1)]
    shorter = {
        0,
        1,
        8,
        HEADER_BYTES - 1,
        HEADER_BYTES,
        HEADER_BYTES + 1,
        *pages,
        end // 2,
        end - PAGE,
        end - 2,
        end - 1,
    }
    longer = {end + 1, end + 2, -(-end // PAGE) * PAGE, end + PAGE, 2 * end, end + HEADER_BYTES, 1 << 40}
    lengths = sorted(length for length in shorter if 0 <= length < end) + sorted(longer)
    with neighbours_unharmed(bucket, nbytes):
        for length in lengths:
            path.write_bytes(whole)
            os.truncate(path, length)  # longer ones end in a hole: zeros
            assert outcome(bucket, VICTIM, nbytes) == "length", length
            assert outcome(bucket, VICTIM, nbytes) == record.GONE
            [kept] = quarantined(tmp_path)
            assert kept.stat().st_size == length
            kept.unlink()
        for tail in (whole, b"\0", whole[:HEADER_BYTES]):
            path.write_bytes(whole + tail)
            assert refused_once(tmp_path, bucket, nbytes, whole + tail) == "length"


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_tail_that_became_zeros_is_refused(tmp_path: Path, nbytes: int) -> None:
    """The right length with nothing in it, as a power cut leaves files of which only the size was written."""
    bucket = opened(tmp_path, nbytes)
    path, end = object_path(tmp_path, key_of(VICTIM)), HEADER_BYTES + nbytes
    whole = path.read_bytes()
    causes: Counter[str] = Counter()
    cuts = [
        0,
        7,
        8,
        9,
        HEADER_BYTES - 17,
        HEADER_BYTES - 1,
        HEADER_BYTES,
        HEADER_BYTES + 1,
        HEADER_BYTES + nbytes // 2,
        end - 1,
    ]
    with neighbours_unharmed(bucket, nbytes):
        for cut in cuts:
            path.write_bytes(whole[:cut])
            os.truncate(path, end)
            causes[refused_once(tmp_path, bucket, nbytes, whole[:cut].ljust(end, b"\0"))] += 1
    # The magic ends in a zero byte, so that of 7 bytes is whole.
    assert causes == {"magic": 1, "version": 2, "header": 3, "checksum": 4}


@pytest.mark.parametrize("nbytes", SIZES)
def test_swapped_files_are_refused(tmp_path: Path, nbytes: int) -> None:
    bucket = opened(tmp_path, nbytes)
    put(bucket, 9, nbytes)
    first, second = object_path(tmp_path, key_of(VICTIM)), object_path(tmp_path, key_of(9))
    assert first.stat().st_size == second.stat().st_size
    with neighbours_unharmed(bucket, nbytes):
        os.rename(first, tmp_path / "aside")
        os.rename(second, first)
        os.rename(tmp_path / "aside", second)
        assert Counter(outcome(bucket, number, nbytes) for number in (VICTIM, 9)) == {"key": 2}
        assert [outcome(bucket, number, nbytes) for number in (VICTIM, 9)] == [record.GONE] * 2
    assert len(quarantined(tmp_path)) == 2


ELSEWHERE = {
    "another namespace": key_of(VICTIM, namespace=b"other namespace!"),
    "another rank": key_of(VICTIM, rank=1),
    "another group": key_of(VICTIM, group_seed=b"another group..!"),
    "another kind": replace(key_of(VICTIM), kind="snapshot"),
    "another prefix": key_of(77),
    "another parent": replace(key_of(VICTIM), parent=b"parent"),
    "another depth": replace(key_of(VICTIM), depth_tokens=32),
}


@pytest.mark.parametrize("by", ["copy", "hard link"])
@pytest.mark.parametrize("other", ELSEWHERE.values(), ids=ELSEWHERE)
def test_a_sound_record_of_another_place_is_refused(tmp_path: Path, other: RecordKey, by: str) -> None:
    """All of them hold the very payload that is asked for: who it is of must decide, not what it looks like."""
    nbytes = 5000
    bucket = opened(tmp_path, nbytes)
    path = object_path(tmp_path, key_of(VICTIM))
    path.unlink()
    # A place of its own, since in one bucket some of these keys would share the victim's id and so its file.
    elsewhere = FileBackend(tmp_path / "elsewhere").bucket(other.namespace, other.rank)
    record.write(elsewhere, other, payload_of(VICTIM, nbytes))
    source = object_path(tmp_path / "elsewhere", other)
    content = source.read_bytes()
    if by == "copy":
        path.write_bytes(content)
    else:
        os.link(source, path)
    with neighbours_unharmed(bucket, nbytes):
        assert refused_once(tmp_path, bucket, nbytes, content) == "key"
    assert record.read_into(elsewhere, other, memoryview(bytearray(nbytes))) and source.read_bytes() == content


class Bomb:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch '{self.mark}'",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_not_executed(tmp_path: Path, protocol: int) -> None:
    nbytes = 1000
    bucket = opened(tmp_path, nbytes)
    path, mark = object_path(tmp_path, key_of(VICTIM)), tmp_path / "executed"
    bomb = pickle.dumps(Bomb(mark), protocol)
    pickle.loads(bomb)
    assert mark.exists()  # it would
    mark.unlink()
    with neighbours_unharmed(bucket, nbytes):
        for content, cause in ((bomb, "length"), (bomb.ljust(HEADER_BYTES + nbytes, b"."), "magic")):
            path.write_bytes(content)
            assert refused_once(tmp_path, bucket, nbytes, content) == cause
    assert not mark.exists()


def plant_link_to_another(path: Path, root: Path) -> None:
    path.symlink_to(object_path(root, key_of(NEIGHBOURS[0])))


def plant_link_to_the_right_record(path: Path, root: Path) -> None:
    aside = root / "aside"
    bucket = FileBackend(aside).bucket(NAMESPACE, 0)
    put(bucket, VICTIM, 1000)
    path.symlink_to(object_path(aside, key_of(VICTIM)))


def plant_link_to_zeros(path: Path, root: Path) -> None:
    path.symlink_to("/dev/zero")


def plant_dangling_link(path: Path, root: Path) -> None:
    path.symlink_to(root / "nowhere")


def plant_link_to_itself(path: Path, root: Path) -> None:
    path.symlink_to(path)


def plant_fifo(path: Path, root: Path) -> None:
    os.mkfifo(path)


def plant_directory(path: Path, root: Path) -> None:
    path.mkdir()
    (path / path.name).write_bytes(b"inside")


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "plant",
    [
        plant_link_to_another,
        plant_link_to_the_right_record,
        plant_link_to_zeros,
        plant_dangling_link,
        plant_link_to_itself,
        plant_fifo,
        plant_directory,
    ],
)
def test_what_is_no_file_is_a_miss_and_left_alone(tmp_path: Path, plant: Callable[[Path, Path], None]) -> None:
    nbytes = 1000
    backend = FileBackend(tmp_path)
    bucket = opened(tmp_path, nbytes)
    path = object_path(tmp_path, key_of(VICTIM))
    path.unlink()
    before = backend.used_bytes()
    plant(path, tmp_path)
    planted = path.lstat()
    with neighbours_unharmed(bucket, nbytes):
        assert Counter(outcome(bucket, VICTIM, nbytes) for _ in range(3)) == {record.GONE: 3}
        assert not bucket.contains(key_of(VICTIM).id) and key_of(VICTIM).id not in set(bucket.scan())
        assert not bucket.quarantine(key_of(VICTIM).id) and not bucket.delete(key_of(VICTIM).id)
        assert backend.used_bytes() == before
    assert path.lstat() == planted and quarantined(tmp_path) == []


def test_damage_in_numbers_is_refused_one_by_one(tmp_path: Path) -> None:
    """Half of many objects go bad in many ways at once: each is counted once by its cause, the other half is read."""
    nbytes, total = 3000, 120
    bucket = FileBackend(tmp_path).bucket(NAMESPACE, 0)
    for number in range(total):
        put(bucket, number, nbytes)
    damages: dict[str, Callable[[Path], object]] = {
        "magic": lambda path: flip(path, 0, 0),
        "version": lambda path: flip(path, 8, 1),
        "header": lambda path: flip(path, 100, 7),  # padding behind a short prefix
        "checksum": lambda path: flip(path, HEADER_BYTES + nbytes - 1, 3),
        "length": lambda path: os.truncate(path, 0),
        record.GONE: os.unlink,
    }
    expected: Counter[str] = Counter()
    for number in range(0, total, 2):
        cause = list(damages)[number // 2 % len(damages)]
        damages[cause](object_path(tmp_path, key_of(number)))
        expected[cause] += 1
    expected[""] = total // 2
    assert Counter(outcome(bucket, number, nbytes) for number in range(total)) == expected
    again = Counter(outcome(bucket, number, nbytes) for number in range(total))
    assert again == {"": total // 2, record.GONE: total // 2}
    assert len(quarantined(tmp_path)) == QUARANTINE_FILES  # the latest only
