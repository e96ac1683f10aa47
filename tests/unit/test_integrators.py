"""docs/integrators.md, step by step: its code blocks are what is run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "integrators.md").read_text()


def block(start: str) -> str:
    """The code block of the page that begins with this line."""
    found = [text for text in re.findall(r"```\w+\n(.*?)```", PAGE, re.DOTALL) if text.startswith(start)]
    assert len(found) == 1
    return str(found[0])


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with the page's package and its check."""
    (tmp_path / "strided_model").mkdir()
    (tmp_path / "strided_model" / "__init__.py").touch()
    (tmp_path / "strided_model" / "rows.py").write_text(block("# strided_model/rows.py"))
    (tmp_path / "check_rows.py").write_text(block("# check_rows.py"))
    return tmp_path


def install(package: Path, entry_point: str) -> None:
    """What an installer leaves of the page's entry point."""
    section, line = block("# pyproject.toml").splitlines()[1:3]
    assert section == '[project.entry-points."ucmcache.spec_rows"]'
    name, value = line.replace('"', "").split(" = ")
    folder = package / "strided_model-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: strided_model\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(f"[ucmcache.spec_rows]\n{name} = {entry_point or value}\n")


def run(package: Path, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, '.')\n{code}"],
        cwd=package,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_check_prints_what_the_page_says(package: Path) -> None:
    said = re.search(r"It prints `([^`]+)`", PAGE)
    assert said is not None
    done = run(package, (package / "check_rows.py").read_text())
    assert (done.stdout.strip(), done.returncode) == (said[1], 0), done.stderr


@pytest.mark.parametrize("entry_point", ["", "strided_model.later:rows"], ids=["a module", "a function"])
def test_an_entry_point_is_enough(package: Path, entry_point: str) -> None:
    install(package, entry_point)
    (package / "strided_model" / "later.py").write_text("def rows():\n    import strided_model.rows\n")
    code = (package / "check_rows.py").read_text().replace('load_rows(["strided_model.rows"])', "load_rows([])")
    done = run(package, code)
    assert done.stdout.strip() == "chain [0, 64, 832]", done.stderr


def test_without_either_the_engine_is_refused_as_the_page_says(package: Path) -> None:
    code = (package / "check_rows.py").read_text().replace('load_rows(["strided_model.rows"])', "load_rows([])")
    last = run(package, code).stderr.strip().splitlines()[-2:]
    shown = block("ucmcache's spec table").splitlines()
    assert last[0].endswith(shown[0])
    assert last[1].startswith(shown[1].removesuffix(" ...)").rstrip(","))


def test_an_entry_point_that_names_no_function_is_refused(package: Path) -> None:
    install(package, "strided_model.rows:np.pi")
    last = (
        run(package, "from ucmcache.coordinator.spec import load_rows\nload_rows([])").stderr.strip().splitlines()[-1]
    )
    assert 'the entry point "strided_model = strided_model.rows:np.pi" of ucmcache.spec_rows cannot be imported' in last
    assert "it names a float, not a function" in last


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("", 'spec_modules names "strided_model.rows", which cannot be imported (ModuleNotFoundError'),
        ("1 / 0", "cannot be imported (ZeroDivisionError"),
        (
            "from ucmcache.coordinator.spec import Kind, SpecRow, register\n"
            "register(SpecRow('MambaSpec', Kind.NONE, 'mine is better'))",
            "registers a row that is not accepted: there is a row for MambaSpec already",
        ),
    ],
    ids=["missing", "broken", "a duplicate"],
)
def test_rows_that_cannot_be_had_are_named(package: Path, rows: str, message: str) -> None:
    file = package / "strided_model" / "rows.py"
    file.write_text(rows) if rows else file.unlink()
    code = "from ucmcache.coordinator.spec import load_rows\nload_rows(['strided_model.rows'])"
    done = run(package, code)
    assert done.returncode != 0
    assert f"ConfigError: {'' if rows else message}" in done.stderr
    assert message in done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("last_line", "error"), [("1 / 0", "ZeroDivisionError"), ("register(SpecRow('X', 0, ''))", "not accepted")]
)
def test_rows_that_failed_leave_nothing_behind(package: Path, last_line: str, error: str) -> None:
    """The next try says the same, and with the mistake gone it succeeds."""
    file = package / "strided_model" / "rows.py"
    file.write_text(f"{(right := file.read_text())}\n{last_line}\n")
    code = f"""
from pathlib import Path
from ucmcache.coordinator.spec import SPEC_TABLE, load_rows
sys.dont_write_bytecode = True
for _ in range(3):
    try:
        load_rows(["strided_model.rows"])
        print("loaded", "StridedWindowSpec" in SPEC_TABLE)
    except Exception as error:
        print({error!r} in str(error), "StridedWindowSpec" in SPEC_TABLE)
    if _:
        Path("strided_model/rows.py").write_text({right!r})
"""
    done = run(package, code)
    assert done.stdout.splitlines() == ["True False", "True False", "loaded True"], done.stderr


