"""An engine finds what an equal one stored, and nothing of one that differs in a single field (requirements C6)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.sim.engine import Group, SimEngine
from tests.sim.one_run import PROMPT, RESUMABLE_TOKENS, one_run
from ucmcache.connector import identity
from ucmcache.connector.identity import weights_fingerprint
from ucmcache.errors import UnsupportedModelError

GROUPS = (Group("full", 8), Group("window", 8, 20), Group("state", 8))
WEIGHTS = "pytorch_model.bin"

Files = dict[str, bytes]


@dataclass
class Run:
    """One engine: all that a test may vary of it, and the means to vary it."""

    base: Path  # what vLLM's configuration is made from, once for all tests
    model: Path
    patch: pytest.MonkeyPatch
    groups: Sequence[Group] = GROUPS
    extra: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    changes: list[Callable[[Any], None]] = field(default_factory=list)

    def start(self, backend: Path) -> SimEngine:
        def mutate(config: Any) -> None:
            config.model_config.model = str(self.model)
            config.kv_transfer_config.kv_connector_extra_config = {
                "host": {"blocks": "4MiB", "snapshots": "4MiB"},
                "backend": {"url": backend.as_uri()},
                **self.extra,
            }
            for change in self.changes:
                change(config)

        return SimEngine(self.groups, self.base, mutate=mutate, **self.options)


Change = Callable[[Run], None]


def files_of(root: Path) -> Files:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def outcome(run: Run, backend: Path) -> int:
    """Adopted tokens of one engine's run of the prompt, whose output is checked."""
    engine = run.start(backend)
    try:
        assert engine.generate("one", PROMPT) == SimEngine.expected(PROMPT, 4)
    finally:
        engine.close()
    return engine.counts.get("adopted_tokens", 0)


@pytest.fixture
def model(hybrid: Path, tmp_path: Path) -> Path:
    """A model folder of the test's own, with a file of weights."""
    folder = tmp_path / "model"
    shutil.copytree(hybrid, folder)
    (folder / WEIGHTS).write_bytes(bytes(range(256)) * 16)
    return folder


@pytest.fixture
def run(hybrid: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The engine that all tests start from."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.delenv("VLLM_SSM_CONV_STATE_LAYOUT", raising=False)
    return Run(hybrid, model, monkeypatch)


def in_config(path: str, value: Any) -> Change:
    """Sets one dotted attribute of vLLM's configuration."""
    *parents, name = path.split(".")

    def set_it(config: Any) -> None:
        for parent in parents:
            config = getattr(config, parent)
        assert getattr(config, name) != value, "the test changes nothing"
        setattr(config, name, value)

    return lambda run: run.changes.append(set_it)


def in_extra(**values: Any) -> Change:
    return lambda run: run.extra.update(values)


def in_options(**values: Any) -> Change:
    return lambda run: run.options.update(values)


def in_environment(name: str, value: str) -> Change:
    return lambda run: run.patch.setenv(name, value)


def in_groups(*groups: Group) -> Change:
    return lambda run: setattr(run, "groups", groups)


def one_byte_of(name: str, old: bytes, new: bytes) -> Change:
    def change(run: Run) -> None:
        file = run.model / name
        content = file.read_bytes()
        assert old in content
        assert len(old) == len(new)
        stat = file.stat()
        file.write_bytes(content.replace(old, new, 1))
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    return change


def with_file(name: str) -> Change:
    def change(run: Run) -> None:
        (run.model / name).write_text("new")

    return change


def in_spec(class_name: str, **values: Any) -> Change:
    """Gives every spec of a class other fields of the same size in bytes."""

    def change(run: Run) -> None:
        from vllm.v1 import kv_cache_interface

        made = getattr(kv_cache_interface, class_name).__init__
        run.patch.setattr(
            getattr(kv_cache_interface, class_name),
            "__init__",
            lambda self, **given: made(self, **{**given, **values}),
        )

    return change


def fine_hashes(run: Run) -> None:
    """Hashes every four tokens, under blocks of eight."""
    from vllm.v1.core import kv_cache_utils

    run.patch.setattr(kv_cache_utils, "resolve_kv_cache_block_sizes", lambda *_: (8, 4))


def with_drafts(**settings: Any) -> Change:
    """A drafter in the engine, by vLLM's own configuration of it."""

    def speculate(config: Any) -> None:
        from vllm.config import SpeculativeConfig

        config.speculative_config = SpeculativeConfig(
            method="ngram",
            prompt_lookup_max=3,
            target_model_config=config.model_config,
            target_parallel_config=config.parallel_config,
            **settings,
        )

    return lambda run: run.changes.append(speculate)


def overridden(run: Run) -> None:
    def override(config: Any) -> None:
        config.model_config.hf_config.update({"rope_theta": 12345.0})

    run.changes.append(override)


def other_state_mode(run: Run) -> None:
    in_config("cache_config.mamba_cache_mode", "none")(run)
    in_options(max_step_tokens=8)(run)  # in that mode the engine does not end its steps on blocks by itself


def other_vllm(run: Run) -> None:
    import vllm

    run.patch.setattr(vllm, "__version__", "0.32.1")


def other_machine(run: Run) -> None:
    """An x86 CPU with AMX keeps K in another order inside a block than one without."""
    import torch

    has_amx = torch.cpu._is_amx_tile_supported()
    run.patch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: not has_amx)


