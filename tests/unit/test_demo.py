"""The demo's pure parts: comparison, rows, goals, exit code, report; and how it talks to an engine process."""

import itertools
import json
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from ucmcache.cli import app
from ucmcache.demo import run
from ucmcache.demo.checkpoints import MARKER_FILE, RECIPES, write_checkpoint
from ucmcache.demo.engine import EngineProcessError, Job, run_engine
from ucmcache.demo.report import Turn, goals_of, render, report_json, verdict
from ucmcache.demo.run import Reference, Settings, assemble_turns, first_difference, kv_transfer_config, run_demo
from ucmcache.errors import ConfigError

TOTALS = {"disk_bytes": 3 * 2**20, "seconds": 61.0, "model": "/models/demo"}
PROVENANCE = {"machine": "m", "commit": "c", "command": "ucmcache demo"}


def turn(**changes: Any) -> Turn:
    values: dict[str, Any] = {
        "turn": "document",
        "prompt_tokens": 8000,
        "resumed_tokens": 7680,
        "ttft_cold_s": 2.0,
        "ttft_local_s": 0.1,
        "ttft_restart_s": 0.12,
        "differs_at": None,
    }
    return Turn(**{**values, **changes})


def generated(tokens: list[int], ttft_s: float = 1.0, external_tokens: int = 0) -> dict[str, Any]:
    return {"prompt_tokens": 8000, "tokens": tokens, "ttft_s": ttft_s, "external_tokens": external_tokens}


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([[1, 2, 3]], None),
        ([[1, 2, 3], [1, 2, 3]], None),
        ([[1, 9, 3]], 1),
        ([[1, 2, 3], [9, 2, 3]], 0),
        ([[1, 2, 9], [1, 9, 3]], 1),
        ([[1, 2]], 2),
        ([[1, 2, 3, 4]], 3),
        ([[]], 0),
        ([], None),
    ],
)
def test_first_difference(others: list[list[int]], expected: int | None) -> None:
    assert first_difference([1, 2, 3], *others) == expected


def test_turns_take_each_number_from_its_own_process() -> None:
    first = [generated([1, 2], ttft_s=9.0), generated([3, 4])]
    restarted = [generated([1, 2], ttft_s=0.2, external_tokens=7680), generated([3, 4], external_tokens=8320)]
    hits = [generated([1, 2], ttft_s=ttft_s) for ttft_s in (0.5, 0.1, 0.3)]
    # The tokens of the cold and repeated runs do not count: plain vLLM itself may round them otherwise.
    references = [
        Reference(generated([1, 2], ttft_s=8.0), cold=generated([7, 7], ttft_s=2.0), local=hits),
        Reference(generated([3, 4]), cold=generated([3, 4]), local=hits),
    ]
    rows = assemble_turns(first, restarted, references)
    assert [row.turn for row in rows] == ["document", "turn 2"]
    assert (rows[0].ttft_cold_s, rows[0].ttft_local_s, rows[0].ttft_restart_s) == (2.0, 0.3, 0.2)
    assert [row.resumed_tokens for row in rows] == [7680, 8320]
    assert [row.differs_at for row in rows] == [None, None]


@pytest.mark.parametrize("wrong", ["first run", "restart"])
def test_both_runs_with_the_connector_are_held_to_the_reference(wrong: str) -> None:
    first = generated([1, 5] if wrong == "first run" else [1, 2])
    restarted = generated([1, 5] if wrong == "restart" else [1, 2], external_tokens=7680)
    (row,) = assemble_turns(
        [first], [restarted], [Reference(generated([1, 2]), generated([1, 2]), [generated([1, 2])])]
    )
    assert row.differs_at == 1
    assert verdict([row])[0] == 1


def test_a_missing_turn_is_an_error() -> None:
    with pytest.raises(ValueError):
        assemble_turns([generated([1])], [], [Reference(generated([1]), generated([1]), [generated([1])])])


