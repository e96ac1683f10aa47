"""The engines as the benchmark sees them: which there are, and the process of each, which waits for its next action."""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ucmcache.demo.engine import Action, EngineProcessError, Job, Result, _child_environment, _tail
from ucmcache.demo.run import kv_transfer_config
from ucmcache.errors import UcmCacheError

# In the order in which they are shown.
NAMES = {
    "plain": "vLLM",
    "idle": "vLLM, idle connector",
    "host": "ucmcache, host only",
    "file": "ucmcache, folder",
    "mooncake": "Mooncake",
}
_ANSWER_LIMIT_S = 300.0


class LiveEngine:
    """An engine process that waits for its next action. Raises EngineProcessError when it ends or hangs."""

    def __init__(self, job: Job, environment: Mapping[str, str] | None = None) -> None:
        read_fd, write_fd = os.pipe()
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed by `close`
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "serving.child", str(write_fd)],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            pass_fds=(write_fd,),
            env={**_child_environment(), **(environment or {}), **_import_path()},
            text=True,
            bufsize=1,
        )
        os.close(write_fd)
        self._results = open(read_fd)  # noqa: SIM115
        self._send(asdict(job))
        self._ready = False

    def generate(self, prompt: Sequence[int], max_tokens: int) -> Result:
        """The result of `ucmcache.demo.engine`, with what `serving.child` adds to it."""
        return self._ask({"generate": {"prompt": prompt, "max_tokens": max_tokens}})

    def settle(self) -> float:
        """Until the connector has saved everything; the seconds that it took."""
        return float(self._must({"settle": True})["seconds"])

    def reset_local(self) -> None:
        """Empty vLLM's own prefix cache."""
        self._must({"reset_local": True})

    def attach(self, connector: bool) -> None:
        """Put the connector into the engine, or take it out; between settled requests only."""
        self._must({"connector": connector})

    def keep_sessions(self, wanted: bool) -> None:
        """Have the connector keep sessions, or none; between settled requests only."""
        self._must({"sessions": wanted})

    def wait_ready(self) -> None:
        """Until the engine has started."""
        if not self._ready:
            self._receive()
            self._ready = True

    def close(self) -> None:
        """Let it shut down in order; kill it if it does not."""
        try:
            if self._process.stdin is not None:
                self._process.stdin.close()
            self._process.wait(timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        finally:
            self._results.close()
            self._log.close()

    def _must(self, action: Action) -> Result:
        result = self._ask(action)
        if not result["done"]:
            raise UcmCacheError(f"{next(iter(action))} did not finish; the times after it would mean nothing")
        return result

    def _ask(self, action: Action) -> Result:
        self.wait_ready()
        self._send(action)
        (result,) = self._receive().values()
        return dict(result)

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            if self._process.stdin is not None:
                self._process.stdin.write(json.dumps(message) + "\n")
        except BrokenPipeError:
            pass  # `_receive` says why

    def _receive(self) -> Result:
        timer = threading.Timer(_ANSWER_LIMIT_S, self._process.kill)
        timer.start()
        try:
            line = self._results.readline()
        finally:
            timer.cancel()
        if not line:
            raise EngineProcessError(f"an engine process ended with {self._process.wait()}", _tail(self._log))
        return dict(json.loads(line))


def _import_path() -> Mapping[str, str]:
    """Makes `serving` importable from any working directory."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


@dataclass(frozen=True, slots=True)
class Launcher:
    """Starts the engines, which differ in nothing but the connector."""

    model: Path
    store: Path  # the folder of variant "file"
    max_model_len: int
    mooncake: Mapping[str, str] | None  # the environment that reaches Mooncake's master; None without Mooncake

    def start(self, variant: str) -> LiveEngine:
        """An engine of a variant in NAMES; returns before it is up, so that several can start at once."""
        on_disk = kv_transfer_config(self.store)
        transfer = {
            "plain": None,
            "idle": {
                "kv_connector": "IdleConnector",
                "kv_connector_module_path": "serving.idle_connector",
                "kv_role": "kv_both",
            },
            "host": {**on_disk, "kv_connector_extra_config": {}},
            "file": on_disk,
            "mooncake": {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"},
        }[variant]
        job = Job(
            model=str(self.model),
            actions=(),
            kv_transfer_config=transfer,
            engine_args={"max_model_len": self.max_model_len},
        )
        return LiveEngine(job, self.mooncake if variant == "mooncake" else None)

    def warm_page_cache(self) -> None:
        """Read the folder, so that what is measured after it does not depend on the machine's disk."""
        for path in self.store.rglob("*"):
            if path.is_file():
                path.read_bytes()
