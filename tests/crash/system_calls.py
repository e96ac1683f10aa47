"""Counts the system calls of the file backend, and acts at a chosen one of them."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

# By name, since that is how the backend calls them; each is before its effect when `before` is called.
CALLS: dict[str, Any] = {
    **dict.fromkeys(("open", "close", "fstat", "lstat", "scandir", "mkdir", "unlink", "rename", "replace"), os),
    **dict.fromkeys(
        ("write", "writev", "pwrite", "read", "readv", "pread", "preadv", "fsync", "ftruncate", "utime"), os
    ),
    **dict.fromkeys(("flock", "fcntl"), fcntl),
}

Before = Callable[[str, tuple[Any, ...]], None]


def front(views: Sequence[Any], nbytes: int) -> list[memoryview]:
    """The first bytes of `views`, where they lie: calls around the page cache take no others."""
    cut = []
    for view in views:
        if nbytes > 0:
            cut.append(memoryview(view)[:nbytes])
            nbytes -= len(cut[-1])
    return cut


def is_direct(fd: int) -> bool:
    """Whether calls on `fd` go around the page cache, in whole pages."""
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


@contextmanager
def watched(before: Before, after: Before = lambda name, arguments: None) -> Iterator[None]:
    """Call `before(name, arguments)` ahead of every system call that Python code makes, `after` behind it."""

    def wrapping(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if name == "close":
                # It ends the descriptor even when it reports an error, so what fails it must come after.
                real(*arguments)
                before(name, arguments)
                result = None
            else:
                before(name, arguments)
                result = real(*arguments, **named)
            after(name, arguments)
            return result

        return call

    with ExitStack() as stack:
        for name, module in CALLS.items():
            stack.enter_context(mock.patch.object(module, name, wrapping(name, getattr(module, name))))
        yield


def calls_of(operation: Callable[[], object]) -> list[str]:
    """Names of the system calls that `operation` makes."""
    names: list[str] = []
    with watched(lambda name, _: names.append(name)):
        operation()
    return names


def failing_call(number: int, code: int) -> Before:
    """What makes this thread's call `number` (from 0) fail with errno `code`, and no other."""
    count, thread = 0, threading.get_ident()

    def before(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if threading.get_ident() != thread:
            return
        count += 1
        if count == number + 1:
            raise OSError(code, os.strerror(code), name)

    return before