def test_verdict() -> None:
    assert verdict([turn(), turn(resumed_tokens=0)]) == (0, "")
    assert verdict([turn(ttft_restart_s=60.0)]) == (0, ""), "times are the machine's and do not decide"
    exit_code, reason = verdict([turn(), turn(turn="turn 2", differs_at=7)])
    assert exit_code == 1
    assert "turn 2" in reason and "7" in reason
    exit_code, reason = verdict([turn(resumed_tokens=0), turn(resumed_tokens=0)])
    assert exit_code == 1
    assert "resumed" in reason and "\n" not in reason


def test_a_difference_at_the_very_first_token_counts() -> None:
    assert verdict([turn(differs_at=0)])[0] == 1
    assert not goals_of([turn(differs_at=0)])[3].met


def test_goals_are_met_at_their_bounds_and_missed_past_them() -> None:
    at_bounds = goals_of([turn(ttft_restart_s=0.125, ttft_cold_s=1.25)])
    assert [(goal.name, goal.value, goal.met) for goal in at_bounds] == [
        ("ttft_after_restart_over_local", 1.25, True),
        ("ttft_after_restart_over_cold", 0.1, True),
        ("resumed_tokens_after_restart", 7680, True),
        ("outputs_equal", True, True),
    ]
    past = goals_of([turn(ttft_restart_s=0.126, ttft_cold_s=1.24, resumed_tokens=0, differs_at=3)])
    assert [goal.met for goal in past] == [False] * 4


def test_report_is_json_with_the_rows_of_the_table() -> None:
    report = report_json([turn(), turn(turn="turn 2", differs_at=2)], TOTALS, PROVENANCE)
    again = json.loads(json.dumps(report))
    assert list(again) == ["machine", "commit", "command", "rows", "goals", "totals"]
    assert [row["outputs_equal"] for row in again["rows"]] == [True, False]
    assert again["rows"][0]["over_local"] == 1.2
    assert again["rows"][0]["over_cold"] == 0.06
    assert set(again["goals"][0]) == {"name", "value", "goal", "unit", "met"}


def test_table_says_where_outputs_differ() -> None:
    out = StringIO()
    Console(file=out, width=80).print(render([turn(), turn(turn="turn 2", differs_at=2)], TOTALS))
    text = out.getvalue()
    assert "7,680" in text
    assert "…" not in text, "nothing is cut off in a terminal of 80 columns"
    assert "NO" in text
    assert "3.0 MiB" in text


def test_connector_settings_name_the_folder_by_url(tmp_path: Path) -> None:
    settings = kv_transfer_config(tmp_path / "a b")
    assert settings["kv_connector_extra_config"]["backend"]["url"] == (tmp_path / "a b").as_uri()
    json.dumps(settings)


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class FakeEngines:
    """Stands in for the three processes: answers every generate, resumes when the job has a connector and a past."""

    def __init__(self, resumed_tokens: int = 7680, wrong_restart: bool = False) -> None:
        self.jobs: list[Job] = []
        self._resumed_tokens = resumed_tokens
        self._wrong_restart = wrong_restart

    def __call__(self, job: Job, on_result: Any) -> list[dict[str, Any]]:
        self.jobs.append(job)
        restarted = len(self.jobs) == 2
        results: list[dict[str, Any]] = [{"ready": {}}]
        for action in job.actions:
            if "generate" in action:
                tokens = [9] if restarted and self._wrong_restart else [1]
                results.append({"generate": generated(tokens, external_tokens=restarted * self._resumed_tokens)})
            else:
                results.append({name: {"done": True} for name in action})
        for result in results:
            on_result(result)
        return results


