"""The operator's settings: the JSON that vLLM passes as `kv_connector_extra_config`, as one frozen tree.

    {"host": {"blocks": "2GiB", "snapshots": "1GiB"},
     "backend": {"url": "file:///path", "capacity": "200GiB", "deadline": "10s", "existence_ttl": "30s",
                 "when_slow": "recompute"},
     "retention": {"interval_tokens": 8192},
     "sessions": {"entries": 8, "mode": "keep-current", "ttl": "30min", "quota": "10GiB"},
     "namespace": "tenant-a", "promise_deadline": "2s",
     "spec_modules": ["my_package.rows"]}

Everything is optional. A setting's `description` says what is accepted and its first `examples` entry shows it; error
messages are made of both, so a new setting needs nothing more than its field.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from ucmcache.errors import ConfigError

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
_SIZE_UNITS = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}
_SIZE_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_DURATION_UNITS = {"h": Fraction(3600), "min": Fraction(60), "s": Fraction(1), "ms": Fraction(1, 1000)}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*")

_SIZE = f"a size with one of the units {', '.join(_SIZE_UNITS)}, or a whole number of bytes"
_DURATION = f"a positive duration with one of the units {', '.join(_DURATION_UNITS)}, or a positive number of seconds"

_NEAR_ENOUGH = 0.6  # of difflib's ratio; below it a suggestion misleads more often than it helps
_SHOWN_CHARS = 80


def _quantity(value: str, units: Mapping[str, int] | Mapping[str, Fraction]) -> Fraction:
    match = _QUANTITY.fullmatch(value)
    if match is None or match[2] not in units:
        raise ValueError("no number with a known unit")
    return Fraction(match[1]) * units[match[2]]


def parse_size_bytes(value: object) -> int:
    """Bytes in `value`: a string such as "1.5GiB", rounded down to whole bytes, or an int. Raises ValueError."""
    if isinstance(value, str):
        return math.floor(_quantity(value, _SIZE_UNITS))
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise ValueError("neither a size nor a number of bytes")


def format_size(size_bytes: int) -> str:
    """The shortest exact spelling of a size; `parse_size_bytes` reads it back."""
    exact = ((size_bytes // factor, unit) for unit, factor in _SIZE_UNITS.items() if size_bytes % factor == 0)
    count, unit = min(exact, key=lambda spelling: spelling[0])
    return f"{count}{unit}"


def parse_duration_s(value: object) -> float:
    """Seconds in `value`: a string such as "250ms", or a number; positive and finite. Raises ValueError."""
    try:
        if isinstance(value, str):
            seconds = float(_quantity(value, _DURATION_UNITS))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            seconds = float(value)
        else:
            raise ValueError("neither a duration nor a number of seconds")
    except OverflowError as error:
        raise ValueError("longer than a float can say") from error
    if not 0 < seconds < math.inf:
        raise ValueError("not positive and finite")
    return seconds


def format_duration(duration_s: float) -> str | float:
    """A duration in the largest unit that spells it exactly, else the seconds; `parse_duration_s` reads it back."""
    for unit, factor in _DURATION_UNITS.items():
        count = round(Fraction(duration_s) / factor)
        if count and float(count * factor) == duration_s:
            return f"{count}{unit}"
    return duration_s


_SizeBytes = Annotated[int, BeforeValidator(parse_size_bytes), PlainSerializer(format_size)]
_DurationS = Annotated[float, BeforeValidator(parse_duration_s), PlainSerializer(format_duration)]


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


_ModuleName = Annotated[str, Field(strict=True, pattern=r"^[^\W\d]\w*(\.[^\W\d]\w*)*$")]


class HostSettings(_Settings):
    """Host memory, over all ranks: for the blocks of chain groups and for the states of recurrent groups."""

    blocks_bytes: _SizeBytes = Field(default=2 * GIB, alias="blocks", description=_SIZE, examples=["2GiB"])
    snapshots_bytes: _SizeBytes = Field(default=GIB, alias="snapshots", description=_SIZE, examples=["1GiB"])

    def of_one_rank(self, ranks: int) -> HostSettings:
        """What each of `ranks` ranks has of it."""
        return HostSettings(blocks=self.blocks_bytes // ranks, snapshots=self.snapshots_bytes // ranks)


class BackendSettings(_Settings):
    """Where prefixes are kept beyond host memory; `capacity_bytes` None is no limit.

    `deadline_s`: how long one call may take before the backend is taken to hang, and is left alone for a while.
    `existence_ttl_s`: for how long it is believed that the backend does not have something; None if nobody else writes
    to it. `when_slow`: whether to load or to recompute what is read more slowly than it is computed.

    Which URLs there are is known to `store.backend.open_backend`, which refuses the others.
    """

    url: str = Field(strict=True, description="the URL of a backend", examples=["file:///path/of/a/directory"])
    capacity_bytes: _SizeBytes | None = Field(
        default=None, alias="capacity", ge=1, description=f"{_SIZE}, above 0, or null for no limit", examples=["200GiB"]
    )
    deadline_s: _DurationS = Field(default=10.0, alias="deadline", description=_DURATION, examples=["10s"])
    existence_ttl_s: _DurationS | None = Field(
        default=30.0, alias="existence_ttl", description=f"{_DURATION}, or null to ask at start only", examples=["30s"]
    )
    when_slow: Literal["recompute", "load"] = Field(
        default="recompute", description='"recompute" or "load"', examples=["recompute"]
    )


class RetentionSettings(_Settings):
    """Which states are kept besides those at the ends of prompts and answers and where requests part.

    One per `interval_tokens`; with None, each that a step leaves on a block boundary.
    """

    interval_tokens: int | None = Field(
        default=8192, strict=True, ge=1, description="a number of tokens from 1, or null to keep all", examples=[8192]
    )


class SessionSettings(_Settings):
    """Conversations that resume at the very token where they stopped (docs/sessions.md); with 0 entries none do.

    `entries`: how many may wait beside those that are on a lane. `mode`: whether one that has left its lane keeps the
    state at its last token, beside the one at the end of its last prompt. `ttl_s`: since it was last used.
    `quota_bytes`: host memory, over all ranks, that the conversations of one cache salt may hold; None is no limit.
    """

    entries: int = Field(default=0, strict=True, ge=0, description="a number from 0, which is off", examples=[8])
    mode: Literal["keep-current", "drop-current"] = Field(
        default="keep-current", description='"keep-current" or "drop-current"', examples=["keep-current"]
    )
    ttl_s: _DurationS = Field(default=1800.0, alias="ttl", description=_DURATION, examples=["30min"])
    quota_bytes: _SizeBytes | None = Field(
        default=None, alias="quota", ge=1, description=f"{_SIZE}, above 0, or null for no limit", examples=["10GiB"]
    )

    @property
    def are_kept(self) -> bool:
        """Whether sessions are on."""
        return self.entries > 0


class Config(_Settings):
    """All settings. `backend` None keeps prefixes in host memory only.

    `promise_deadline_s`: how long a request waits for bytes on their way from the backend before it is computed.
    """

    host: HostSettings = Field(default=HostSettings(), examples=[{"blocks": "2GiB"}])
    backend: BackendSettings | None = Field(default=None, examples=[{"url": "file:///path/of/a/directory"}])
    retention: RetentionSettings = Field(default=RetentionSettings(), examples=[{"interval_tokens": 8192}])
    sessions: SessionSettings = Field(default=SessionSettings(), examples=[{"entries": 8}])
    namespace: str = Field(
        default="default",
        strict=True,
        min_length=1,
        max_length=200,
        pattern=r"^\P{Cc}*$",
        description="a name of 1 to 200 characters, none of them a control character",
        examples=["tenant-a"],
    )
    promise_deadline_s: _DurationS = Field(
        default=2.0, alias="promise_deadline", description=_DURATION, examples=["2s"]
    )

    spec_modules: tuple[_ModuleName, ...] = Field(
        default=(), description="a list of the names of modules that register rows", examples=[["my_package.rows"]]
    )

    def effective(self) -> dict[str, Any]:
        """The values in force, defaults included, as the JSON that `load_config` reads back to an equal tree."""
        return self.model_dump(mode="json", by_alias=True)

    def check_fits(self, available_bytes: int) -> None:
        """Raises ConfigError if host.blocks and host.snapshots together ask for more than `available_bytes`."""
        blocks_bytes, snapshots_bytes = self.host.blocks_bytes, self.host.snapshots_bytes
        asked_bytes, available_bytes = blocks_bytes + snapshots_bytes, max(0, available_bytes)
        if asked_bytes <= available_bytes:
            return
        # Whole MiB, rounded down: short to read, and what the message suggests does fit.
        available_bytes = available_bytes // MIB * MIB
        largest = {
            name: format_size(size_bytes * available_bytes // asked_bytes // MIB * MIB)
            for name, size_bytes in (("blocks", blocks_bytes), ("snapshots", snapshots_bytes))
        }
        raise ConfigError(
            f"host.blocks is {format_size(blocks_bytes)} and host.snapshots {format_size(snapshots_bytes)}, together "
            f"{format_size(asked_bytes)}; accepted is at most what the host has available, "
            f'{format_size(available_bytes)} — the largest that fits, at this ratio, is "host": {json.dumps(largest)}'
        )


def load_config(raw: Mapping[str, Any]) -> Config:
    """The settings in `raw`. Raises one ConfigError that lists every problem, each with its path, value and fix."""
    try:
        return Config.model_validate(dict(raw))
    except ValidationError as error:
        problems = [_problem(details) for details in error.errors(include_url=False)]
        start = "kv_connector_extra_config cannot be used: "
        if len(problems) == 1:
            raise ConfigError(start + problems[0]) from error
        raise ConfigError("\n  ".join([f"{start}{len(problems)} problems", *problems])) from error


def _walk(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo, type[BaseModel] | None]]:
    """Dotted JSON path of every setting, with its field and, for a section, the section's model."""
    for name, field in model.model_fields.items():
        path = prefix + (field.alias or name)
        types = [field.annotation, *get_args(field.annotation)]
        section = next((t for t in types if isinstance(t, type) and issubclass(t, BaseModel)), None)
        yield path, field, section
        if section is not None:
            yield from _walk(section, f"{path}.")


