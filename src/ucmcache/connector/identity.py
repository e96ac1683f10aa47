"""What shapes the bytes: the namespace of an engine, and the parts of a request that the engine's hashes leave out."""

from __future__ import annotations

import json
import os
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from ucmcache.errors import UnsupportedModelError
from ucmcache.keys import Namespace

FORMAT_VERSION = "1"

# vLLM's constant when PYTHONHASHSEED is unset: v1/core/kv_cache_utils.py DEFAULT_NONE_HASH_SEED.
_DEFAULT_HASH_SEED = "vllm-none-hash"
_UNSTABLE_HASHES = ("xxhash", "xxhash_cbor")
# A weights file up to this size is hashed whole; of a larger one, evenly spaced windows are.
_WHOLE_FILE_BYTES = 64 << 20
_WINDOWS, _WINDOW_BYTES = 256, 64 << 10
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors", ".json", ".model", ".py")
# Within this time a file system may give two versions of a file the same times.
_SAME_TIME_NS = 2 * 10**9


def file_fingerprint(path: Path) -> str:
    """Hex digest of a file's size and content: all of it up to 64 MiB, else 256 windows of 64 KiB and both ends."""
    size = path.stat().st_size
    digest = xxhash.xxh3_128(str(size).encode())
    with path.open("rb") as file:
        if size <= _WHOLE_FILE_BYTES:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
        else:
            for window in range(_WINDOWS):
                file.seek((size - _WINDOW_BYTES) * window // (_WINDOWS - 1))
                digest.update(file.read(_WINDOW_BYTES))
    return digest.hexdigest()


def folder_fingerprint(folder: Path) -> str:
    """Hex digest of the names and fingerprints of a folder's weight and configuration files, wherever it lies."""
    digest = xxhash.xxh3_128()
    for path in sorted(folder.iterdir()):
        if path.suffix in _WEIGHT_SUFFIXES and path.is_file():
            digest.update(f"{path.name}={file_fingerprint(path)}\n".encode())
    return digest.hexdigest()


def weights_fingerprint(model_config: Any, load_config: Any) -> str:
    """Text that differs when the weights do: content for a local folder, repository and commit for a hub name."""
    model = str(model_config.model)
    load_format = str(getattr(load_config, "load_format", "auto"))
    if load_format == "dummy":
        return f"dummy seed {getattr(model_config, 'seed', 0)}"
    remote = getattr(model_config, "model_weights", None)
    if remote and remote != model:
        # Streamed from object storage: the local folder holds the configuration only.
        return f"{remote}@{folder_fingerprint(Path(model)) if Path(model).is_dir() else model}"
    if Path(model).is_dir():
        return folder_fingerprint(Path(model))
    if Path(model).is_file():
        return file_fingerprint(Path(model))
    commit = getattr(getattr(model_config, "hf_config", None), "_commit_hash", None)
    return f"{model}@{commit or getattr(model_config, 'revision', None) or 'main'}"


def hash_seed(algorithm: str) -> str:
    """The seed that vLLM derives its first hash from; unique to this process where vLLM draws it at random."""
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is not None:
        return seed
    # The engine draws its own 32 random bytes: no other process can have equal hashes.
    return f"random {os.urandom(16).hex()}" if algorithm in _UNSTABLE_HASHES else _DEFAULT_HASH_SEED


def namespace_of(tenant: str, vllm_config: Any, kv_cache_config: Any, contents: Iterable[str]) -> Namespace:
    """The namespace of an engine: everything that shapes bytes or rights, as far as the engine exposes it.

    `contents` are the canonical texts of what the ranks hold, in rank order. Raises UnsupportedModelError for context
    parallelism, under which a block covers other tokens than its spec says.
    """
    import vllm

    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise UnsupportedModelError(f"{name} is {getattr(parallel, name)}; ucmcache supports 1 only — set it to 1")
    algorithm = str(getattr(cache, "prefix_caching_hash_algo", "unknown"))
    return Namespace(
        {
            "format": FORMAT_VERSION,
            "vllm": str(vllm.__version__),
            "tenant": tenant,
            "weights": weights_fingerprint(model, getattr(vllm_config, "load_config", None)),
            "model_config": _digest(_stable(getattr(model, "hf_config", None))),
            "dtype": str(getattr(model, "dtype", None)),
            "quantization": str(getattr(model, "quantization", None)),
            "kv_dtype": str(getattr(cache, "cache_dtype", None)),
            "kv_scales": str(getattr(cache, "calculate_kv_scales", None)),
            "conv_dtype": str(getattr(cache, "mamba_cache_dtype", None)),
            "ssm_dtype": str(getattr(cache, "mamba_ssm_cache_dtype", None)),
            "state_mode": str(getattr(cache, "mamba_cache_mode", None)),
            "conv_layout": os.environ.get("VLLM_SSM_CONV_STATE_LAYOUT", "SD"),  # SD is vLLM's default
            "kernels": _kernels_text(vllm_config),
            "layout": str(getattr(kv_cache_config, "kv_cache_layout", None)),
            "hash_block_tokens": str(getattr(kv_cache_config, "hash_block_size", None)),
            "hash_algorithm": algorithm,
            "hash_seed": hash_seed(algorithm),
            "parallel": " ".join(
                f"{name}={getattr(parallel, name, 1)}"
                for name in (
                    "tensor_parallel_size",
                    "pipeline_parallel_size",
                    "prefill_context_parallel_size",
                    "decode_context_parallel_size",
                )
            ),
            "speculative": _speculative_text(vllm_config),
            "groups": _digest("\n\n".join(contents)),
        }
    )


def _kernels_text(vllm_config: Any) -> str:
    """What the engine picks its attention kernels by; they arrange the bytes inside a block, each in its own way."""
    import torch
    from vllm.platforms import current_platform

    backend = getattr(getattr(vllm_config, "attention_config", None), "backend", None)
    machine = f"capability={current_platform.get_device_capability()}"
    if current_platform.is_cpu():
        arch = current_platform.get_cpu_architecture()
        machine = f"{arch} amx={torch.cpu._is_amx_tile_supported()} avx512={torch.cpu._is_avx512_supported()}"
    return f"{current_platform.device_type} backend={backend} {machine}"


def _speculative_text(vllm_config: Any) -> str:
    speculative, target = getattr(vllm_config, "speculative_config", None), vllm_config.model_config
    if speculative is None:
        return "none"
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None:
        weights = f"{getattr(speculative, 'model', None)}@{getattr(speculative, 'revision', None)}"
    elif (draft.model, draft.revision) == (target.model, target.revision):
        weights = "target"
    else:
        weights = weights_fingerprint(draft, getattr(speculative, "draft_load_config", None) or vllm_config.load_config)
    config = _digest(_stable(getattr(draft, "hf_config", None)))
    names = ("method", "num_speculative_tokens")
    settings = " ".join(f"{name}={getattr(speculative, name, None)}" for name in names)
    return f"{settings} weights={weights} config={config}"


def _stable(config: Any) -> str:
    """A model configuration without what does not shape bytes: where it was read from, and by which library."""
    if config is None:
        return "none"
    values = config.to_dict() if hasattr(config, "to_dict") else dict(vars(config))
    for name in ("_name_or_path", "name_or_path", "transformers_version", "_commit_hash"):
        values.pop(name, None)
    return json.dumps(values, sort_keys=True, default=_plain)


def _plain(value: Any) -> Any:
    # A set's own order is another one in every process.
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)


