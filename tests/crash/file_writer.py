"""Child process of test_file_kill: writes records without end, or dies at a chosen point of one write.

Arguments: root, number of the first record, where to die ("never", "mid_write", "before_replace", "after_replace").
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

from ucmcache.store import record
from ucmcache.store.backends.file import FileBackend

NAMESPACE = b"k" * 16
PAYLOAD_BYTES = 1 << 20  # large enough to be killed within one


def key_of(number: int) -> record.RecordKey:
    """Key of the record `number`."""
    return record.RecordKey(NAMESPACE, b"g" * 16, "block", number.to_bytes(8, "big"), b"", number, 0)


def payload_of(number: int) -> bytes:
    """The only right payload of record `number`."""
    return random.Random(number).randbytes(64) * (PAYLOAD_BYTES // 64)


def die(*_: object) -> None:
    """End as by the kernel's hand: no clean-up runs."""
    os.kill(os.getpid(), signal.SIGKILL)


def arrange_death(where: str) -> None:
    """Make this process die inside a write."""
    writev, replace = os.writev, os.replace

    def half(fd: int, views: Sequence[Any]) -> int:
        writev(fd, [b"".join(views)[: PAYLOAD_BYTES // 2]])
        die()
        return 0

    def replace_and_die(source: str, target: str) -> None:
        replace(source, target)
        die()

    if where == "mid_write":
        mock.patch.object(os, "writev", half).start()
    elif where == "before_replace":
        mock.patch.object(os, "replace", die).start()
    elif where == "after_replace":
        mock.patch.object(os, "replace", replace_and_die).start()


def main(root: str, first: str, where: str) -> None:
    """Write ever more records; a line on standard output says that it starts now."""
    bucket = FileBackend(root).bucket(NAMESPACE, 0)
    arrange_death(where)
    print("ready", flush=True)
    for number in itertools.count(int(first)):
        record.write(bucket, key_of(number), payload_of(number))
        if number >= int(first) + 3:
            bucket.delete(key_of(number - 3).id)  # so that the disk holds a few only


if __name__ == "__main__":
    main(*sys.argv[1:])
