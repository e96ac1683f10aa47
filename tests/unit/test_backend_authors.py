"""docs/backends.md, step by step: its code blocks are what is run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "backends.md").read_text()


def block(start: str) -> str:
    """The code block of the page that begins with this line."""
    found = [text for text in re.findall(r"```\w+\n(.*?)```", PAGE, re.DOTALL) if text.startswith(start)]
    assert len(found) == 1
    return str(found[0])


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with the page's package, its test, and what an installer leaves of its entry point."""
    (tmp_path / "sqlite_store").mkdir()
    (tmp_path / "sqlite_store" / "__init__.py").touch()
    (tmp_path / "sqlite_store" / "backend.py").write_text(block("# sqlite_store/backend.py"))
    (tmp_path / "test_sqlite_store.py").write_text(block("# test_sqlite_store.py"))
    section, line = block("# pyproject.toml").splitlines()[1:3]
    assert section == '[project.entry-points."ucmcache.backends"]'
    folder = tmp_path / "sqlite_store-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: sqlite_store\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(f"[ucmcache.backends]\n{line.replace(chr(34), '')}\n")
    return tmp_path


def run(package: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=package, capture_output=True, text=True, check=False)


def test_the_example_passes_the_contract(package: Path) -> None:
    done = run(package, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_sqlite_store.py")
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) >= 20
    assert "failed" not in done.stdout


def test_an_operator_names_it_by_its_scheme(package: Path) -> None:
    url = json.loads(block('{"backend"'))["backend"]["url"].replace("/var/cache", str(package))
    code = f"""
from ucmcache.store.backend import open_backend
with_it = open_backend({url!r}, 1 << 20)
with_it.bucket(bytes(16), 0).put(bytes(16), [b"content"])
print(type(with_it).__name__, with_it.used_bytes())
"""
    done = run(package, "-c", code)
    assert done.stdout.split() == ["SqliteBackend", "7"], done.stderr


def test_a_scheme_that_nobody_offers_is_refused_with_those_that_are(package: Path) -> None:
    done = run(package, "-c", "from ucmcache.store.backend import open_backend; open_backend('s3://bucket')")
    assert done.returncode != 0
    assert "accepted are file:///absolute/path and memory:, sqlite: of another package" in done.stderr