def dtype_change(name: str) -> Change:
    def change(run: Run) -> None:
        import torch

        in_config("model_config.dtype", getattr(torch, name))(run)

    return change


def attention_backend(run: Run) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    in_config("attention_config.backend", AttentionBackendEnum.TORCH_SDPA)(run)


DIFFERENT: Mapping[str, Change] = {
    "tenant": in_extra(namespace="tenant-b"),
    "a byte of the weights": one_byte_of(WEIGHTS, b"\x80", b"\x00"),
    "a byte of the configuration": one_byte_of("config.json", b'"rms_norm_eps": 1e-06', b'"rms_norm_eps": 1e-05'),
    "modelling code": with_file("modeling.py"),
    "dtype": dtype_change("float16"),
    "quantization": in_config("model_config.quantization", "fp8"),
    "KV dtype": in_config("cache_config.cache_dtype", "fp8"),
    "conv dtype": in_config("cache_config.mamba_cache_dtype", "float32"),
    "ssm dtype": in_config("cache_config.mamba_ssm_cache_dtype", "float16"),
    "state mode": other_state_mode,
    "block size": in_groups(Group("full", 4), Group("window", 4, 20), Group("state", 4)),
    "hash block size": fine_hashes,
    "layout": in_options(layout="BLHNC"),
    "conv layout": in_environment("VLLM_SSM_CONV_STATE_LAYOUT", "DS"),
    "attention backend": attention_backend,
    "kind of machine": other_machine,
    "number of ranks": in_options(ranks=2),
    "tensor parallel size": in_config("parallel_config.tensor_parallel_size", 2),
    "pipeline parallel size": in_config("parallel_config.pipeline_parallel_size", 2),
    "speculation": with_drafts(num_speculative_tokens=2),
    "hash algorithm": in_config("cache_config.prefix_caching_hash_algo", "sha256_cbor"),
    "hash seed": in_environment("PYTHONHASHSEED", "0"),
    "vLLM's version": other_vllm,
    "format version": lambda run: run.patch.setattr(identity, "FORMAT_VERSION", "0"),
    "window": in_groups(Group("full", 8), Group("window", 8, 21), Group("state", 8)),
    "a group more": in_groups(*GROUPS, Group("state", 8)),
    "order of groups": in_groups(Group("window", 8, 20), Group("full", 8), Group("state", 8)),
    "heads": in_spec("FullAttentionSpec", num_kv_heads=2, head_size=4),
    "state shapes": in_spec("MambaSpec", shapes=((4, 3), (5,))),
    "load format": in_config("load_config.load_format", "dummy"),
    "configuration overrides": overridden,
}