_SETTINGS = {path: (field, section) for path, field, section in _walk(Config)}


def _problem(details: ErrorDetails) -> str:
    path = ".".join(map(str, details["loc"]))
    if details["type"] in ("extra_forbidden", "invalid_key"):
        return _unknown(path, details)
    item = ""
    while path not in _SETTINGS:  # an item of a list
        path, _, index = path.rpartition(".")
        item = f"[{index}]{item}"
    field, section = _SETTINGS[path]
    accepted = field.description
    if section is not None:
        keys = [known.removeprefix(f"{path}.") for known in _SETTINGS if known.startswith(f"{path}.")]
        accepted = f"an object with the keys {', '.join(keys)}"
    example = json.dumps((field.examples or [None])[0])
    if details["type"] == "missing":
        parent = path.rpartition(".")[0]
        start = f"{path} is missing ({parent} is {_shown(details['input'])})"
        return f"{start}; accepted is {accepted} — add it, as in {example}, or drop {parent}"
    return f"{path}{item} is {_shown(details['input'])}; accepted is {accepted} — write, for example, {example}"


def _unknown(path: str, details: ErrorDetails) -> str:
    start = f"{_printable(path)} is no setting (here it is {_shown(details['input'])}); "
    if path in _SETTINGS:  # the path itself, written as if it were a key
        section, _, name = path.partition(".")
        nested = json.dumps({section: {name: (_SETTINGS[path][0].examples or [None])[0]}})
        return f"{start}accepted are nested objects — write, for example, {nested}"
    near = _nearest(path)
    if near is not None:
        return f'{start}did you mean "{near}"?'
    names = ", ".join(known for known, (_, section_model) in _SETTINGS.items() if section_model is None)
    return f"{start}accepted are {names} — remove it"


