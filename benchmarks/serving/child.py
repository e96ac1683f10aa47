"""An engine process whose steps and connector hooks are timed.

`python -m serving.child FD` reads a job, then actions, as JSON lines from stdin; it writes results as JSON lines to FD.
Jobs and actions are those of `ucmcache.demo.engine`, with `connector` to take it out and put it back, and `sessions` to
have it keep them or not; so is the start of every engine: warm-up, then a pause.
"""

import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from _common import Neighbours

from serving.breakdown import Step, phases
from ucmcache.demo.engine import Action, Result, _Engine

_IDLE_S = 0.001  # vLLM's engine process sleeps so long after a step that computed nothing (EngineCoreProc)


class _Hooks:
    """Time inside a connector's hooks, both roles; a hook that calls another one counts once."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self.load_s = 0.0
        self._depth = 0

    def time(self, connector: Any) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

        for name in dir(KVConnectorBase_V1):
            if not name.startswith("_") and inspect.isfunction(inspect.getattr_static(connector, name)):
                setattr(connector, name, self._timed(getattr(connector, name), name == "start_load_kv"))

    def _timed(self, hook: Callable[..., Any], loads: bool) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            started = time.perf_counter()
            try:
                return hook(*args, **kwargs)
            finally:
                taken_s = time.perf_counter() - started
                self._depth -= 1
                if self._depth == 0:
                    self.total_s += taken_s
                    self.load_s += taken_s if loads else 0.0

        return timed


class _TimedEngine(_Engine):
    """The demo's engine; each result of `generate` also tells its steps and where its time to the first token went."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        from vllm.distributed.kv_transfer import kv_transfer_state

        super().__init__(job)
        self._steps: list[Step] = []
        self._tokens = 0
        self._sessions: Any = None
        self._hooks = _Hooks()
        self._connectors = self._core.scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT
        for connector in filter(None, self._connectors):
            self._hooks.time(connector)
        schedule, step = self._core.scheduler.schedule, self._engine.step

        def counted_schedule(*args: Any) -> Any:
            output = schedule(*args)
            self._tokens = output.total_num_scheduled_tokens
            return output

        def timed_step() -> Any:
            self._tokens, hooks_s, load_s = 0, self._hooks.total_s, self._hooks.load_s
            started = time.perf_counter()
            outputs = step()
            if not self._tokens and self._core.scheduler.has_requests():
                time.sleep(_IDLE_S)
            taken_s = time.perf_counter() - started
            hooks_s, load_s = self._hooks.total_s - hooks_s, self._hooks.load_s - load_s
            self._steps.append(Step(started, taken_s, self._tokens, hooks_s, load_s))
            return outputs

        self._core.scheduler.schedule = counted_schedule
        self._engine.step = timed_step

    def generate(self, arguments: Mapping[str, Any]) -> Result:
        self._steps.clear()
        hooks_s = self._hooks.total_s
        neighbours, began = Neighbours(), time.perf_counter()
        result = super().generate(arguments)
        result["neighbour_cpus"] = neighbours.cpus()
        result["hooks_s"] = self._hooks.total_s - hooks_s
        result["steps"] = [[step.tokens, step.taken_s, step.hooks_s] for step in self._steps]
        result["phases"] = phases(began, result["ttft_s"], self._steps)
        return result

    def act(self, action: Action) -> Result:
        if "connector" in action:
            return {"connector": self._attach(action["connector"])}
        if "sessions" in action:
            return {"sessions": self._keep_sessions(action["sessions"])}
        return super().act(action)

    def _attach(self, wanted: bool) -> Result:
        """Take the connector out of the settled engine, which is then vLLM as it is without one, or put it back.

        Two equal processes differ by several percent in how their memory happens to lie; one process does not.
        """
        from vllm.distributed.kv_transfer import kv_transfer_state

        scheduler, worker = self._connectors if wanted else (None, None)
        self._core.scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT = scheduler, worker
        return {"done": True}

    def _keep_sessions(self, wanted: bool) -> Result:
        """Have the settled engine keep sessions, or none, with those that it kept forgotten."""
        side = self._core.scheduler.connector._scheduler
        if self._sessions is None:
            self._sessions = side._sessions
        self._sessions.registry.reset()
        side._sessions = self._sessions if wanted else None
        return {"done": True}


def main(arguments: list[str]) -> int:
    """Command line of this module: the descriptor to write results to."""
    results_fd = int(arguments[0])
    os.set_inheritable(results_fd, False)
    job = json.loads(sys.stdin.readline())
    with open(results_fd, "w", buffering=1) as results:
        engine = _TimedEngine(job)
        results.write(json.dumps({"ready": engine.ready}) + "\n")
        for line in sys.stdin:
            results.write(json.dumps(engine.act(json.loads(line))) + "\n")
        engine.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