def _digest(text: str) -> str:
    return str(xxhash.xxh3_128_hexdigest(text.encode()))


class Adapters:
    """Content fingerprints of LoRA adapters: the engine's hashes hold an adapter's name and path, not its bytes."""

    def __init__(self, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._clock_ns = clock_ns
        self._known: dict[str, tuple[tuple[tuple[str, int, int, int], ...], bytes]] = {}
        self._loaded: dict[int, bytes | None] = {}  # by the engine's adapter id; None once it cannot be told

    def fingerprint(self, folder: str) -> bytes:
        """16 bytes that change when the files do; the content is read again only when a size or time has changed."""
        paths = sorted(path for path in Path(folder).iterdir() if path.is_file())
        now_ns = self._clock_ns()
        found = [(path.name, path.stat()) for path in paths]
        stats = tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in found)
        known = self._known.get(folder)
        if known is not None and known[0] == stats:
            return known[1]
        text = "\n".join(f"{path.name}={file_fingerprint(path)}" for path in paths)
        fingerprint = xxhash.xxh3_128_digest(text.encode())
        if all(max(stat.st_mtime_ns, stat.st_ctime_ns) < now_ns - _SAME_TIME_NS for _, stat in found):
            self._known[folder] = (stats, fingerprint)
        return fingerprint

    def loaded(self, lora: Any) -> bytes | None:
        """Fingerprint of what the engine computes this adapter with; None where that cannot be told.

        The engine reads an adapter's files once per id, unless a request asks for it anew; files that changed since
        then are not what it computes with.
        """
        fingerprint, id_ = self.fingerprint(lora.lora_path), lora.lora_int_id
        if getattr(lora, "load_inplace", False) or id_ not in self._loaded:
            self._loaded[id_] = fingerprint
        elif self._loaded[id_] != fingerprint:
            self._loaded[id_] = None
        return self._loaded[id_]

    def is_current(self, id_: int, fingerprint: bytes) -> bool:
        """Whether the engine still computes this adapter id with what `fingerprint` stands for."""
        return self._loaded.get(id_) == fingerprint


