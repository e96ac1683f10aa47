"""Child process of test_many_writers: loads one root for a while and tells on standard output what came of it, as JSON.

Arguments: what to do (a key of TASKS), then its own, as the functions below take them.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.crash.load import Load
from tests.crash.records import NAMESPACE, close, key_of
from tests.crash.system_calls import watched
from ucmcache.store.backends.file import FileBackend

THREADS = 2
TOLD = 10  # of each kind of fault
NUMBERS = range(400)  # together three times the capacity


def lease_holder(root: Path) -> int | None:
    """The process that holds the collector's lease, as the kernel has it."""
    try:
        inode = (root / "collector").stat().st_ino
    except FileNotFoundError:
        return None
    # "1: FLOCK  ADVISORY  WRITE 4711 fe:00:131 0 EOF"; those that wait have "->" as second word.
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if fields[1] == "FLOCK" and fields[5].endswith(f":{inode}"):
            return int(fields[4])
    return None


def load(root: str, capacity_bytes: str, seconds: str, seed: str) -> dict[str, Any]:
    """Mixed load by THREADS threads with the collector at work; who removes for room must hold the lease."""
    backend = FileBackend(root, int(capacity_bytes))
    strays: list[str] = []
    collected = 0

    def before(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal collected
        if name == "unlink" and threading.current_thread().name == "ucmcache-collector":
            collected += 1
            holder = lease_holder(Path(root))
            if holder != os.getpid():
                strays.append(f"{arguments[0]} was removed while {holder} held the lease")

    with watched(before), Load(backend, NUMBERS, THREADS, seed=int(seed)) as running:
        time.sleep(float(seconds))
    close(backend)
    return {
        "counts": running.counts,
        "wrong": [*map(repr, running.wrong[:TOLD]), *strays[:TOLD]],
        "collected": collected,
    }


def remove(root: str, how: str) -> dict[str, Any]:
    """When a line comes on standard input, remove all of NUMBERS; how many this process removed."""
    bucket = FileBackend(root).bucket(NAMESPACE, 0)
    ways: dict[str, Callable[[], int]] = {
        "delete": lambda: sum(bucket.delete(key_of(number).id) for number in NUMBERS),
        "quarantine": lambda: sum(bucket.quarantine(key_of(number).id) for number in NUMBERS),
        "clear": bucket.clear,
    }
    print("ready", flush=True)
    sys.stdin.readline()
    return {"removed": ways[how]()}


TASKS: dict[str, Callable[..., dict[str, Any]]] = {"load": load, "remove": remove}

if __name__ == "__main__":
    print(json.dumps(TASKS[sys.argv[1]](*sys.argv[2:])))
