"""ucmcache: keeps the computed prefixes of hybrid models beyond the GPU, as a vLLM KV connector.

The core imports neither vllm nor torch; `UcmCacheConnector` is resolved on first use.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

__all__ = ["UcmCacheConnector", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "UcmCacheConnector":
        from ucmcache.connector import UcmCacheConnector

        return UcmCacheConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
