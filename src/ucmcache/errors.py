"""The error tree: every exception that ucmcache raises on purpose.

A miss, a refusal and "not yet" are values, never exceptions. An exception means a broken contract, and after start-up
none of these may reach the engine: the connector's worker side catches once per job, counts, and the request is
recomputed.
"""


class UcmCacheError(Exception):
    """Base of everything ucmcache raises on purpose."""


class ConfigError(UcmCacheError, ValueError):
    """A setting that cannot be honoured; the message names the setting, the value, what is accepted, and the fix."""


class UnsupportedModelError(UcmCacheError):
    """A KV cache group that no row of the spec table covers; the message prints the row to add."""


class ContractError(UcmCacheError):
    """A caller broke a documented precondition (a pin released twice, a slot committed that was never reserved)."""


class RecordError(UcmCacheError):
    """Stored bytes that do not prove to be what was asked for. `cause` is a short, countable word."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause = cause


class BackendError(UcmCacheError):
    """A backend operation that failed for a reason of its own (I/O error, full, unreachable)."""


class BackendFullError(BackendError):
    """There is no room for an object now; the backend itself is well, and reads from it go on."""
