"""How a file becomes visible: written in tmp/ under a name of its own, then moved into place whole."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from ucmcache.store.backend import Buffer
from ucmcache.store.backends.file_io import create_exclusive, make_folders, stored_bytes, unlink_if_there, write_all
from ucmcache.store.backends.file_layout import TEMPORARY_FOLDER, Temporaries, walk_temporaries
from ucmcache.store.backends.file_space import Space


class WriteFolder:
    """A bucket's or namespace's folder, with its own tmp/ beside what is moved out of there by rename.

    Thread-safe; other processes may write to the same folder. Nothing is made on disk before the first write.
    """

    def __init__(self, root: str, path: str, temporaries: Temporaries, space: Space) -> None:
        self.path = path
        self.temporaries = temporaries
        self.space = space
        self._root = root
        self._below = os.path.relpath(path, root).split(os.sep)
        self._lock = threading.Lock()
        self._swept = False

    def make(self, *below: str) -> str:
        """Make this folder and those `below`; returns the last. Raises OSError."""
        return make_folders(self._root, *self._below, *below)

    def write(self, name: str, parts: Sequence[Buffer]) -> int:
        """Put a whole file at `name` (relative), or nothing; returns the bytes of disk it takes. Raises OSError."""
        self._sweep_once()
        temporary = os.path.join(self.path, TEMPORARY_FOLDER, self.temporaries.name())
        try:
            fd = create_exclusive(temporary)
        except FileNotFoundError:  # the first write, or the folder was removed under a running engine
            self.make(TEMPORARY_FOLDER)
            fd = create_exclusive(temporary)
        try:
            try:
                write_all(fd, parts)
                now_ns = self.temporaries.clock_ns()
                os.utime(fd, ns=(now_ns, now_ns))
                status = os.fstat(fd)
            finally:
                os.close(fd)
            # Some file systems count blocks only once they are flushed; until then the length is the better estimate.
            taken_bytes = max(stored_bytes(status), status.st_size)
            self.space.admit(taken_bytes)
            self._move(temporary, name)
        except BaseException:
            unlink_if_there(temporary)
            raise
        return taken_bytes

    def _move(self, temporary: str, name: str) -> None:
        path = os.path.join(self.path, name)
        try:
            os.replace(temporary, path)
        except FileNotFoundError:
            self.make(os.path.dirname(name))
            os.replace(temporary, path)

    def _sweep_once(self) -> None:
        with self._lock:
            if self._swept:
                return
            for file in walk_temporaries(self.path):
                if self.temporaries.abandoned(os.path.basename(file.path), file.modified_ns):
                    unlink_if_there(file.path)
            self._swept = True
