"""For authors of backends: the protocol's promises as tests, and wrappers that make a backend fail, dawdle or hang.

    class TestMyBackend(BackendContract):
        def make(self, tmp_path):
            return MyBackend(tmp_path)

pytest finds the `test_*` methods. Every check gets a fresh backend from `make` and closes it itself.
"""

from __future__ import annotations

import pickle
import threading
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from ucmcache.errors import BackendError, RecordError
from ucmcache.store.backend import Backend, Bucket
from ucmcache.store.faults import FlakyBackend, HungBackend, SlowBackend

__all__ = ["BackendContract", "FlakyBackend", "HungBackend", "SlowBackend"]

_NAMESPACE = bytes(range(16))
_OTHER_NAMESPACE = bytes(range(16, 32))
_ID = bytes.fromhex("00ff" * 8)
_OTHER_ID = bytes.fromhex("00fe" * 8)
_CONTENT = bytes(range(256)) * 17

_E = TypeVar("_E", bound=Exception)


class BackendContract(ABC):
    """Everything that `ucmcache.store.backend` promises of a backend, one promise a check.

    Guaranteed by the author: `make` gives an empty backend with no less than 16 MiB of capacity.
    """

    @abstractmethod
    def make(self, tmp_path: Path) -> Backend:
        """A new, empty backend; `tmp_path` is a directory for this check alone."""

    def reopen(self, tmp_path: Path) -> Backend | None:
        """A second backend on what the one of `make(tmp_path)` kept; None if it keeps nothing beyond its `close`."""
        return None

    # -- put and get ----------------------------------------------------------------------------------------------

    def test_satisfies_the_protocol(self, tmp_path: Path) -> None:
        backend = self.make(tmp_path)
        _expect(isinstance(backend, Backend), "make() gives a Backend")
        _expect(isinstance(backend.bucket(_NAMESPACE, 0), Bucket), "bucket() gives a Bucket")
        backend.close()

    def test_gives_back_what_was_put(self, tmp_path: Path) -> None:
        backend, bucket = self._open(tmp_path)
        _expect(bucket.put(_ID, [_CONTENT]) > 0, "put() tells the bytes taken")
        _equal(_get(bucket, _ID, len(_CONTENT)), _CONTENT, "get_into() gives what was put")
        backend.close()

    def test_parts_may_be_cut_differently_on_the_way_back(self, tmp_path: Path) -> None:
        backend, bucket = self._open(tmp_path)
        bucket.put(_ID, [_CONTENT[:1], b"", bytearray(_CONTENT[1:100]), memoryview(_CONTENT)[100:]])
        out = bytearray(len(_CONTENT))
        view = memoryview(out)
        _expect(bucket.get_into(_ID, [view[:77], view[77:77], view[77:]]), "the object is there")
        _equal(bytes(out), _CONTENT, "parts are one after the other, wherever they are cut")
        backend.close()

    def test_takes_thousands_of_parts(self, tmp_path: Path) -> None:
        backend, bucket = self._open(tmp_path)
        bucket.put(_ID, [_CONTENT[i : i + 1] for i in range(len(_CONTENT))])
        out = memoryview(bytearray(len(_CONTENT)))
        _expect(bucket.get_into(_ID, [out[i : i + 1] for i in range(len(out))]), "the object is there")
        _equal(bytes(out), _CONTENT, "thousands of parts are no different from one")
        backend.close()

    def test_counts_bytes_not_items(self, tmp_path: Path) -> None:
        backend, bucket = self._open(tmp_path)
        words = array("I", range(1000))
        bucket.put(_ID, [memoryview(words)])
        out = array("I", bytes(words.itemsize * len(words)))
        _expect(bucket.get_into(_ID, [memoryview(out)]), "the object is there")
        _equal(out, words, "a view of wider items is its bytes")
        backend.close()

    def test_tells_in_order_of_bytes_that_are_in_place(self, tmp_path: Path) -> None:
        backend, bucket = self._open(tmp_path)
        content = _CONTENT * 500
        bucket.put(_ID, [content])
        out, told = bytearray(len(content)), [0]

        def filled(nbytes: int) -> None:
            told[0] += nbytes
            _expect(nbytes > 0 and told[0] <= len(content), "what is told is as long as the object, at most")
            _expect(out[: told[0]] == content[: told[0]], "what is told is in place")

        _expect(bucket.get_into(_ID, [memoryview(out)[:7], memoryview(out)[7:]], filled), "the object is there")
        _expect(out == content, "what was told of has not changed since")
        _expect(not bucket.get_into(_OTHER_ID, [memoryview(out)], filled), "get_into() of nothing is False")
        backend.close()

    def test_keeps_megabytes(self, tmp_path: Path) -> None:
        backend, bucket = self._open(tmp_path)
        content = _CONTENT * 500
        bucket.put(_ID, [content[: 1 << 20], content[1 << 20 :]])
        _equal(_get(bucket, _ID, len(content)), content, "a large object is whole")
        backend.close()

    def test_keeps_every_length(self, tmp_path: Path) -> None:
        backend, bucket = self._open(tmp_path)
        for power in (8, 12, 13, 16, 20):
            for length in ((1 << power) - 1, 1 << power, (1 << power) + 1):
                content = (_CONTENT * (length // len(_CONTENT) + 1))[:length]
                bucket.put(_ID, [content[:300], content[300:]])
                _expect(_get(bucket, _ID, length) == content, f"an object of {length} bytes is whole")
        backend.close()

    def test_every_id_is_an_id(self, tmp_path: Path) -> None:
        backend, bucket = self._open(tmp_path)
        ids = [bytes(16), b"\xff" * 16, b"/" * 16, b"\0/.." * 4, b"\n" * 16, b"con:nul*" * 2, bytes(range(240, 256))]
        for id in ids:
            bucket.put(id, [id])
        for id in ids:
            _equal(_get(bucket, id, 16), id, "each of 16 bytes may have any value")
        _equal(sorted(bucket.scan()), sorted(ids), "and is listed as it is")
        backend.close()

    def test_ids_that_differ_in_one_bit_are_two(self, tmp_path: Path) -> None:
        backend, bucket = self._open(tmp_path)
        ids = [(1 << bit).to_bytes(16, "big") for bit in range(128)]
        for id in ids:
            bucket.put(id, [id[::-1]])
        _expect(all(_get(bucket, id, 16) == id[::-1] for id in ids), "no two ids share an object")
        backend.close()

    def test_takes_read_only_buffers(self, tmp_path: Path) -> None:
        backend, bucket = self._open(tmp_path)
        bucket.put(_ID, [memoryview(bytearray(_CONTENT)).toreadonly()])
        _equal(_get(bucket, _ID, len(_CONTENT)), _CONTENT, "what is put need not be writable")
        backend.close()

    def test_fills_parts_of_a_larger_buffer(self, tmp_path: Path) -> None:
        backend, bucket = self._open(tmp_path)
        bucket.put(_ID, [_CONTENT])
        out = bytearray(b"*" * (len(_CONTENT) + 20))
        _expect(bucket.get_into(_ID, [memoryview(out)[10:-10]]), "the object is there")
        _equal(bytes(out), b"*" * 10 + _CONTENT + b"*" * 10, "not a byte beyond the parts is written")
        backend.close()

    def test_keeps_an_empty_object(self, tmp_path: Path) -> None:
        backend, bucket = self._open(tmp_path)
        bucket.put(_ID, [])
        _expect(bucket.contains(_ID), "an object without bytes is an object")
        _expect(bucket.get_into(_ID, []), "an object without bytes can be got")
        backend.close()

    def test_keeps_no_hold_of_the_buffers(self, tmp_path: Path) -> None:
        backend, bucket = self._open(tmp_path)
        source = bytearray(_CONTENT)
        bucket.put(_ID, [source])
        source[:] = bytes(len(source))
        _equal(_get(bucket, _ID, len(_CONTENT)), _CONTENT, "a buffer belongs to the caller again after put()")
        backend.close()

    def test_put_replaces(self, tmp_path: Path) -> None:
        backend, bucket = self._open(tmp_path)
        bucket.put(_ID, [_CONTENT])
        bucket.put(_ID, [b"shorter"])
        _equal(_get(bucket, _ID, 7), b"shorter", "the later object is the one that is there")
        _equal(len(list(bucket.scan())), 1, "a replaced object is gone")
        backend.close()

    def test_never_runs_what_it_keeps(self, tmp_path: Path) -> None:
        backend, bucket = self._open(tmp_path)
        content = pickle.dumps(_Bomb())
        bucket.put(_ID, [content])
        _equal(_get(bucket, _ID, len(content)), content, "a pickle is bytes like any other")
        _equal(list(bucket.scan()), [_ID], "listing does not look into it")
        backend.close()

    # -- what is not there, or not as asked -----------------------------------------------------------------------

    def test_an_absent_object_is_a_value(self, tmp_path: Path) -> None:
        backend, bucket = self._open(tmp_path)
        out = bytearray(b"untouched")
        for listed in ([], [_ID]):  # the second round asks a bucket that exists
            _equal(bucket.get_into(_OTHER_ID, [memoryview(out)]), False, "get_into() of nothing is False")
            _equal(bytes(out), b"untouched", "get_into() of nothing writes nothing")
            _equal(bucket.contains(_OTHER_ID), False, "contains() of nothing is False")
            _equal(bucket.delete(_OTHER_ID), False, "delete() of nothing is False")
            _equal(bucket.quarantine(_OTHER_ID), False, "quarantine() of nothing is False")
            _equal(list(bucket.scan()), listed, "scan() does not list it")
            bucket.put(_ID, [_CONTENT])
        backend.close()

    def test_another_length_is_refused(self, tmp_path: Path) -> None:
        backend, bucket = self._open(tmp_path)
        bucket.put(_ID, [_CONTENT])
        for length in (0, 1, len(_CONTENT) - 1, len(_CONTENT) + 1, 2 * len(_CONTENT)):
            error = _raises(RecordError, partial(_get, bucket, _ID, length))
            _equal(error.cause, "length", f"asking for {length} of {len(_CONTENT)} bytes is RecordError length")
        _equal(_get(bucket, _ID, len(_CONTENT)), _CONTENT, "a refused read changes nothing")
        backend.close()

    def test_touching_changes_nothing_that_can_be_read(self, tmp_path: Path) -> None:
        backend, bucket = self._open(tmp_path)
        bucket.touch([_ID])
        _expect(not bucket.contains(_ID), "touching nothing makes nothing")
        bucket.put(_ID, [_CONTENT])
        used = backend.used_bytes()
        bucket.touch([])
        bucket.touch([_OTHER_ID, _ID, _ID])
        _equal(_get(bucket, _ID, len(_CONTENT)), _CONTENT, "a touched object is what it was")
        _equal((list(bucket.scan()), backend.used_bytes()), ([_ID], used), "and nothing came beside it")
        backend.close()

    def test_a_refused_read_leaves_the_object(self, tmp_path: Path) -> None:
        backend, bucket = self._open(tmp_path)
        bucket.put(_ID, [_CONTENT])
        _raises(RecordError, partial(_get, bucket, _ID, 1))
        _expect(bucket.contains(_ID), "a read of another length removes nothing")
        _equal(list(bucket.scan()), [_ID], "and the object is still listed")
        backend.close()

    def test_delete_removes_once(self, tmp_path: Path) -> None:
        backend, bucket = self._open(tmp_path)
        bucket.put(_ID, [_CONTENT])
        bucket.put(_OTHER_ID, [b"stays"])
        _equal(bucket.delete(_ID), True, "delete() of an object is True")
        _equal(bucket.delete(_ID), False, "and False once it is gone")
        _expect(not bucket.contains(_ID), "a deleted object is gone")
        _equal(_get(bucket, _OTHER_ID, 5), b"stays", "the others stay")
        backend.close()

    def test_quarantine_takes_out_of_reach(self, tmp_path: Path) -> None:
        backend, bucket = self._open(tmp_path)
        for _ in range(20):  # more often than anyone keeps for inspection
            bucket.put(_ID, [_CONTENT])
            _equal(bucket.quarantine(_ID), True, "quarantine() of an object is True")
            _equal(bucket.quarantine(_ID), False, "and False once it is gone")
            _expect(not bucket.contains(_ID), "a quarantined object is not there")
            _equal(_get(bucket, _ID, len(_CONTENT)), None, "and cannot be read")
            _equal(list(bucket.scan()), [], "nor is it listed")
        bucket.put(_ID, [b"good"])
        _equal(_get(bucket, _ID, 4), b"good", "its id is free for a good object")
        backend.close()

    # -- listing, buckets -----------------------------------------------------------------------------------------

    def test_scan_lists_each_object_once(self, tmp_path: Path) -> None:
        backend, bucket = self._open(tmp_path)
        ids = [bytes([i]) * 16 for i in range(200)]
        for id in ids:
            bucket.put(id, [id])
        _equal(sorted(bucket.scan()), ids, "each object is listed once, by its id")
        backend.close()

    def test_objects_may_come_during_a_scan(self, tmp_path: Path) -> None:
        backend, bucket = self._open(tmp_path)
        ids = {bytes([i, 0]) * 8 for i in range(50)}
        for id in ids:
            bucket.put(id, [b"x"])
        seen = []
        for id in bucket.scan():
            seen.append(id)
            bucket.put(bytes([len(seen), 1]) * 8, [b"new"])
            if len(seen) > 500:
                break
        _expect(ids <= set(seen) and len(set(seen)) == len(seen), "what was there is listed, and nothing twice")
        backend.close()

    def test_objects_may_go_during_a_scan(self, tmp_path: Path) -> None:
        backend, bucket = self._open(tmp_path)
        ids = {bytes([i]) * 16 for i in range(50)}
        for id in ids:
            bucket.put(id, [b"x"])
        seen = set()
        for id in bucket.scan():
            seen.add(id)
            bucket.delete(id)
        _equal(seen, ids, "deleting what was listed hides nothing else")
        _equal(list(bucket.scan()), [], "and all of it is gone")
        backend.close()

    def test_clear_empties_one_bucket(self, tmp_path: Path) -> None:
        backend, bucket = self._open(tmp_path)
        other = backend.bucket(_NAMESPACE, 1)
        _equal(bucket.clear(), 0, "clear() of nothing is 0")
        for owner in (bucket, other):
            owner.put(_ID, [_CONTENT])
            owner.put(_OTHER_ID, [_CONTENT])
        _equal(bucket.clear(), 2, "clear() tells how many objects went")
        _equal(list(bucket.scan()), [], "the bucket is empty")
        _equal(len(list(other.scan())), 2, "another bucket is not touched")
        backend.close()

    def test_buckets_do_not_see_each_other(self, tmp_path: Path) -> None:
        backend = self.make(tmp_path)
        names = [(_NAMESPACE, 0), (_NAMESPACE, 1), (_NAMESPACE, 10), (_OTHER_NAMESPACE, 0), (_OTHER_NAMESPACE, 1)]
        for number, name in enumerate(names):
            bucket = backend.bucket(*name)
            _expect(not bucket.contains(_ID), "an object of another bucket is not seen")
            bucket.put(_ID, [bytes([number])])
        for number, name in enumerate(names):
            _equal(_get(backend.bucket(*name), _ID, 1), bytes([number]), "each bucket has its own object of one id")
        _expect(backend.bucket(*names[0]).delete(_ID), "deleted in one bucket")
        _expect(all(backend.bucket(*name).contains(_ID) for name in names[1:]), "and there in the others")
        backend.close()

    def test_opening_a_bucket_makes_nothing(self, tmp_path: Path) -> None:
        backend, bucket = self._open(tmp_path)
        _equal(list(bucket.scan()), [], "a new bucket is empty")
        _equal(backend.namespaces(), {}, "an opened bucket is no described namespace")
        _equal(backend.used_bytes(), 0, "an opened bucket takes no bytes")
        backend.close()

    def test_clear_may_be_called_again_and_filled_again(self, tmp_path: Path) -> None:
        backend, bucket = self._open(tmp_path)
        bucket.put(_ID, [_CONTENT])
        _equal([bucket.clear(), bucket.clear()], [1, 0], "clear() of an empty bucket is 0")
        bucket.put(_ID, [b"again"])
        _equal(_get(bucket, _ID, 5), b"again", "a cleared bucket takes objects")
        backend.close()

    def test_ranks_may_be_large(self, tmp_path: Path) -> None:
        backend = self.make(tmp_path)
        for rank in (0, 9, 10, 4095):
            backend.bucket(_NAMESPACE, rank).put(_ID, [str(rank).encode()])
        for rank in (0, 9, 10, 4095):
            found = _get(backend.bucket(_NAMESPACE, rank), _ID, len(str(rank)))
            _equal(found, str(rank).encode(), "each rank has a bucket of its own")
        backend.close()

    def test_a_bucket_opened_twice_is_one(self, tmp_path: Path) -> None:
        backend, bucket = self._open(tmp_path)
        bucket.put(_ID, [_CONTENT])
        again = backend.bucket(_NAMESPACE, 0)
        _equal(_get(again, _ID, len(_CONTENT)), _CONTENT, "both handles see one object")
        again.delete(_ID)
        _expect(not bucket.contains(_ID), "and its removal")
        backend.close()

    # -- the backend as a whole -----------------------------------------------------------------------------------

    def test_describes_namespaces(self, tmp_path: Path) -> None:
        backend = self.make(tmp_path)
        _equal(backend.namespaces(), {}, "nothing is described at first")
        fields = {"model": "tiny/hybrid", "dtype": "bfloat16", "tenant": 'ü "quoted"\n', "empty": ""}
        backend.describe(_NAMESPACE, {"old": "text"})
        backend.describe(_NAMESPACE, fields)
        backend.describe(_OTHER_NAMESPACE, {})
        _equal(backend.namespaces(), {_NAMESPACE: fields, _OTHER_NAMESPACE: {}}, "the last description holds")
        _equal(list(backend.bucket(_NAMESPACE, 0).scan()), [], "a description is no object")
        backend.close()

    def test_used_bytes_covers_all_objects(self, tmp_path: Path) -> None:
        backend, bucket = self._open(tmp_path)
        other = backend.bucket(_OTHER_NAMESPACE, 3)
        bucket.put(_ID, [_CONTENT * 4])
        one = backend.used_bytes()
        _expect(one > 0, "an object takes bytes")
        other.put(_ID, [_CONTENT * 4])
        _expect(backend.used_bytes() > one, "it covers all namespaces and ranks")
        bucket.delete(_ID)
        other.clear()
        _equal(backend.used_bytes(), 0, "removed objects take nothing")
        backend.close()

    def test_replacing_takes_no_more_room(self, tmp_path: Path) -> None:
        backend, bucket = self._open(tmp_path)
        for _ in range(3):
            bucket.put(_ID, [_CONTENT * 4])
        used = backend.used_bytes()
        bucket.put(_ID, [_CONTENT * 4])
        _equal(backend.used_bytes(), used, "an object that is replaced takes nothing any more")
        backend.close()

    def test_room_is_made_for_what_is_new(self, tmp_path: Path) -> None:
        backend, bucket = self._open(tmp_path)
        content = _CONTENT * 240  # about a MiB: forty are more than some backends may keep
        for number in range(40):
            bucket.put(bytes([number]) * 16, [content])
            _expect(_get(bucket, bytes([number]) * 16, len(content)) == content, "what was just put is there")
        for id in list(bucket.scan()):
            _expect(_get(bucket, id, len(content)) in (content, None), "and whatever is kept is whole")
        backend.close()

    def test_a_closed_backend_refuses(self, tmp_path: Path) -> None:
        backend, bucket = self._open(tmp_path)
        bucket.put(_ID, [_CONTENT])
        backend.close()
        calls: dict[str, Callable[[], object]] = {
            "bucket": lambda: backend.bucket(_NAMESPACE, 0),
            "describe": lambda: backend.describe(_NAMESPACE, {}),
            "namespaces": backend.namespaces,
            "used_bytes": backend.used_bytes,
            "put": lambda: bucket.put(_ID, [_CONTENT]),
            "get_into": lambda: _get(bucket, _ID, len(_CONTENT)),
            "contains": lambda: bucket.contains(_ID),
            "touch": lambda: bucket.touch([_ID]),
            "delete": lambda: bucket.delete(_ID),
            "quarantine": lambda: bucket.quarantine(_ID),
            "scan": lambda: list(bucket.scan()),
            "clear": bucket.clear,
        }
        for name, call in calls.items():
            _raises(BackendError, call, f"{name}() after close()")
        backend.close()  # a second time is harmless

    def test_what_was_kept_is_there_again(self, tmp_path: Path) -> None:
        backend, bucket = self._open(tmp_path)
        bucket.put(_ID, [_CONTENT])
        backend.describe(_NAMESPACE, {"model": "tiny"})
        backend.close()
        again = self.reopen(tmp_path)
        if again is None:
            return
        _equal(_get(again.bucket(_NAMESPACE, 0), _ID, len(_CONTENT)), _CONTENT, "objects outlive close()")
        _equal(again.namespaces(), {_NAMESPACE: {"model": "tiny"}}, "descriptions outlive close()")
        again.close()

    def test_what_was_removed_stays_removed(self, tmp_path: Path) -> None:
        backend, bucket = self._open(tmp_path)
        for id in (_ID, _OTHER_ID):
            bucket.put(id, [_CONTENT])
        bucket.delete(_ID)
        bucket.quarantine(_OTHER_ID)
        backend.close()
        again = self.reopen(tmp_path)
        if again is None:
            return
        _equal(list(again.bucket(_NAMESPACE, 0).scan()), [], "close() brings nothing back")
        again.close()

    def test_two_at_once_see_each_other(self, tmp_path: Path) -> None:
        backend, bucket = self._open(tmp_path)
        other = self.reopen(tmp_path)
        if other is None:
            backend.close()
            return
        theirs = other.bucket(_NAMESPACE, 0)
        bucket.put(_ID, [_CONTENT])
        _equal(_get(theirs, _ID, len(_CONTENT)), _CONTENT, "what one puts the other gets")
        _expect(theirs.delete(_ID), "and may remove")
        _equal((bucket.contains(_ID), _get(bucket, _ID, len(_CONTENT))), (False, None), "which is a miss for the first")
        other.close()
        bucket.put(_ID, [b"open"])
        _equal(_get(bucket, _ID, 4), b"open", "closing one does not close the other")
        backend.close()

    def test_threads_put_and_get_at_once(self, tmp_path: Path) -> None:
        backend, bucket = self._open(tmp_path)
        failures: list[BaseException] = []

        def work(number: int) -> None:
            try:
                for step in range(25):
                    id = bytes([number, step]) * 8
                    bucket.put(id, [id * 100])
                    _expect(_get(bucket, id, 1600) == id * 100, "each thread gets what it put")
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        _equal(failures, [], "calls may be made from several threads at once")
        _equal(len(list(bucket.scan())), 200, "and none is lost")
        backend.close()

    def test_readers_see_whole_objects_only(self, tmp_path: Path) -> None:
        backend, bucket = self._open(tmp_path)
        size = 64 << 10
        failures: list[BaseException] = []
        stop = threading.Event()

        def attempt(body: Callable[[], None]) -> None:
            try:
                body()
            except BaseException as error:
                failures.append(error)

        def write(value: int) -> None:
            for _ in range(20):
                bucket.put(_ID, [bytes([value]) * (size // 2)] * 2)

        def read() -> None:
            while not stop.is_set():
                content = _get(bucket, _ID, size)
                _expect(content is None or len(set(content)) == 1, "a reader sees one writer's object")

        writers = [threading.Thread(target=attempt, args=(partial(write, value),)) for value in (1, 2, 3)]
        readers = [threading.Thread(target=attempt, args=(read,)) for _ in range(2)]
        for thread in (*readers, *writers):
            thread.start()
        for thread in writers:
            thread.join()
        stop.set()
        for thread in readers:
            thread.join()
        _equal(failures, [], "concurrent writers of one id disturb nobody")
        backend.close()

    def _open(self, tmp_path: Path) -> tuple[Backend, Bucket]:
        backend = self.make(tmp_path)
        return backend, backend.bucket(_NAMESPACE, 0)


class _Bomb:
    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return _explode, ("a stored object was unpickled",)


def _explode(message: str) -> None:
    raise AssertionError(message)


def _get(bucket: Bucket, id: bytes, length_bytes: int) -> bytes | None:
    out = bytearray(length_bytes)
    return bytes(out) if bucket.get_into(id, [memoryview(out)]) else None


# Not `assert`: these run from an installed package, where pytest does not rewrite it and -O would drop it.


def _expect(held: bool, promise: str) -> None:
    if not held:
        raise AssertionError(promise)


def _equal(found: object, wanted: object, promise: str) -> None:
    _expect(found == wanted, f"{promise}: found {found!r:.500}, wanted {wanted!r:.500}")


def _raises(kind: type[_E], call: Callable[[], object], what: str = "the call") -> _E:
    try:
        result = call()
    except kind as error:
        return error
    raise AssertionError(f"{what} raises {kind.__name__}; it returned {result!r:.200}")