def test_an_engine_with_the_row_resumes(package: Path, tmp_path: Path) -> None:
    """Both roles of the connector load the modules that the configuration names."""
    settings = json.loads(block('{"spec_modules"'))
    code = """
import logging
logging.disable(logging.INFO)
from pathlib import Path
sys.path.insert(0, ROOT)
from tests.sim.engine import Group, SimEngine, config_folder
from ucmcache.coordinator.spec import SPEC_TABLE
assert "StridedWindowSpec" not in SPEC_TABLE
engine = SimEngine([Group("full", 8)], config_folder("llama", Path("models")), SETTINGS)
assert "StridedWindowSpec" in SPEC_TABLE
prompt = list(range(40))
for _ in range(2):
    assert engine.generate(f"r{_}", prompt) == SimEngine.expected(prompt, 4)
    engine.reset_local()
print("adopted", engine.counts["adopted_tokens"])
"""
    done = run(package, f"ROOT = {str(Path(__file__).parents[2])!r}\nSETTINGS = {settings!r}\n{code}")
    assert done.stdout.strip().splitlines()[-1] == "adopted 32", done.stderr[-2000:]


def test_a_group_of_the_engine_with_such_layers_is_bound(package: Path) -> None:
    """With a real class of vLLM's, alone and in a group of several layers."""
    code = """
from dataclasses import dataclass, replace
import torch
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheGroupSpec, UniformTypeKVCacheSpecs
from ucmcache.connector.layout import Storages, content_text, group_facts, unit_map
from ucmcache.coordinator.binding import bind
from ucmcache.coordinator.spec import load_rows
from ucmcache.errors import UnsupportedModelError

@dataclass(frozen=True, kw_only=True)
class StridedWindowSpec(AttentionSpec):
    window_tokens: int
    stride_tokens: int

spec = StridedWindowSpec(
    block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float16, window_tokens=128, stride_tokens=64
)
load_rows(["strided_model.rows"])

def bound(*specs):
    names = [f"layer{i}" for i in range(len(specs))]
    uniform = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=dict(zip(names, specs)))
    group = KVCacheGroupSpec(names, specs[0] if len(specs) == 1 else uniform)
    return bind([group_facts(0, group, content_text(group, unit_map({}, [], 1, Storages())))])[0]

for row in (bound(spec), bound(spec, spec)):
    print(row.name, row.block_tokens, dict(row.figures), row.spec.votes)
try:
    bound(spec, replace(spec, stride_tokens=32))
except UnsupportedModelError as error:
    print(error)
"""
    lines = run(package, code).stdout.strip().splitlines()
    figures = {"window_tokens": 128, "stride_tokens": 64}
    assert lines[-3:-1] == [f"0:StridedWindowSpec 16 {figures} True"] * 2
    assert lines[-1].startswith("layers of one KV cache group differ in stride_tokens ({'layer0': 64, 'layer1': 32})")