SAME: Mapping[str, Change] = {
    "nothing": lambda run: None,
    "sequences at once": in_options(max_seqs=3),
    "tokens a step": in_options(max_step_tokens=24),
    "blocks of the engine": in_options(num_blocks=120),
    "host memory": in_extra(host={"blocks": "1MiB", "snapshots": "2MiB"}),
    "capacity": lambda run: run.extra["backend"].update(capacity="1GiB"),
    "deadline": in_extra(promise_deadline="30s"),
    "states to keep": in_extra(retention={"interval_tokens": 4096}),
    "the engine's retention": in_options(retention_interval=16),
    "load failure policy": in_options(policy="recompute"),
    "model runner": in_options(order="v2"),
    "log level": in_environment("VLLM_LOGGING_LEVEL", "DEBUG"),
    "port": in_config("kv_transfer_config.kv_port", 23456),
    "engine id": in_config("kv_transfer_config.engine_id", "another"),
    "GPU memory share": in_config("cache_config.gpu_memory_utilization", 0.123),
    "longest sequence": in_config("model_config.max_model_len", 2048),
    "the default conv layout by name": in_environment("VLLM_SSM_CONV_STATE_LAYOUT", "SD"),
    "the default seed by name": in_environment("PYTHONHASHSEED", "vllm-none-hash"),
    "a new README": with_file("README.md"),
    "time of the weights": lambda run: os.utime(run.model / WEIGHTS, ns=(1, 1)),
}


@pytest.mark.parametrize("what", list(DIFFERENT))
def test_nothing_is_shared_when_one_field_differs(run: Run, tmp_path: Path, what: str) -> None:
    assert outcome(run, tmp_path / "store") == 0
    before = files_of(tmp_path / "store")
    DIFFERENT[what](run)
    assert outcome(run, tmp_path / "store") == 0
    after = files_of(tmp_path / "store")
    assert {name: after.get(name) for name in before} == before
    assert len({Path(name).parts[0] for name in after}) == 2  # the second engine's lie in a folder of their own
    assert outcome(run, tmp_path / "store") >= RESUMABLE_TOKENS


@pytest.mark.parametrize("what", list(SAME))
def test_all_is_shared_when_only_something_irrelevant_differs(run: Run, tmp_path: Path, what: str) -> None:
    run.extra["backend"] = {"url": (tmp_path / "store").as_uri()}
    assert outcome(run, tmp_path / "store") == 0
    SAME[what](run)
    assert outcome(run, tmp_path / "store") == RESUMABLE_TOKENS


def test_a_model_that_moved_is_the_same_model(run: Run, tmp_path: Path) -> None:
    assert outcome(run, tmp_path / "store") == 0
    run.model = run.model.rename(tmp_path / "elsewhere")
    assert outcome(run, tmp_path / "store") == RESUMABLE_TOKENS


@pytest.mark.parametrize("settings", [{"num_speculative_tokens": 3}, None])
def test_the_speculative_setup_is_part_of_it(run: Run, tmp_path: Path, settings: dict[str, Any] | None) -> None:
    with_drafts(num_speculative_tokens=2)(run)
    assert outcome(run, tmp_path / "store") == 0
    assert outcome(run, tmp_path / "store") == RESUMABLE_TOKENS
    run.changes.clear()
    if settings is not None:
        with_drafts(**settings)(run)
    assert outcome(run, tmp_path / "store") == 0


def test_dummy_weights_are_as_their_seed(run: Run, tmp_path: Path) -> None:
    in_config("load_config.load_format", "dummy")(run)
    assert outcome(run, tmp_path / "store") == 0
    (run.model / WEIGHTS).write_bytes(b"not even read")
    assert outcome(run, tmp_path / "store") == RESUMABLE_TOKENS
    in_config("model_config.seed", 1)(run)
    assert outcome(run, tmp_path / "store") == 0


