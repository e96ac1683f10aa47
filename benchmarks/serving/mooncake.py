"""Mooncake as the peer: what is missing to run vLLM's MooncakeStoreConnector, and a master for it."""

import importlib.util
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ucmcache.errors import UcmCacheError


def mooncake_lacks() -> str:
    """What is missing to run MooncakeStoreConnector; empty if nothing is."""
    lacks = []
    if importlib.util.find_spec("mooncake") is None:
        lacks.append("the Python package mooncake-transfer-engine-non-cuda (or a CUDA build of it)")
    else:
        tried = subprocess.run(
            [sys.executable, "-c", "import mooncake.store"], capture_output=True, text=True, check=False
        )
        if tried.returncode != 0:
            why = tried.stderr.strip().splitlines()[-1:] or ["no message"]
            lacks.append(f"a library that mooncake.store needs ({why[0]}; on Debian libibverbs1 librdmacm1 libnuma1)")
    if _mooncake_master() is None:
        lacks.append("the program mooncake_master, which that package brings")
    return " and ".join(lacks)


def _mooncake_master() -> str | None:
    beside = Path(sys.executable).parent / "mooncake_master"
    return str(beside) if beside.exists() else shutil.which("mooncake_master")


@contextmanager
def mooncake_master(folder: Path) -> Iterator[Mapping[str, str]]:
    """A master of its own on free ports; gives the environment that an engine needs to reach it."""
    port, metrics_port = _free_port(), _free_port()
    config = folder / "mooncake.json"
    config.write_text(
        json.dumps(
            {
                "metadata_server": "P2PHANDSHAKE",
                "master_server_address": f"127.0.0.1:{port}",
                "protocol": "tcp",
                "device_name": "",
                "global_segment_size": 2 << 30,
                "local_buffer_size": 512 << 20,
            }
        )
    )
    with (folder / "mooncake_master.log").open("w") as log:
        master = subprocess.Popen(
            [_mooncake_master() or "mooncake_master", "--port", str(port), "--metrics_port", str(metrics_port)],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            _wait_for_port(port)
            yield {
                "MOONCAKE_CONFIG_PATH": str(config),
                "MOONCAKE_REQUESTER_LOCAL_HOSTNAME": "127.0.0.1",
                "VLLM_HOST_IP": "127.0.0.1",
            }
        finally:
            master.terminate()
            try:
                master.wait(timeout=10)
            except subprocess.TimeoutExpired:
                master.kill()
                master.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for_port(port: int) -> None:
    for _ in range(100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise UcmCacheError(f"mooncake_master does not listen on port {port}")
