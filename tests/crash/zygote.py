"""A process that has imported everything and forks a child for each request, so that hundreds may die in seconds.

One request a line on standard input: {"scenario", "root", "point", "signal"}. On standard output come, a line each,
"<pid> began", what the child reports as "<pid> <report>", and "<pid> ended <exit status>".
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.crash.system_calls import front, watched

# Taken before anything is watched.
_write, _writev, _kill = os.write, os.writev, os.kill

Report = Any  # Callable[[str], None]


def say(text: str) -> None:
    """One line on standard output, whole also beside those of other processes."""
    _write(1, f"{os.getpid()} {text}\n".encode())


class Points:
    """Every moment before and after a system call, and amid a write, in the order in which they come.

    At number `point` this process sends itself `signal`. With `uncounted` set, what the thread does is passed over.
    """

    def __init__(self, point: int, signal: int) -> None:
        self.names: list[str] = []
        self._point = point
        self._signal = signal
        self._lock = threading.Lock()
        self._thread = threading.local()

    def uncounted(self, on: bool) -> None:
        """Whether this thread's calls are passed over."""
        self._thread.uncounted = on

    def before(self, name: str, arguments: tuple[Any, ...]) -> None:
        self._pass(f"before {name}")
        if name == "writev":
            self._pass(f"amid {name}", lambda: _half(*arguments))

    def after(self, name: str, arguments: tuple[Any, ...]) -> None:
        self._pass(f"after {name}")

    def _pass(self, name: str, first: Any = lambda: None) -> None:
        if getattr(self._thread, "uncounted", False):
            return
        if threading.current_thread().name == "ucmcache-collector":
            name += " while collecting"
        with self._lock:
            self.names.append(name)
            if len(self.names) - 1 == self._point:
                first()
                _kill(os.getpid(), self._signal)


def _half(fd: int, data: Any) -> None:
    """Half of a write, for a process that then dies; in whole pages, as one around the page cache must be."""
    half = sum(map(len, data)) // 2
    _writev(fd, front(data, half // 4096 * 4096 or half))


def main() -> None:
    """Serve until standard input ends."""
    from tests.crash.scenarios import SCENARIOS

    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            status = 1
            say("began")
            try:
                points = Points(request["point"], request["signal"])
                with watched(points.before, points.after):
                    SCENARIOS[request["scenario"]](Path(request["root"]), points)
                say(f"points {json.dumps(points.names)}")
                status = 0
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(status)
        _, code = os.waitpid(pid, 0)
        _write(1, f"{pid} ended {os.waitstatus_to_exitcode(code)}\n".encode())


# -- the side of the tests --------------------------------------------------------------------------------------------


@dataclass
class Child:
    """A child of the zygote, as the test sees it."""

    pid: int
    zygote: Zygote
    reports: list[str] = field(default_factory=list)

    def end(self) -> int:
        """Wait for its end and read all that it reported; the exit status, negative for a signal."""
        while True:
            pid, report = self.zygote.read()
            assert pid == self.pid, (pid, report)
            if report.startswith("ended "):
                return int(report.split()[1])
            self.reports.append(report)

    def wait_for(self, report: str) -> None:
        """Read on until it reports just this."""
        while not self.reports or self.reports[-1] != report:
            pid, text = self.zygote.read()
            assert pid == self.pid and not text.startswith("ended "), (pid, text, self.reports)
            self.reports.append(text)

    def wait_stopped(self) -> None:
        """Return when a signal has stopped it."""
        deadline_s = time.monotonic() + 30
        while Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline_s
            time.sleep(0.002)


class Zygote:
    """A running zygote. One child at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            text=True,
        )

    def fork(self, scenario: str, root: Path, point: int, signal: int) -> Child:
        """A child that runs `scenario` on `root`, and at number `point` of its points (-1: never) gets `signal`."""
        assert self._process.stdin is not None
        request = {"scenario": scenario, "root": str(root), "point": point, "signal": signal}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        pid, report = self.read()
        assert report == "began"
        return Child(pid, self)

    def read(self) -> tuple[int, str]:
        """The next line: who, and what."""
        assert self._process.stdout is not None
        pid, _, report = self._process.stdout.readline().rstrip("\n").partition(" ")
        return int(pid), report

    def close(self) -> None:
        """End it; no child may be left."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(30)


if __name__ == "__main__":
    main()