@pytest.mark.parametrize(
    ("engines", "exit_code"),
    [(FakeEngines(), 0), (FakeEngines(resumed_tokens=0), 1), (FakeEngines(wrong_restart=True), 1)],
)
def test_exit_code_of_a_whole_run(
    engines: FakeEngines, exit_code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "run_engine", engines)
    model = write_config(tmp_path, {"text_config": {"vocab_size": 100}})
    report = tmp_path / "report.json"
    settings = Settings(model=model, document_tokens=50, keep=tmp_path / "kept", json_file=report)
    assert run_demo(settings) == exit_code
    first, restarted, plain = engines.jobs
    assert first.kv_transfer_config == restarted.kv_transfer_config
    assert plain.kv_transfer_config is None
    prompts = [action["generate"]["prompt"] for action in restarted.actions if "generate" in action]
    assert [len(prompt) for prompt in prompts] == [50, 251, 452, 653], "each adds one generated token and 200 new ones"
    assert all(longer[: len(shorter)] == shorter for shorter, longer in itertools.pairwise(prompts))
    assert len(json.loads(report.read_text())["rows"]) == 4


def test_a_failed_engine_ends_with_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def fail(job: Job, on_result: Any) -> list[dict[str, Any]]:
        raise EngineProcessError("the engine process ended with exit code 1", "last line of its log")

    monkeypatch.setattr(run, "run_engine", fail)
    model = write_config(tmp_path, {"vocab_size": 100})
    assert run_demo(Settings(model=model, document_tokens=50, keep=tmp_path / "kept")) == 2
    assert "last line of its log" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "cannot read"),
        ({}, "vocab_size"),
        ({"vocab_size": 100, "max_position_embeddings": 778}, "--document-tokens by 50"),
    ],
)
def test_a_model_that_cannot_serve_is_refused(
    config: dict[str, Any] | None, message: str, tmp_path: Path, capsys: Any
) -> None:
    if config is not None:
        write_config(tmp_path, config)
    assert run_demo(Settings(model=tmp_path, document_tokens=100, keep=tmp_path / "kept")) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_an_engine_that_dies_hands_back_the_end_of_its_log(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho out of luck\nexit 3\n")
    script.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(EngineProcessError, match="exit code 3") as caught:
        patch.setattr(sys, "executable", str(script))
        run_engine(Job("/none", [{"settle": True}]))
    assert caught.value.log_tail == "out of luck"


def test_an_engine_that_hangs_is_ended(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho stuck\nexec sleep 60\n")
    script.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(EngineProcessError, match="took over"):
        patch.setattr(sys, "executable", str(script))
        run_engine(Job("/none", []), limit_s=0.3)


def test_unknown_shape_and_foreign_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="qwen3-next"):
        write_checkpoint("nonesuch", tmp_path / "model")
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match="empty or a new folder"):
        write_checkpoint("llama", tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "precious"


def test_a_checkpoint_is_made_once_and_again_when_its_recipe_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ucmcache.demo import checkpoints

    made: list[int] = []

    def save(recipe: checkpoints.Recipe, seed: int, folder: Path) -> None:
        made.append(seed)
        (folder / "weights").write_text(str(seed))

    monkeypatch.setattr(checkpoints, "_save_random", save)
    path = tmp_path / "models" / "llama"
    for seed in (0, 0, 1, 1):
        write_checkpoint("llama", path, seed)
    assert made == [0, 1]
    assert (path / "weights").read_text() == "1"
    assert [entry.name for entry in path.parent.iterdir()] == ["llama"], "no temporary folder is left"
    (path / MARKER_FILE).write_text("{")
    write_checkpoint("llama", path, 1)
    assert made == [0, 1, 1]


def test_a_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ucmcache.demo import checkpoints

    def save(recipe: checkpoints.Recipe, seed: int, folder: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(checkpoints, "_save_random", save)
    with pytest.raises(OSError):
        write_checkpoint("llama", tmp_path / "llama")
    assert list(tmp_path.iterdir()) == []


def test_every_shape_is_long_enough_for_its_use() -> None:
    for shape, recipe in RECIPES.items():
        assert recipe.config["max_position_embeddings"] >= (16384 if shape == "demo" else 4096)


def test_version_command() -> None:
    from ucmcache import __version__

    assert CliRunner().invoke(app, ["version"]).output.strip() == __version__