class RequestIdentity(NamedTuple):
    """What a request's prefixes are found by."""

    hashes: Callable[[], Sequence[bytes]]  # as they grow
    tail: Callable[[int, int], bytes | None]  # of its tokens, as `Prompt.tail`
    bypass: bool = False  # the request must bypass the cache


_UNKNOWN = RequestIdentity(lambda: (), lambda start, end: None, bypass=True)


def _tail(request: Any, fingerprint: bytes, start: int, end: int) -> bytes:
    """Everything that tells tokens `start` to `end` of a request from others behind the same hash."""
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    extra, _ = generate_block_hash_extra_keys(request, start, end, 0)
    about = repr((fingerprint, extra)).encode()  # of text, numbers, bytes and tuples of them, which have one spelling
    return len(about).to_bytes(4, "little") + about + array("q", request.all_token_ids[start:end]).tobytes()


def identify(request: Any, adapters: Adapters) -> RequestIdentity:
    """What a request's prefixes are found by.

    Prompt embeddings are bypassed: the engine's hashes do not tell which positions are tokens. With an adapter, every
    hash is mixed with the adapter's content.
    """
    if getattr(request, "prompt_embeds", None) is not None:
        return _UNKNOWN
    lora = getattr(request, "lora_request", None)
    if lora is None:
        return RequestIdentity(lambda: request.block_hashes, partial(_tail, request, b""))
    try:
        fingerprint = adapters.loaded(lora)
    except OSError:
        fingerprint = None  # not a local folder
    if fingerprint is None:
        # What the engine computes with cannot be told, so nothing of it is kept.
        return _UNKNOWN
    seen: list[bytes] = []
    mixed: list[bytes] = []

    def hashes() -> Sequence[bytes]:
        if not adapters.is_current(lora.lora_int_id, fingerprint):
            return ()  # reloaded in place while this request runs
        engine_hashes = request.block_hashes
        # A streaming session takes its last hashes back; each stands for all before it.
        while seen and (len(seen) > len(engine_hashes) or seen[-1] != engine_hashes[len(seen) - 1]):
            seen.pop()
            mixed.pop()
        for engine_hash in engine_hashes[len(seen) :]:
            seen.append(engine_hash)
            mixed.append(xxhash.xxh3_128_digest(fingerprint + engine_hash))
        return mixed

    def tail(start: int, end: int) -> bytes | None:
        current = adapters.is_current(lora.lora_int_id, fingerprint)
        return _tail(request, fingerprint, start, end) if current else None

    return RequestIdentity(hashes, tail)
