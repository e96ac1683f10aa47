"""What the tests of the file backend share."""

from __future__ import annotations

import time
from pathlib import Path

from ucmcache.store.backend import Bucket

NAMESPACE = b"n" * 16
ID = bytes.fromhex("ab" * 16)
KIB = 1024
SECOND_NS = 10**9


class Clock:
    """Time that moves by hand; ahead of the disk's own, so that times the kernel sets never decide a test."""

    def __init__(self) -> None:
        # Less than what makes a temporary of a living writer an abandoned one.
        self.now_ns = time.time_ns() + 600 * SECOND_NS

    def __call__(self) -> int:
        return self.now_ns

    def forward(self, seconds: float) -> None:
        self.now_ns += int(seconds * SECOND_NS)


def get(bucket: Bucket, id: bytes, length: int) -> bytes | None:
    out = bytearray(length)
    return bytes(out) if bucket.get_into(id, [memoryview(out)]) else None


def object_path(root: Path, id: bytes = ID, rank: int = 0) -> Path:
    return root / f"ns-{NAMESPACE.hex()}" / f"r{rank}" / id.hex()[:2] / f"{id.hex()}.kv"


def number_id(number: int) -> bytes:
    return number.to_bytes(16, "little")


def files_below(root: Path) -> list[str]:
    """Files of objects and descriptions; the root's own are not among them."""
    found = {str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir()}
    return sorted(found - {"usage", "collector"})
