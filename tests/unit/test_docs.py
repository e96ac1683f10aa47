"""The documents say what the code does."""

from __future__ import annotations

import json
import re
from pathlib import Path

from ucmcache.config import load_config
from ucmcache.connector.metrics import LABELS, METRICS

ROOT = Path(__file__).parents[2]


def test_the_operators_page_lists_every_metric_as_it_is() -> None:
    page = (ROOT / "docs" / "operators.md").read_text()
    for name, text in METRICS.items():
        label = f" by `{LABELS[name]}`" if name in LABELS else ""
        assert f"| `{name}`{label} | {text} |" in page


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
        assert rows[name] == ("" if value is None else str(value)), name


def test_the_readme_configuration_is_accepted() -> None:
    readme = (ROOT / "README.md").read_text()
    found = re.search(r"--kv-transfer-config '(\{.*?\n    \})'", readme, re.DOTALL)
    assert found is not None
    config = json.loads(found[1])
    assert config["kv_connector_module_path"] == "ucmcache.connector"
    assert load_config(config["kv_connector_extra_config"]).backend is not None
