"""One engine in a process of its own: computes or resumes a fixed prompt, and prints what happened as JSON.

python -m tests.sim.one_run MODEL_FOLDER BACKEND_FOLDER HASH_ALGORITHM
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.sim.engine import Group, SimEngine

PROMPT = list(range(45))
RESUMABLE_TOKENS = 40


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def one_run(model: Path, backend: Path, algorithm: str = "sha256") -> dict[str, Any]:
    """Run the prompt on an engine that hashes with `algorithm`; returns adopted tokens, output and our warnings."""
    from vllm.utils import hashing

    def choose(config: Any) -> None:
        config.cache_config.prefix_caching_hash_algo = algorithm

    warnings = _Warnings()
    logging.getLogger("ucmcache").addHandler(warnings)
    extra = {"host": {"blocks": "4MiB", "snapshots": "4MiB"}, "backend": {"url": backend.as_uri()}}
    try:
        with pytest.MonkeyPatch.context() as patch:
            hash_fn = hashing.get_hash_fn_by_name(algorithm)
            patch.setattr(hashing, "get_hash_fn_by_name", lambda name: hash_fn)
            engine = SimEngine([Group("full", 8)], model, extra, mutate=choose)
        output = engine.generate("one", PROMPT)
        engine.close()
    finally:
        logging.getLogger("ucmcache").removeHandler(warnings)
    return {"adopted": engine.counts.get("adopted_tokens", 0), "output": output, "warnings": warnings.lines}


if __name__ == "__main__":
    print(json.dumps(one_run(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])))