def _nearest(path: str) -> str | None:
    """The known path most like `path`, as a whole or in its last part, so that a wrong level is recognised too."""

    def alike(one: str, other: str) -> float:
        return difflib.SequenceMatcher(None, one.lower(), other.lower(), autojunk=False).ratio()

    def score(known: str) -> tuple[float, float]:
        whole, last = alike(path, known), alike(path.rpartition(".")[2], known.rpartition(".")[2])
        return max(whole, last), whole

    # The sections around the unknown name are right already.
    best = max((known for known in _SETTINGS if not path.startswith(f"{known}.")), key=score)
    return best if score(best)[0] >= _NEAR_ENOUGH else None


def _printable(text: str) -> str:
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def _shown(value: object) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):  # not JSON: settings built in Python
        text = repr(value)
    text = _printable(text)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def available_host_bytes(root: Path = Path("/")) -> int:
    """Host memory that this process could still take: what the kernel has available, within its control groups' limits.

    Without /proc/meminfo (not Linux) it is the free or else the installed memory. `root` is where /proc and /sys are.
    """
    available_bytes = _table(root / "proc/meminfo").get("MemAvailable:")
    system_bytes = available_bytes * KIB if available_bytes is not None else _sysconf_bytes()
    return max(0, min([system_bytes, *_control_group_rooms(root)]))


def _control_group_rooms(root: Path) -> Iterator[int]:
    """Limit less use, in bytes, of each control group that this process is in; a parent's limit binds as well."""
    mount = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folder, names = mount, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            folder, names = mount / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        parts = Path(path.lstrip("/"))
        # In a container the path may be the host's and not exist here; the mount's own root is then the group.
        for group in [folder / parts, *(folder / parent for parent in parts.parents)]:
            limit, used = _text(group / names[0]).strip(), _text(group / names[1]).strip()
            if limit.isdecimal() and used.isdecimal():  # "max" is no limit
                # File cache that is not in use is given back on demand, so it is not counted as taken.
                yield int(limit) - int(used) + _table(group / "memory.stat").get(names[2], 0)


def _table(file: Path) -> dict[str, int]:
    rows = (line.split() for line in _text(file).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def _text(file: Path) -> str:
    """A kernel file's text; empty if it is not there, as on another system or in another version of control groups."""
    try:
        return file.read_text()
    except OSError:
        return ""


def _sysconf_bytes() -> int:
    names = ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES")
    return os.sysconf(next(name for name in names if name in os.sysconf_names)) * os.sysconf("SC_PAGE_SIZE")
