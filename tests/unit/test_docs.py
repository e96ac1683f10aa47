"""The documents say what the code does."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.unit.session_tables import agent_table, capacity_table, modes_table, shapes_table
from ucmcache.config import load_config
from ucmcache.connector.metrics import GAUGES, LABELS, METRICS

ROOT = Path(__file__).parents[2]


def test_the_operators_page_lists_every_metric_as_it_is() -> None:
    page = (ROOT / "docs" / "operators.md").read_text()
    for name, text in METRICS.items():
        label = f" by `{LABELS[name]}`" if name in LABELS else ""
        assert f"| `{name}`{label} | {text} |" in page
    for name, text in GAUGES.items():
        assert f"| `{name}` (now) | {text} |" in page


def test_the_operators_page_lists_every_setting_and_its_default() -> None:
    page = (ROOT / "docs" / "operators.md").read_text()
    rows = dict(re.findall(r"^\| `([a-z_.]+)` \| (?:`([^`]*)`|none) \|", page, re.MULTILINE))
    effective = load_config({"backend": {"url": "file:///x"}}).effective()
    flat = {}
    for name, value in effective.items():
        flat.update({f"{name}.{inner}": v for inner, v in value.items()} if isinstance(value, dict) else {name: value})
    flat["backend.url"] = None
    assert set(flat) <= set(rows)
    for name, value in flat.items():
        assert rows[name] == ("" if value in (None, []) else str(value)), name


def test_the_readme_configuration_is_accepted() -> None:
    readme = (ROOT / "README.md").read_text()
    found = re.search(r"--kv-transfer-config '(\{.*?\n    \})'", readme, re.DOTALL)
    assert found is not None
    config = json.loads(found[1])
    assert config["kv_connector_module_path"] == "ucmcache.connector"
    assert load_config(config["kv_connector_extra_config"]).backend is not None


def test_the_readme_numbers_are_those_of_the_benchmark() -> None:
    readme = (ROOT / "README.md").read_text()
    measured = json.loads((ROOT / "benchmarks" / "results" / "serve.json").read_text())
    rows = {(row["measured"], row["variant"], row.get("case")): row for row in measured["rows"]}
    for variant, case in (
        ("plain", "cold"),
        ("plain", "local"),
        ("file", "host"),
        ("file", "disk"),
        ("mooncake", "host"),
    ):
        row = rows["ttft", variant, case]
        resumed = row["local_tokens"] + row["external_tokens"]
        assert f"| {resumed:,} | {row['ttft_s'] * 1e3:,.0f} ms | {row['over_local']:.2f} |" in readme
        assert row["outputs_equal"]
    for variant in ("plain", "host", "file"):
        row = rows["no_hit", variant, None]
        assert row["outputs_equal"]
        assert f"{row['step_overhead']:+.1%}" in readme
        assert variant == "plain" or f"{row['hooks_share']:.1%}" in readme


def test_the_readme_says_of_policies_what_was_replayed() -> None:
    readme = (ROOT / "README.md").read_text()
    rows = json.loads((ROOT / "benchmarks" / "results" / "policies.json").read_text())["rows"]
    hits: dict[tuple[str, int], dict[str, float]] = {}
    for row in rows:
        if row["states"] is None or row["blocks"] is not None or row["policy"].startswith("Belady"):
            continue
        if row["policy"] == "greedy-dual" and not row["triggers"].endswith("8,192"):
            continue
        best = hits.setdefault((row["trace"], row["states"]), {})
        best[row["policy"]] = max(best.get(row["policy"], 0.0), 100 * row["hit"])
    found = re.findall(
        r"^\| (\w+), ([\d,]+) states \| ([\d.]+)% \| ([\d.]+)% \| ([\d.]+)% \| ([\d.]+)% \((.+)\) \|$", readme, re.M
    )
    assert len(found) == 9
    for trace, states, ours, lru, clock, best_other, name in found:
        measured = hits[trace, int(states.replace(",", ""))]
        others = {policy: hit for policy, hit in measured.items() if policy != "greedy-dual"}
        assert len(others) == 11
        for shown, value in ((ours, measured["greedy-dual"]), (lru, others["LRU"]), (clock, others["CLOCK"])):
            assert shown == f"{value:.1f}"
        assert best_other == f"{max(others.values()):.1f}" == f"{others[name]:.1f}"


def test_the_readme_says_of_limited_blocks_what_was_replayed() -> None:
    readme = (ROOT / "README.md").read_text()
    rows = json.loads((ROOT / "benchmarks" / "results" / "policies.json").read_text())["rows"]
    found = re.findall(r"^\| (\w+), a (\w+) of its blocks \(([\d,]+)\) \| ([\d.]+)% \| ([\d.]+)% \(", readme, re.M)
    assert [part for _, part, *_ in found] == ["tenth", "third"] * 3
    for trace, _, blocks, joint, best in found:
        same = [row for row in rows if (row["trace"], row["blocks"]) == (trace, int(blocks.replace(",", "")))]
        hits = {
            together: max(
                100 * row["hit"] for row in same if row["states"] == 1000 and (row["eviction"] == "joint") == together
            )
            for together in (True, False)
        }
        assert (joint, best) == (f"{hits[True]:.1f}", f"{hits[False]:.1f}")


def test_the_readme_says_of_lookups_what_was_measured() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    measured = json.loads((ROOT / "benchmarks" / "results" / "lookup.json").read_text())
    goals = {goal["name"]: goal["value"] for goal in measured["goals"]}
    assert (
        f"took at most {goals['lookup_1m_s'] * 1e3:.0f} ms, at least {goals['lookup_over_offloading']:.1f} times "
        f"faster than vLLM's OffloadingConnector and {goals['lookup_over_mooncake']:.0f} times faster" in readme
    )
    assert f"at least {goals['repeated_lookup_over_offloading']:.1f} times faster than the former" in readme


def test_the_tables_of_sessions_are_those_of_the_benchmark() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "sessions.json").read_text())["rows"]
    page, readme = (ROOT / "docs" / "sessions.md").read_text(), (ROOT / "README.md").read_text()
    for table in (capacity_table(rows), shapes_table(rows), modes_table(rows)):
        assert table in page
    assert agent_table(rows) in readme
