"""The backends, one file and one dependency each, and what they share."""

from __future__ import annotations

from collections.abc import Sequence

from ucmcache.errors import BackendError, ConfigError, ContractError
from ucmcache.store.backend import Buffer


def byte_views(parts: Sequence[Buffer]) -> list[memoryview]:
    """`parts` as flat views of their bytes, without the empty ones, whatever their item formats; nothing is copied."""
    views = [memoryview(part) for part in parts]
    return [view.cast("B") for view in views if view.nbytes]


def check_bucket_name(namespace: bytes, rank: int) -> None:
    """Raises ContractError unless `namespace` is 16 bytes and `rank` is not negative."""
    if len(namespace) != 16 or rank < 0:
        raise ContractError(f"a bucket is named by 16 bytes and a rank from 0; got {namespace!r} and {rank}")


def check_capacity(capacity_bytes: int | None) -> None:
    """Raises ConfigError unless `capacity_bytes` is None (no limit) or positive."""
    if capacity_bytes is not None and capacity_bytes <= 0:
        raise ConfigError(
            f"backend.capacity_bytes is {capacity_bytes}; accepted is a positive number of bytes, or null for no limit "
            "— set the bytes that the cache may take"
        )


def check_fits(object_bytes: int, capacity_bytes: int | None) -> None:
    """Raises BackendError for an object that the whole backend could not hold."""
    if capacity_bytes is not None and object_bytes > capacity_bytes:
        raise BackendError(f"an object of {object_bytes} bytes does not fit a capacity of {capacity_bytes} bytes")
