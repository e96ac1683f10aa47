"""Both backends keep the protocol's promises; the file backend also against what a disk and other processes can do."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import socket
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.unit.files import ID, NAMESPACE, Clock, files_below, get, number_id, object_path
from ucmcache.errors import BackendError, ConfigError, ContractError, RecordError
from ucmcache.store.backend import Backend, open_backend
from ucmcache.store.backends.file import QUARANTINE_FILES, FileBackend
from ucmcache.store.backends.memory import MemoryBackend
from ucmcache.store.record import HEADER_BYTES, RecordKey, read_into, write
from ucmcache.store.testing import BackendContract, FlakyBackend, SlowBackend


class TestMemoryContract(BackendContract):
    def make(self, tmp_path: Path) -> Backend:
        return MemoryBackend()


class TestBoundedMemoryContract(BackendContract):
    def make(self, tmp_path: Path) -> Backend:
        return MemoryBackend(16 << 20)


class TestFileContract(BackendContract):
    def make(self, tmp_path: Path) -> Backend:
        return FileBackend(tmp_path / "root")

    def reopen(self, tmp_path: Path) -> Backend | None:
        return self.make(tmp_path)


class TestBoundedFileContract(TestFileContract):
    def make(self, tmp_path: Path) -> Backend:
        return FileBackend(tmp_path / "root", 16 << 20)


class TestFileOnDiskContract(TestFileContract):
    def make(self, tmp_path: Path) -> Backend:
        return FileBackend(tmp_path / "root", fsync=True)


class TestWrappedContract(BackendContract):
    def make(self, tmp_path: Path) -> Backend:
        return SlowBackend(FlakyBackend(MemoryBackend(), lambda operation: False), 0.0)


# -- wrappers ---------------------------------------------------------------------------------------------------------


def test_flaky_backend_fails_where_told(tmp_path: Path) -> None:
    failing: set[str] = set()
    backend = FlakyBackend(MemoryBackend(), failing.__contains__)
    bucket = backend.bucket(NAMESPACE, 0)
    calls: dict[str, Callable[[], object]] = {
        "put": lambda: bucket.put(ID, [b"x"]),
        "get_into": lambda: get(bucket, ID, 1),
        "contains": lambda: bucket.contains(ID),
        "touch": lambda: bucket.touch([ID]),
        "scan": lambda: list(bucket.scan()),
        "quarantine": lambda: bucket.quarantine(ID),
        "delete": lambda: bucket.delete(ID),
        "clear": bucket.clear,
        "bucket": lambda: backend.bucket(NAMESPACE, 0),
        "describe": lambda: backend.describe(NAMESPACE, {}),
        "namespaces": backend.namespaces,
        "used_bytes": backend.used_bytes,
        "close": backend.close,
    }
    for name, call in calls.items():
        failing.add(name)
        with pytest.raises(BackendError, match=name):
            call()
        failing.clear()
        call()


def test_slow_backend_waits_before_every_operation() -> None:
    waits: list[float] = []
    backend = SlowBackend(MemoryBackend(), 1.5, waits.append)
    bucket = backend.bucket(NAMESPACE, 0)
    assert waits == []
    bucket.put(ID, [b"x"])
    assert get(bucket, ID, 1) == b"x"
    assert waits == [1.5, 1.5]


# -- memory -----------------------------------------------------------------------------------------------------------


def test_memory_evicts_the_least_recently_used() -> None:
    backend = MemoryBackend(100)
    first, second = backend.bucket(NAMESPACE, 0), backend.bucket(NAMESPACE, 1)
    first.put(number_id(0), [bytes(40)])
    second.put(number_id(1), [bytes(40)])
    assert get(first, number_id(0), 40) is not None
    second.put(number_id(2), [bytes(40)])
    assert first.contains(number_id(0)) and second.contains(number_id(2)) and not second.contains(number_id(1))
    assert backend.used_bytes() == 80
    with pytest.raises(BackendError, match="does not fit"):
        first.put(number_id(3), [bytes(101)])
    assert backend.used_bytes() == 80


# -- choosing ---------------------------------------------------------------------------------------------------------


def test_urls_that_name_a_directory(tmp_path: Path) -> None:
    backend = open_backend(f"file://{tmp_path}/with%20space%3F%ff")
    assert isinstance(backend, FileBackend)
    assert os.fsencode(backend.root) == os.fsencode(tmp_path) + b"/with space?\xff"
    assert isinstance(open_backend("memory:", 10), MemoryBackend)
    assert FileBackend.from_url("file:/data/kv/").root == "/data/kv"


@pytest.mark.parametrize(
    "url",
    [
        "file://host/data",
        "file://localhost/data",
        "file:data",
        "file://",
        "file:///",
        "file:///data?size=1",
        "file:///data?fsync=yes",
        "file:///data?fsync=true&fsync=false",
        "file:///data#part",
        "file:///da%00ta",
        "file://[bad/data",
        "http://host/data",
        "/data",
        "",
    ],
)
def test_urls_that_do_not(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        FileBackend.from_url(url)
    message = str(caught.value)
    assert "backend.url" in message and f'"{url}"' in message and "file:///absolute/path" in message


@pytest.mark.parametrize("capacity_bytes", [0, -1])
def test_capacities_that_are_none(tmp_path: Path, capacity_bytes: int) -> None:
    for make in (MemoryBackend, lambda capacity: FileBackend(tmp_path, capacity)):
        with pytest.raises(ConfigError, match=r"backend\.capacity_bytes"):
            make(capacity_bytes)


@pytest.mark.parametrize(("namespace", "rank"), [(b"short", 0), (b"x" * 17, 0), (NAMESPACE, -1)])
def test_buckets_that_have_no_name(tmp_path: Path, namespace: bytes, rank: int) -> None:
    for backend in (MemoryBackend(), FileBackend(tmp_path)):
        with pytest.raises(ContractError):
            backend.bucket(namespace, rank)


# -- the tree on disk -------------------------------------------------------------------------------------------------


def test_tree_is_private_and_as_documented(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "root"
    backend = FileBackend(root)
    backend.describe(NAMESPACE, {"model": "tiny"})
    bucket = backend.bucket(NAMESPACE, 3)
    bucket.put(ID, [b"x"])
    bucket.quarantine(ID)
    bucket.put(ID, [b"x"])
    folder = f"ns-{NAMESPACE.hex()}"
    names = [name.split(f"{ID.hex()}.kv.")[0] for name in files_below(root)]
    assert names == [f"{folder}/namespace.json", f"{folder}/r3/ab/{ID.hex()}.kv", f"{folder}/r3/quarantine/"]
    for path in (root, *root.rglob("*")):
        assert stat.S_IMODE(path.lstat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_nothing_is_made_before_the_first_write(tmp_path: Path) -> None:
    backend = FileBackend(tmp_path / "root", 1 << 20)
    bucket = backend.bucket(NAMESPACE, 0)
    assert not bucket.contains(ID) and get(bucket, ID, 1) is None and list(bucket.scan()) == []
    assert backend.namespaces() == {} and backend.used_bytes() == 0 and bucket.clear() == 0
    assert not (tmp_path / "root").exists()


def test_a_tree_that_is_removed_meanwhile_is_made_again(tmp_path: Path) -> None:
    bucket = FileBackend(tmp_path / "root").bucket(NAMESPACE, 0)
    bucket.put(ID, [b"x"])
    shutil.rmtree(tmp_path / "root")
    assert not bucket.contains(ID)
    bucket.put(ID, [b"y"])
    assert get(bucket, ID, 1) == b"y"


def make_symlink(path: Path) -> None:
    target = path.with_name("target")
    target.write_bytes(b"secret")
    path.symlink_to(target)


def make_dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def make_directory(path: Path) -> None:
    path.mkdir()


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    here = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as listener:  # by descriptor, since the whole path is too long for one
            listener.bind(f"/proc/self/fd/{here}/{path.name}")
    finally:
        os.close(here)


@pytest.mark.parametrize("plant", [make_symlink, make_dangling, make_directory, make_fifo, make_socket])
@pytest.mark.timeout(10)
def test_what_is_no_regular_file_is_no_object(tmp_path: Path, plant: Callable[[Path], None]) -> None:
    bucket = FileBackend(tmp_path).bucket(NAMESPACE, 0)
    path = object_path(tmp_path)
    path.parent.mkdir(parents=True)
    plant(path)
    assert get(bucket, ID, 6) is None
    assert not bucket.contains(ID) and not bucket.delete(ID) and not bucket.quarantine(ID)
    assert list(bucket.scan()) == [] and bucket.clear() == 0
    assert os.path.lexists(path)


def test_put_replaces_a_link_and_not_its_target(tmp_path: Path) -> None:
    bucket = FileBackend(tmp_path).bucket(NAMESPACE, 0)
    path = object_path(tmp_path)
    path.parent.mkdir(parents=True)
    make_symlink(path)
    bucket.put(ID, [b"object"])
    assert get(bucket, ID, 6) == b"object" and path.with_name("target").read_bytes() == b"secret"


def test_put_over_a_directory_fails_and_leaves_no_temporary(tmp_path: Path) -> None:
    bucket = FileBackend(tmp_path).bucket(NAMESPACE, 0)
    object_path(tmp_path).mkdir(parents=True)
    with pytest.raises(BackendError):
        bucket.put(ID, [b"object"])
    assert files_below(tmp_path) == []


def explode() -> None:
    raise AssertionError("a stored object was unpickled")


class Bomb:
    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return explode, ()


def test_a_pickle_under_a_valid_name_is_a_bad_record(tmp_path: Path) -> None:
    key = RecordKey(NAMESPACE, b"g" * 16, "block", b"prefix", b"", 16, 0)
    bucket = FileBackend(tmp_path).bucket(NAMESPACE, 0)
    path = object_path(tmp_path, key.id)
    path.parent.mkdir(parents=True)
    content = pickle.dumps(Bomb()).ljust(HEADER_BYTES + 100, b".")
    path.write_bytes(content)
    with pytest.raises(RecordError) as caught:
        read_into(bucket, key, memoryview(bytearray(100)))
    assert caught.value.cause == "magic"
    [kept] = (path.parent.parent / "quarantine").iterdir()
    assert kept.read_bytes() == content


def test_swapped_files_are_refused_by_their_keys(tmp_path: Path) -> None:
    bucket = FileBackend(tmp_path).bucket(NAMESPACE, 0)
    keys = [RecordKey(NAMESPACE, b"g" * 16, "block", prefix, b"", 16, 0) for prefix in (b"a", b"b")]
    for key in keys:
        write(bucket, key, b"payload")
    first, second = (object_path(tmp_path, key.id) for key in keys)
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    for key in keys:
        with pytest.raises(RecordError) as caught:
            read_into(bucket, key, memoryview(bytearray(7)))
        assert caught.value.cause == "key" and not bucket.contains(key.id)


def test_foreign_names_are_skipped(tmp_path: Path) -> None:
    bucket = FileBackend(tmp_path).bucket(NAMESPACE, 0)
    bucket.put(ID, [b"x"])
    folder = object_path(tmp_path).parent
    wrong_shard = folder.parent / "cd"
    wrong_shard.mkdir()
    foreign = [
        folder / f"{'AB' * 16}.kv",
        folder / f"{'ab' * 15}.kv",
        folder / f"{ID.hex()}.kv.bak",
        folder / f"{'ab' * 15}cd.kv\n",
        folder / "README",
        wrong_shard / f"{'ab' * 15}ef.kv",
        folder.parent / f"{'ab' * 15}01.kv",
        tmp_path / "notes.txt",
        tmp_path / "ns-short",
    ]
    for path in foreign:
        path.write_bytes(b"foreign")
    assert list(bucket.scan()) == [ID]
    assert bucket.clear() == 1
    assert all(path.exists() for path in foreign)


# -- descriptions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b'{"a": 1}', b"\xff", b"[" * 100_000, b'{"a":"' + b"x" * (1 << 20) + b'"}']
)
def test_unreadable_descriptions_are_left_out(tmp_path: Path, text: bytes) -> None:
    backend = FileBackend(tmp_path)
    backend.describe(NAMESPACE, {"model": "tiny"})
    broken = tmp_path / f"ns-{'0' * 32}"
    broken.mkdir()
    (broken / "namespace.json").write_bytes(text)
    (tmp_path / f"ns-{'1' * 32}").mkdir()
    linked = tmp_path / f"ns-{'2' * 32}"
    linked.mkdir()
    (linked / "namespace.json").symlink_to(tmp_path / f"ns-{NAMESPACE.hex()}" / "namespace.json")
    assert backend.namespaces() == {NAMESPACE: {"model": "tiny"}}


# -- failing disks ----------------------------------------------------------------------------------------------------

CONTENT = bytes(range(256)) * 64


def failing_writev(at: int, code: int) -> Callable[[int, Sequence[Any]], int]:
    """os.writev of a disk that takes `at` bytes and then fails."""
    real, taken = os.writev, 0

    def writev(fd: int, buffers: Sequence[Any]) -> int:
        nonlocal taken
        room = at - taken
        if room <= 0:
            raise OSError(code, os.strerror(code))
        written = real(fd, [b"".join(buffers)[:room]])
        taken += written
        return written

    return writev


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("at", [0, 1, len(CONTENT) // 2, len(CONTENT) - 1])
def test_a_failing_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, code: int) -> None:
    backend = FileBackend(tmp_path)  # with a capacity, a full disk would have it give something up
    bucket = backend.bucket(NAMESPACE, 0)
    bucket.put(number_id(1), [b"before"])
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", failing_writev(at, code))
        with pytest.raises(BackendError, match=os.strerror(code)) as caught:
            bucket.put(ID, [CONTENT[:100], CONTENT[100:]])
        assert isinstance(caught.value.__cause__, OSError)
        assert not bucket.contains(ID) and get(bucket, ID, len(CONTENT)) is None
        assert list(bucket.scan()) == [number_id(1)]
    assert len(files_below(tmp_path)) == 1
    bucket.put(ID, [CONTENT])
    assert get(bucket, ID, len(CONTENT)) == CONTENT


def test_a_failing_overwrite_keeps_the_old_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = FileBackend(tmp_path).bucket(NAMESPACE, 0)
    bucket.put(ID, [CONTENT])
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", failing_writev(10, errno.ENOSPC))
        with pytest.raises(BackendError):
            bucket.put(ID, [CONTENT])
    assert get(bucket, ID, len(CONTENT)) == CONTENT


def test_short_writes_and_reads_are_carried_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = FileBackend(tmp_path).bucket(NAMESPACE, 0)
    writev, preadv = os.writev, os.preadv
    monkeypatch.setattr(os, "writev", lambda fd, views: writev(fd, [views[0][:333]]))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:334]], at))
    bucket.put(ID, [CONTENT[:1000], CONTENT[1000:1001], CONTENT[1001:]])
    out = memoryview(bytearray(len(CONTENT)))
    assert bucket.get_into(ID, [out[:1], out[1:5000], out[5000:]])
    assert bytes(out) == CONTENT


def test_a_write_that_takes_nothing_does_not_spin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "writev", lambda fd, views: 0)
    with pytest.raises(BackendError):
        FileBackend(tmp_path).bucket(NAMESPACE, 0).put(ID, [CONTENT])
    assert files_below(tmp_path) == []


def test_a_file_cut_short_during_the_read_is_a_length_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = FileBackend(tmp_path).bucket(NAMESPACE, 0)
    bucket.put(ID, [CONTENT])
    preadv = os.preadv

    def truncating(fd: int, views: Sequence[Any], at: int) -> int:
        os.truncate(object_path(tmp_path), 100)
        return preadv(fd, views, at)

    monkeypatch.setattr(os, "preadv", truncating)
    with pytest.raises(RecordError) as caught:
        get(bucket, ID, len(CONTENT))
    assert caught.value.cause == "length"


@pytest.mark.parametrize("call", ["open", "lstat", "unlink", "replace", "scandir"])
def test_io_errors_are_backend_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    backend = FileBackend(tmp_path)
    bucket = backend.bucket(NAMESPACE, 0)
    bucket.put(ID, [b"x"])
    operations: dict[str, list[Callable[[], object]]] = {
        "open": [lambda: get(bucket, ID, 1), lambda: bucket.put(ID, [b"x"])],
        "lstat": [lambda: bucket.contains(ID), lambda: bucket.delete(ID), lambda: bucket.quarantine(ID)],
        "unlink": [lambda: bucket.delete(ID), bucket.clear],
        "replace": [lambda: bucket.put(ID, [b"x"])],
        "scandir": [lambda: list(bucket.scan()), bucket.clear, backend.used_bytes, backend.namespaces],
    }

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        for operation in operations[call]:
            with pytest.raises(BackendError):
                operation()
    assert get(bucket, ID, 1) == b"x"
    assert len(files_below(tmp_path)) == 1


def test_a_root_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.write_bytes(b"")
    backend = FileBackend(root)
    bucket = backend.bucket(NAMESPACE, 0)
    operations: list[Callable[[], object]] = [
        lambda: get(bucket, ID, 1),
        lambda: bucket.contains(ID),
        lambda: bucket.put(ID, [b"x"]),
        lambda: bucket.delete(ID),
        lambda: bucket.quarantine(ID),
        lambda: backend.describe(NAMESPACE, {}),
        backend.namespaces,
        backend.used_bytes,
    ]
    for operation in operations:
        with pytest.raises(BackendError):
            operation()


# -- quarantine -------------------------------------------------------------------------------------------------------


def test_quarantine_keeps_the_latest_only(tmp_path: Path) -> None:
    clock = Clock()
    backend = FileBackend(tmp_path, clock_ns=clock)
    bucket = backend.bucket(NAMESPACE, 0)
    for number in range(QUARANTINE_FILES + 5):
        bucket.put(number_id(number), [b"x"])
        bucket.quarantine(number_id(number))
        clock.forward(1)
    kept = {path.name.split(".")[0] for path in (object_path(tmp_path).parent.parent / "quarantine").iterdir()}
    assert kept == {number_id(number).hex() for number in range(5, QUARANTINE_FILES + 5)}
    assert list(bucket.scan()) == [] and backend.used_bytes() > 0


def test_quarantine_without_a_place_removes(tmp_path: Path) -> None:
    bucket = FileBackend(tmp_path).bucket(NAMESPACE, 0)
    bucket.put(ID, [b"x"])
    (object_path(tmp_path).parent.parent / "quarantine").write_bytes(b"in the way")
    assert bucket.quarantine(ID)
    assert not bucket.contains(ID)


def test_a_folder_that_cannot_be_listed_hides_only_its_own_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bucket = FileBackend.from_url(tmp_path.as_uri(), None).bucket(b"n" * 16, 0)
    ids = [bytes([i]) * 16 for i in range(4)]
    for id in ids:
        bucket.put(id, [b"content"])
    scandir = os.scandir

    def refuse_one(path: Any) -> Any:
        if str(path).endswith("/02"):
            raise PermissionError(errno.EACCES, "not yours", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse_one)
    assert set(bucket.scan()) == set(ids) - {ids[2]}
    assert "cannot be listed" in caplog.text
