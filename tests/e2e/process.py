"""Runs a scenario in a process of its own, which is forked from one that has vLLM imported: that takes seconds.

Forked processes share one seed of Python's hashes. What a `prefix` starts draws its own, as a restarted engine does:
what it finds in the backend depends on no seed (test_edges; tests/sim/test_identity.py for every setting).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_TAIL_LINES = 60
_TIMEOUT_S = 400
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Models this small gain nothing from a second thread, and lose a scheduler's time slice at every barrier as soon
    # as anything else runs on the machine.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def run(scenario: str, arguments: Mapping[str, Any], prefix: Sequence[str] = ()) -> Any:
    """Run a function of tests.e2e.scenarios, by a command that begins with `prefix`; returns its JSON result."""
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log.txt"
        words = (scenario, json.dumps(dict(arguments)), str(result))
        code = _start(words, log, prefix) if prefix else _fork(words, log)
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
        assert code == 0, f"{scenario} ended with {code}:\n{tail}"
        value = json.loads(result.read_text())
        if isinstance(value, dict):
            value["log"] = log.read_text(errors="replace")
        return value


def _start(words: Sequence[str], log: Path, prefix: Sequence[str]) -> int:
    with log.open("w") as output:
        return subprocess.run(
            [*prefix, sys.executable, "-m", "tests.e2e.scenarios", *words],
            cwd=ROOT,
            env={**os.environ, **_ENVIRONMENT},
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=_TIMEOUT_S,
            check=False,
        ).returncode


def _fork(words: Sequence[str], log: Path) -> int | None:
    os.environ.update(_ENVIRONMENT)  # for the server, which starts with the first process and stays
    process = _context().Process(target=_main, args=(words, log))
    process.start()
    process.join(_TIMEOUT_S)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.e2e.preload"])
    return context


def _main(words: Sequence[str], log: Path) -> None:
    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    from tests.e2e import scenarios

    scenarios.main(words)
