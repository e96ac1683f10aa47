"""Imports point one way (architecture section 1), and the core needs neither vllm nor torch."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "ucmcache"

# folder or file -> what it may import of ucmcache, besides itself
MAY_IMPORT = {
    "errors": set(),
    "keys": {"errors"},
    "config": {"errors"},
    "store": {"errors", "keys", "config"},
    "coordinator": {"errors", "keys", "config", "store"},
    "registry": {"errors", "keys", "config", "store"},
    "connector": {"errors", "keys", "config", "store", "coordinator", "registry"},
    "demo": {"errors", "keys", "config"},
    "cli": {"errors", "keys", "config", "store", "coordinator", "registry", "demo"},
    "__init__": {"connector"},
}
# Engines are started only by the demo's child processes, which are programs of their own.
ENGINE_FOLDERS = {"connector", "demo"}


def imports() -> list[tuple[str, str, str]]:
    """(file, its part, imported module) for every import statement of the library."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: relative import"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [("/".join(parts), parts[0], name) for name in names]
    return found


def test_imports_point_one_way() -> None:
    wrong = []
    for file, part, name in imports():
        if name.startswith("ucmcache."):
            target = name.split(".")[1]
            if target in ("__version__",):
                continue
            if target != part and target not in MAY_IMPORT[part]:
                wrong.append(f"{file} imports {name}")
    assert not wrong


def test_only_the_edge_imports_the_engine() -> None:
    wrong = [
        f"{file} imports {name}"
        for file, part, name in imports()
        if name.split(".")[0] in ("vllm", "torch", "transformers") and part not in ENGINE_FOLDERS
    ]
    assert not wrong


@pytest.mark.parametrize("module", ["ucmcache", "ucmcache.cli", "ucmcache.config", "ucmcache.coordinator.coordinator"])
def test_imports_without_vllm_and_torch(module: str) -> None:
    code = f"import sys\nfor name in ('vllm', 'torch', 'transformers'): sys.modules[name] = None\nimport {module}\n"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_importing_the_package_loads_no_dependency() -> None:
    """What makes `import ucmcache` fast: it loads nothing beyond the standard library."""
    code = (
        "import sys; before = set(sys.modules); import ucmcache\n"
        "heavy = {'numpy', 'pydantic', 'typer', 'rich', 'xxhash', 'torch', 'vllm'} & (set(sys.modules) - before)\n"
        "sys.exit(', '.join(sorted(heavy)) or 0)"
    )
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    print(f"import ucmcache, interpreter start included: {time.perf_counter() - started:.3f} s")
