"""The operator's JSON: what is accepted, what is refused and how, and the memory that it is measured against."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ucmcache import config
from ucmcache.config import (
    GIB,
    KIB,
    MIB,
    TIB,
    Config,
    available_host_bytes,
    format_duration,
    format_size,
    load_config,
    parse_duration_s,
    parse_size_bytes,
)
from ucmcache.errors import ConfigError

EXAMPLE = """{"host": {"blocks": "2GiB", "snapshots": "1GiB"},
 "backend": {"url": "file:///path", "capacity": "200GiB", "deadline": "10s", "existence_ttl": "30s",
             "when_slow": "recompute"},
 "retention": {"interval_tokens": 8192},
 "sessions": {"entries": 8, "mode": "keep-current", "ttl": "30min", "quota": "10GiB"},
 "namespace": "tenant-a", "promise_deadline": "2s",
 "spec_modules": ["my_package.rows"]}"""

START = "kv_connector_extra_config cannot be used: "
SIZE = "a size with one of the units B, KiB, MiB, GiB, TiB, KB, MB, GB, TB, or a whole number of bytes"
DURATION = "a positive duration with one of the units h, min, s, ms, or a positive number of seconds"
NAMESPACE = "a name of 1 to 200 characters, none of them a control character"
TOKENS = "a number of tokens from 1, or null to keep all"
SETTINGS = (
    "host.blocks, host.snapshots, backend.url, backend.capacity, backend.deadline, backend.existence_ttl, "
    "backend.when_slow, retention.interval_tokens, sessions.entries, sessions.mode, sessions.ttl, sessions.quota, "
    "namespace, promise_deadline, spec_modules"
)


def refusal(raw: dict[Any, Any]) -> str:
    """The message with which settings are refused."""
    with pytest.raises(ConfigError) as caught:
        load_config(raw)
    return str(caught.value)


# -- what is accepted -------------------------------------------------------------------------------------------------


def test_the_documented_example() -> None:
    settings = load_config(json.loads(EXAMPLE))
    assert settings.host.blocks_bytes == 2 * GIB
    assert settings.host.snapshots_bytes == GIB
    assert settings.backend is not None
    assert settings.backend.url == "file:///path"
    assert settings.backend.capacity_bytes == 200 * GIB
    assert settings.retention.interval_tokens == 8192
    assert settings.namespace == "tenant-a"
    assert settings.promise_deadline_s == 2.0
    assert settings.spec_modules == ("my_package.rows",)
    assert settings.effective() == json.loads(EXAMPLE)
    assert config.__doc__ is not None
    assert "".join(EXAMPLE.split()) in "".join(config.__doc__.split())


def test_defaults() -> None:
    settings = load_config({})
    assert settings == Config()
    assert (settings.host.blocks_bytes, settings.host.snapshots_bytes) == (2 * GIB, GIB)
    assert settings.backend is None
    assert settings.retention.interval_tokens == 8192
    assert settings.namespace == "default"
    assert settings.promise_deadline_s == 2.0
    assert settings.effective() == {
        "host": {"blocks": "2GiB", "snapshots": "1GiB"},
        "backend": None,
        "retention": {"interval_tokens": 8192},
        "sessions": {"entries": 0, "mode": "keep-current", "ttl": "30min", "quota": None},
        "namespace": "default",
        "promise_deadline": "2s",
        "spec_modules": [],
    }


def test_a_section_given_in_part_keeps_the_other_defaults() -> None:
    assert load_config({"host": {"snapshots": 0}}).host.blocks_bytes == 2 * GIB
    backend = load_config({"backend": {"url": "memory:"}}).backend
    assert backend is not None
    assert backend.capacity_bytes is None


def test_the_tree_is_frozen() -> None:
    settings = load_config({})
    with pytest.raises(ValidationError, match="frozen"):
        settings.namespace = "other"
    with pytest.raises(ValidationError, match="frozen"):
        settings.host.blocks_bytes = 1


@pytest.mark.parametrize(
    ("given", "size_bytes"),
    [
        (0, 0),
        (4096, 4096),
        ("0B", 0),
        ("7B", 7),
        ("1KiB", KIB),
        ("1MiB", MIB),
        ("1GiB", GIB),
        ("1TiB", TIB),
        ("1KB", 10**3),
        ("1MB", 10**6),
        ("1GB", 10**9),
        ("1TB", 10**12),
        ("1.5GiB", 3 * GIB // 2),
        ("0.1KiB", 102),
        (" 2 GiB ", 2 * GIB),
        ("9007199254740993B", 9007199254740993),  # one more than a float can tell
    ],
)
def test_sizes(given: object, size_bytes: int) -> None:
    assert parse_size_bytes(given) == size_bytes
    assert load_config({"host": {"blocks": given}}).host.blocks_bytes == size_bytes


NO_SIZES: list[object] = [
    -1, 1.0, 1.5, True, None, [], {}, "", "GiB", "1", "-1GiB", "1gib", "1Gib", "1G", "1Gi", "1e3B", "1,5GiB", "1.GiB",
    ".5GiB", "1GiB2", "1 G iB", "٣GiB", "1GiB\0", "9" * 5000 + "B",
]  # fmt: skip


@pytest.mark.parametrize("given", NO_SIZES, ids=lambda given: repr(given)[:12])
def test_no_sizes(given: object) -> None:
    shown = json.dumps(given, ensure_ascii=False)
    if len(shown) > 80:
        shown = shown[:80] + "..."
    expected = f'{START}host.blocks is {shown}; accepted is {SIZE} — write, for example, "2GiB"'
    assert refusal({"host": {"blocks": given}}) == expected


@pytest.mark.parametrize(
    ("given", "duration_s"),
    [("250ms", 0.25), ("2s", 2.0), ("30min", 1800.0), ("1h", 3600.0), (" 1.5 s ", 1.5), ("1.1ms", 0.0011), (2, 2.0),
     (0.5, 0.5)],
)  # fmt: skip
def test_durations(given: object, duration_s: float) -> None:
    assert parse_duration_s(given) == duration_s
    assert load_config({"promise_deadline": given}).promise_deadline_s == duration_s


NO_DURATIONS: list[object] = [
    0, -1, 0.0, True, None, [], math.nan, math.inf, -math.inf, 10**400, "", "2", "0s", "0.0ms", "-1s", "2S", "2sec",
    "2m", "1d", "1h30min", "9" * 400 + "h", "9" * 5000 + "h", f"0.{'0' * 400}1ms",
]  # fmt: skip


@pytest.mark.parametrize("given", NO_DURATIONS, ids=lambda given: repr(given)[:12])
def test_no_durations(given: object) -> None:
    message = refusal({"promise_deadline": given})
    assert message.startswith(f"{START}promise_deadline is ")
    assert message.endswith(f'; accepted is {DURATION} — write, for example, "2s"')


@pytest.mark.parametrize(
    ("given", "problems"),
    [
        ("my_package.rows", ['spec_modules is "my_package.rows"']),
        (None, ["spec_modules is null"]),
        ([1], ["spec_modules[0] is 1"]),
        (["a.b", "a b", "c", "a."], ['spec_modules[1] is "a b"', 'spec_modules[3] is "a."']),
        (["a\n"], ['spec_modules[0] is "a\\n"']),
        (["1a"], ['spec_modules[0] is "1a"']),
        ([""], ['spec_modules[0] is ""']),
    ],
)
def test_no_modules(given: object, problems: list[str]) -> None:
    rest = '; accepted is a list of the names of modules that register rows — write, for example, ["my_package.rows"]'
    start = START if len(problems) == 1 else f"{START}{len(problems)} problems\n  "
    assert refusal({"spec_modules": given}) == start + "\n  ".join(problem + rest for problem in problems)


@given(st.integers(0, 2**80))
def test_a_size_survives_being_written(size_bytes: int) -> None:
    assert parse_size_bytes(format_size(size_bytes)) == size_bytes
    assert parse_size_bytes(size_bytes) == size_bytes


@given(st.integers(0, 10**6), st.integers(0, 999), st.sampled_from(["B", "KiB", "MiB", "GiB", "TiB", "KB", "MB", "TB"]))
def test_a_fractional_size_is_rounded_down(whole: int, thousandths: int, unit: str) -> None:
    factor = parse_size_bytes(f"1{unit}")
    assert parse_size_bytes(f"{whole}.{thousandths:03} {unit}") == (whole * 1000 + thousandths) * factor // 1000


@given(st.floats(min_value=0, exclude_min=True, allow_infinity=False))
def test_a_duration_survives_being_written(duration_s: float) -> None:
    assert parse_duration_s(format_duration(duration_s)) == duration_s


@given(st.integers(1, 10**9), st.sampled_from(["ms", "s", "min", "h"]))
def test_a_whole_duration_is_written_with_a_unit(count: int, unit: str) -> None:
    duration_s = parse_duration_s(f"{count}{unit}")
    written = format_duration(duration_s)
    assert isinstance(written, str)
    assert parse_duration_s(written) == duration_s


def test_spellings() -> None:
    sizes = {0: "0B", 1: "1B", 1000: "1KB", KIB: "1KiB", 1536 * MIB: "1536MiB", 200 * 10**9: "200GB", 3 * TIB: "3TiB"}
    assert {size_bytes: format_size(size_bytes) for size_bytes in sizes} == sizes
    durations = {0.25: "250ms", 2.0: "2s", 90.0: "90s", 1800.0: "30min", 7200.0: "2h", 1 / 3: 1 / 3, 1e-9: 1e-9}
    assert {duration_s: format_duration(duration_s) for duration_s in durations} == durations


SIZES = st.one_of(st.integers(0, 2**60), st.builds("{}GiB".format, st.integers(0, 10**6)))


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "host": st.fixed_dictionaries({}, optional={"blocks": SIZES, "snapshots": SIZES}),
            "backend": st.none()
            | st.fixed_dictionaries({"url": st.text(max_size=20)}, optional={"capacity": st.none() | st.just("5GB")}),
            "retention": st.fixed_dictionaries({}, optional={"interval_tokens": st.none() | st.integers(1)}),
            "namespace": st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=200),
            "promise_deadline": st.floats(min_value=1e-9, max_value=1e9),
            "spec_modules": st.lists(st.from_regex(r"[a-z_]+(\.[a-z_]+)?", fullmatch=True), max_size=3),
        },
    )
)
def test_effective_values_read_back_to_the_same_tree(raw: dict[str, Any]) -> None:
    settings = load_config(raw)
    assert load_config(json.loads(json.dumps(settings.effective()))) == settings


# -- what is refused --------------------------------------------------------------------------------------------------

REFUSALS: list[tuple[dict[Any, Any], str]] = [
    ({"namespace": ""}, f'namespace is ""; accepted is {NAMESPACE} — write, for example, "tenant-a"'),
    ({"namespace": "a\nb"}, f'namespace is "a\\nb"; accepted is {NAMESPACE} — write, for example, "tenant-a"'),
    ({"namespace": "a\x7f"}, f'namespace is "a\\x7f"; accepted is {NAMESPACE} — write, for example, "tenant-a"'),
    ({"namespace": "\ud800"}, f'namespace is "\\ud800"; accepted is {NAMESPACE} — write, for example, "tenant-a"'),
    ({"namespace": 3}, f'namespace is 3; accepted is {NAMESPACE} — write, for example, "tenant-a"'),
    (
        {"namespace": "n" * 201},
        f'namespace is "{"n" * 79}...; accepted is {NAMESPACE} — write, for example, "tenant-a"',
    ),
    *(
        (
            {"retention": {"interval_tokens": given}},
            f"retention.interval_tokens is {shown}; accepted is {TOKENS} — write, for example, 8192",
        )
        for given, shown in [(0, "0"), (-8, "-8"), (1.0, "1.0"), ("8192", '"8192"'), (True, "true")]
    ),
    (
        {"backend": {"capacity": "200GiB"}},
        'backend.url is missing (backend is {"capacity": "200GiB"}); accepted is the URL of a backend — add it, as in '
        '"file:///path/of/a/directory", or drop backend',
    ),
    (
        {"backend": {"url": None}},
        'backend.url is null; accepted is the URL of a backend — write, for example, "file:///path/of/a/directory"',
    ),
    (
        {"backend": {"url": "memory:", "capacity": 0}},
        f'backend.capacity is 0; accepted is {SIZE}, above 0, or null for no limit — write, for example, "200GiB"',
    ),
    (
        {"host": 5},
        'host is 5; accepted is an object with the keys blocks, snapshots — write, for example, {"blocks": "2GiB"}',
    ),
    (
        {"backend": "file:///path"},
        'backend is "file:///path"; accepted is an object with the keys url, capacity, deadline, existence_ttl, '
        "when_slow — write, for example, "
        '{"url": "file:///path/of/a/directory"}',
    ),
    (
        {"retention": None},
        "retention is null; accepted is an object with the keys interval_tokens — write, for example, "
        '{"interval_tokens": 8192}',
    ),
    ({"host": {"block": "2GiB"}}, 'host.block is no setting (here it is "2GiB"); did you mean "host.blocks"?'),
    ({"zzz": 1}, f"zzz is no setting (here it is 1); accepted are {SETTINGS} — remove it"),
    ({7: 1}, f"7 is no setting (here it is 7); accepted are {SETTINGS} — remove it"),
    ({"zz\nz": object}, f"zz\\nz is no setting (here it is <class 'object'>); accepted are {SETTINGS} — remove it"),
    (
        {"host.blocks": "1GiB"},
        'host.blocks is no setting (here it is "1GiB"); accepted are nested objects — write, for example, '
        '{"host": {"blocks": "2GiB"}}',
    ),
]


@pytest.mark.parametrize(("raw", "message"), REFUSALS, ids=lambda value: str(value)[:30])
def test_refusals(raw: dict[Any, Any], message: str) -> None:
    assert refusal(raw) == START + message


@pytest.mark.parametrize(
    ("raw", "nearest"),
    [
        ({"capacity": "1GiB"}, "backend.capacity"),
        ({"url": "memory:"}, "backend.url"),
        ({"blocks": "1GiB"}, "host.blocks"),
        ({"interval_tokens": 5}, "retention.interval_tokens"),
        ({"retention": {"interval": 5}}, "retention.interval_tokens"),
        ({"backend": {"url": "memory:", "snapshots": "1GiB"}}, "host.snapshots"),
        ({"host": {"capacity": "1GiB"}}, "backend.capacity"),
        ({"host": {"host": {}}}, "host.blocks"),
        ({"Host": {}}, "host"),
        ({"name_space": "a"}, "namespace"),
        ({"promise-deadline": "2s"}, "promise_deadline"),
        # The attributes' names are not the JSON names.
        ({"host": {"blocks_bytes": 1}}, "host.blocks"),
        ({"promise_deadline_s": 2}, "promise_deadline"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_an_unknown_name_gets_the_nearest_known_one(raw: dict[str, Any], nearest: str) -> None:
    assert refusal(raw).endswith(f'; did you mean "{nearest}"?')


def test_all_problems_are_listed_at_once() -> None:
    raw = {"host": {"blocks": "2gb", "snapshot": 1}, "backend": {}, "namespace": "", "promise_deadline": 0, "zzz": 1}
    first, *problems = refusal(raw).splitlines()
    assert first == START + "6 problems"
    assert [problem.split(" is ")[0] for problem in problems] == [
        "  host.blocks", "  host.snapshot", "  backend.url", "  namespace", "  promise_deadline", "  zzz",
    ]  # fmt: skip


def test_every_setting_can_be_explained() -> None:
    for path, (field, section) in config._SETTINGS.items():
        assert section is not None or field.description, path
        assert field.examples, path
        assert "." not in path.partition(".")[2], "messages about a dotted key know two levels"


def test_every_example_is_accepted() -> None:
    for path, (field, _) in config._SETTINGS.items():
        section, _, name = path.partition(".")
        [example] = field.examples or []
        load_config({section: {"url": "memory:"} | {name: example} if section == "backend" else {name: example}}
                    if name else {section: example})  # fmt: skip


# -- memory -----------------------------------------------------------------------------------------------------------


def test_what_fits_is_accepted_to_the_byte() -> None:
    load_config({}).check_fits(3 * GIB)
    load_config({"host": {"blocks": 0, "snapshots": 0}}).check_fits(-1)
    with pytest.raises(ConfigError):
        load_config({}).check_fits(3 * GIB - 1)


def test_what_does_not_fit_is_refused_with_the_figures() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({}).check_fits(3 * GIB // 2 + 5)
    assert str(caught.value) == (
        "host.blocks is 2GiB and host.snapshots 1GiB, together 3GiB; accepted is at most what the host has available, "
        '1536MiB — the largest that fits, at this ratio, is "host": {"blocks": "1GiB", "snapshots": "512MiB"}'
    )


@given(st.integers(0, 2**50), st.integers(0, 2**50), st.integers(-5, 2**50))
def test_the_suggested_sizes_fit(blocks_bytes: int, snapshots_bytes: int, available_bytes: int) -> None:
    try:
        load_config({"host": {"blocks": blocks_bytes, "snapshots": snapshots_bytes}}).check_fits(available_bytes)
    except ConfigError as error:
        suggested = json.loads(str(error).partition('"host": ')[2])
        load_config({"host": suggested}).check_fits(available_bytes)
    else:
        assert blocks_bytes + snapshots_bytes <= max(0, available_bytes)


def write(file: Path, text: object) -> None:
    """A kernel file, with its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with 8 GiB available and no control groups."""
    write(tmp_path / "proc/meminfo", f"MemTotal: 99 kB\nMemAvailable:    {8 * GIB // KIB} kB\nHugePages_Total: 0")
    return tmp_path


def v2_group(root: Path, path: str, limit: object, used_bytes: int, cache_bytes: int = 0) -> None:
    """A control group of version 2."""
    write(root / "sys/fs/cgroup" / path / "memory.max", limit)
    write(root / "sys/fs/cgroup" / path / "memory.current", used_bytes)
    write(root / "sys/fs/cgroup" / path / "memory.stat", f"anon 1\ninactive_file {cache_bytes}")


def test_memory_without_control_groups(root: Path) -> None:
    assert available_host_bytes(root) == 8 * GIB


def test_memory_in_a_group_of_version_2(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/slice/job")
    v2_group(root, "slice/job", 4 * GIB, 3 * GIB, cache_bytes=GIB)
    assert available_host_bytes(root) == 2 * GIB
    v2_group(root, "slice", 5 * GIB, 4 * GIB)  # a parent with less room
    assert available_host_bytes(root) == GIB
    v2_group(root, "slice", "max", 4 * GIB)
    assert available_host_bytes(root) == 2 * GIB
    v2_group(root, "slice/job", 4 * GIB, 5 * GIB)
    assert available_host_bytes(root) == 0


def test_memory_in_a_container_that_sees_only_its_own_group(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/system.slice/container-of-the-host")
    v2_group(root, "", 2 * GIB, GIB)
    assert available_host_bytes(root) == GIB


def test_memory_in_a_group_of_version_1(root: Path) -> None:
    write(root / "proc/self/cgroup", "5:cpu,cpuacct:/other\n4:memory:/job\n0::/")
    group = root / "sys/fs/cgroup/memory"
    for folder, limit in ((group, 2**63 - 4096), (group / "job", 4 * GIB)):
        write(folder / "memory.limit_in_bytes", limit)
        write(folder / "memory.usage_in_bytes", 2 * GIB)
        write(folder / "memory.stat", f"inactive_file 1\ntotal_inactive_file {GIB}")
    assert available_host_bytes(root) == 3 * GIB


def test_memory_of_another_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = {"SC_PHYS_PAGES": 1000, "SC_AVPHYS_PAGES": 400, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    monkeypatch.setattr(os, "sysconf_names", dict.fromkeys(pages, 0))
    assert available_host_bytes(tmp_path) == 400 * 4096
    monkeypatch.setattr(os, "sysconf_names", dict.fromkeys(["SC_PHYS_PAGES", "SC_PAGE_SIZE"], 0))
    assert available_host_bytes(tmp_path) == 1000 * 4096


def test_memory_of_this_machine() -> None:
    assert 0 < available_host_bytes() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