@pytest.mark.parametrize("name", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallelism_is_refused(run: Run, name: str) -> None:
    """Under it a block covers more tokens than its spec says."""

    def parallel(config: Any) -> None:
        # After the engine's own sizes were made: only our reading of it is looked at.
        setattr(config.parallel_config, name, 2)

    class Late(SimEngine):
        def _scheduler(self) -> Any:
            scheduler = super()._scheduler()
            parallel(self.config)
            return scheduler

    with pytest.raises(UnsupportedModelError, match=name):
        Late(run.groups, run.base, {"host": {"blocks": "4MiB", "snapshots": "4MiB"}})


# -- the weights' own text --------------------------------------------------------------------------------------------


def fingerprint_of(load_format: str = "auto", commit: str | None = None, **model: Any) -> str:
    config = {"revision": None, "seed": 0, "model_weights": "", **model}
    hf_config = SimpleNamespace(_commit_hash=commit)
    return weights_fingerprint(SimpleNamespace(hf_config=hf_config, **config), SimpleNamespace(load_format=load_format))


def test_a_hub_name_stands_for_one_commit() -> None:
    texts = [
        fingerprint_of(model="org/one"),
        fingerprint_of(model="org/two"),
        fingerprint_of(model="org/one", revision="v2"),
        fingerprint_of(model="org/one", commit="aaaa"),
        fingerprint_of(model="org/one", commit="bbbb"),
        fingerprint_of(model="org/one", load_format="dummy"),
        fingerprint_of(model="org/one", load_format="dummy", seed=1),
    ]
    assert len(set(texts)) == len(texts)
    assert fingerprint_of(model="org/one", commit="aaaa", revision="main") == texts[3]


def test_streamed_weights_are_told_by_their_url(model: Path) -> None:
    """From object storage only the configuration is pulled into the local folder."""
    one, other = (fingerprint_of(model=str(model), model_weights=url) for url in ("s3://bucket/a", "s3://bucket/b"))
    assert len({one, other, fingerprint_of(model=str(model))}) == 3
    assert one == fingerprint_of(model=str(model), model_weights="s3://bucket/a")


def test_every_weights_file_counts(tmp_path: Path) -> None:
    names = ("a.safetensors", "b.bin", "c.pt", "d.pth", "e.gguf", "f.tensors", "config.json", "spiece.model", "code.py")
    for name in names:
        (tmp_path / name).write_bytes(b"1")
    texts = [fingerprint_of(model=str(tmp_path))]
    for name in names:
        (tmp_path / name).write_bytes(b"2")
        texts.append(fingerprint_of(model=str(tmp_path)))
    (tmp_path / "a.safetensors").rename(tmp_path / "z.safetensors")
    texts.append(fingerprint_of(model=str(tmp_path)))
    assert len(set(texts)) == len(texts)


def test_a_large_file_is_sampled_at_both_ends_and_between(tmp_path: Path) -> None:
    size = identity._WHOLE_FILE_BYTES + 12345
    file = tmp_path / "large.safetensors"
    with file.open("wb") as out:
        out.truncate(size)
    texts = [identity.file_fingerprint(file)]
    step = (size - identity._WINDOW_BYTES) / (identity._WINDOWS - 1)
    for at in (0, size - 1, int(7 * step), int(100 * step) + identity._WINDOW_BYTES - 1):
        with file.open("r+b") as out:
            out.seek(at)
            out.write(b"\x01")
        texts.append(identity.file_fingerprint(file))
    with file.open("r+b") as out:
        out.truncate(size + 1)
    texts.append(identity.file_fingerprint(file))
    assert len(set(texts)) == len(texts)


def test_a_drafter_is_told_by_its_content(run: Run, tmp_path: Path) -> None:
    """Replacing a drafter's weights under its path is seen; moving it, or the target that holds it, is not."""
    import torch

    draft = tmp_path / "draft"
    shutil.copytree(run.model, draft)

    def text(draft_model: Path, target: Path) -> str:
        def model_config(path: Path) -> Any:
            return SimpleNamespace(
                model=str(path), revision=None, hf_config=None, model_weights="", dtype=torch.float16
            )

        speculative = SimpleNamespace(
            method="mtp", num_speculative_tokens=1, model=str(draft_model), draft_model_config=model_config(draft_model)
        )
        return identity._speculative_text(
            SimpleNamespace(
                speculative_config=speculative,
                model_config=model_config(target),
                load_config=SimpleNamespace(load_format="auto"),
            )
        )

    first = text(draft, run.model)
    moved = draft.rename(tmp_path / "moved")
    assert text(moved, run.model) == first
    (moved / WEIGHTS).write_bytes(b"trained on")
    assert text(moved, run.model) != first
    inside = text(run.model, run.model)
    assert text(moved, moved) == inside  # a drafter that is part of the target: the target's own text tells it
    assert inside != text(moved, run.model)


def test_a_configuration_with_a_set_reads_the_same_in_every_process() -> None:
    class Config:
        def __init__(self, order: Sequence[str]) -> None:
            self.ignored = dict.fromkeys(order).keys() | set()

        def to_dict(self) -> dict[str, Any]:
            return {"ignored": Ordered(self.ignored)}

    class Ordered(set[str]):
        """A set whose order is chosen, as another process's hash seed chooses it."""

        flip = False

        def __iter__(self) -> Iterator[str]:
            return iter(sorted(super().__iter__(), reverse=self.flip))

        def __repr__(self) -> str:
            return repr(list(self))

    text = identity._stable(Config(["a", "b"]))
    Ordered.flip = True
    assert identity._stable(Config(["a", "b"])) == text
    assert identity._stable(Config(["a", "c"])) != text


# -- seeds, in processes of their own ---------------------------------------------------------------------------------


def start_process(model: Path, backend: Path, seed: str | None, algorithm: str = "sha256") -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    environment |= {"PYTHONHASHSEED": seed} if seed is not None else {}
    environment |= {"VLLM_LOGGING_LEVEL": "ERROR"}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.sim.one_run", str(model), str(backend), algorithm],
        cwd=Path(__file__).parents[2],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    assert result["output"] == SimEngine.expected(PROMPT, 4)
    return result


def here(patch: pytest.MonkeyPatch, model: Path, backend: Path, seed: str | None, algorithm: str) -> dict[str, Any]:
    """The same run in this process."""
    with patch.context() as inner:
        inner.delenv("PYTHONHASHSEED", raising=False)
        if seed is not None:
            inner.setenv("PYTHONHASHSEED", seed)
        result = one_run(model, backend, algorithm)
    assert result["output"] == SimEngine.expected(PROMPT, 4)
    return result


def test_two_processes_share_under_one_hash_seed(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Field case C1: equal seeds, set or not, find each other; others do not, and are told what to set."""
    cases: dict[str, tuple[str | None, str]] = {
        "unset": (None, "sha256"),
        "0": ("0", "sha256"),
        "random": ("random", "sha256"),
        "xxhash": (None, "xxhash"),
    }
    for name, (seed, algorithm) in cases.items():
        assert here(monkeypatch, plain, tmp_path / name, seed, algorithm)["adopted"] == 0
    shutil.copytree(tmp_path / "unset", tmp_path / "both")
    running = {
        name: start_process(plain, tmp_path / name, seed, algorithm) for name, (seed, algorithm) in cases.items()
    }
    other = here(monkeypatch, plain, tmp_path / "both", "0", "sha256")
    results = {name: result_of(process) for name, process in running.items()}

    assert {name: result["adopted"] for name, result in results.items()} == {
        "unset": RESUMABLE_TOKENS,
        "0": RESUMABLE_TOKENS,
        "random": RESUMABLE_TOKENS,
        "xxhash": 0,
    }
    for name in ("unset", "0", "random"):
        assert results[name]["warnings"] == []
    own = [line for line in results["xxhash"]["warnings"] if "xxhash" in line]
    assert len(own) == 1
    assert "set PYTHONHASHSEED to one value, or use sha256" in own[0]
    assert other["adopted"] == 0
    [warning] = other["warnings"]
    assert "PYTHONHASHSEED" in warning
