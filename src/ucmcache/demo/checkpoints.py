"""Tiny random checkpoints, one per kind of attention that vLLM runs on CPU.

The weights mean nothing, but they are drawn so that the output depends on the context: a resume from wrong bytes shows
as different tokens. There is no tokenizer: engines take token ids. torch and transformers are imported only while a
checkpoint is being made; `python -m ucmcache.demo.checkpoints SHAPE PATH [SEED]` does it in a process of its own.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ucmcache.errors import ConfigError

MARKER_FILE = "ucmcache-checkpoint.json"
_MARKER_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Recipe:
    """What makes one checkpoint; any change of it rebuilds the folder."""

    config_class: str  # the name in `transformers`
    config: Mapping[str, Any]
    # Standard deviation of every parameter with two or more dimensions. Chosen so that outputs vary: too small or too
    # large, and one token repeats whatever the context.
    matrix_std: float = 0.1
    # Range of a recurrent layer's decay rates (per token, before its gate). transformers starts at up to 16, which
    # forgets a state within a token or two: a wrong state would not show in any output.
    decay_rates: tuple[float, float] | None = None
    config_json: Mapping[str, Any] = field(default_factory=dict)  # keys vLLM reads and transformers does not write


# Heads have at least 32 dimensions (vLLM's CPU attention refuses 16), and none has an end-of-text token, so that a
# generation is as long as asked for.
_SMALL: Mapping[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_HEAD_DIM_32: Mapping[str, Any] = {"head_dim": 32}
_FOUR_EXPERTS: Mapping[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}

RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "llama": Recipe("LlamaConfig", {**_SMALL, **_HEAD_DIM_32, "tie_word_embeddings": False}, matrix_std=0.15),
        "gemma3": Recipe(
            "Gemma3TextConfig",
            {
                **_SMALL,
                **_HEAD_DIM_32,
                "query_pre_attn_scalar": 32,
                "sliding_window": 64,
                "sliding_window_pattern": 2,
            },
            # Its output matrix is its embedding, and norms undo every other scale: larger only repeats the last token.
            matrix_std=0.02,
        ),
        "gpt-oss": Recipe(
            "GptOssConfig",
            {
                **_SMALL,
                **_HEAD_DIM_32,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "sliding_window": 64,
                # The family's long-context scaling, at the factor that gives max_position_embeddings.
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 150000.0,
                    "factor": 2.0,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "truncate": False,
                    "original_max_position_embeddings": 4096,
                },
                "tie_word_embeddings": False,
            },
        ),
        # vLLM's MLA wants kv_lora_rank + qk_rope_head_dim = 576.
        "deepseek-v2": Recipe(
            "DeepseekV2Config",
            {
                **_SMALL,
                "num_key_value_heads": 4,
                "q_lora_rank": None,
                "kv_lora_rank": 512,
                "qk_nope_head_dim": 32,
                "qk_rope_head_dim": 64,
                "v_head_dim": 32,
                "n_routed_experts": 4,
                "n_shared_experts": 1,
                "n_group": 1,  # vLLM's CPU router asserts that expert groups are stated, even a single one
                "topk_group": 1,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 64,
                "first_k_dense_replace": 1,
                "tie_word_embeddings": False,
            },
            matrix_std=0.15,
        ),
        "lfm2": Recipe(
            "Lfm2Config",
            {
                **_SMALL,
                "hidden_size": 128,
                "layer_types": ["conv", "full_attention", "conv", "full_attention"],
                "conv_L_cache": 3,
                "block_auto_adjust_ff_dim": False,
                "tie_word_embeddings": False,
            },
            config_json={
                "conv_dim": 128,
                "block_dim": 128,
                "block_ff_dim": 128,
                "block_multiple_of": 32,
                "block_ffn_dim_multiplier": 1.0,
            },
        ),
        "qwen3-next": Recipe(
            "Qwen3NextConfig",
            {
                **_SMALL,
                **_HEAD_DIM_32,
                **_FOUR_EXPERTS,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 64,
                "linear_value_head_dim": 64,
                "moe_intermediate_size": 64,
                "shared_expert_intermediate_size": 64,
            },
            decay_rates=(0.001, 0.01),
        ),
        # Large enough that computing 8,000 tokens takes seconds and a resume does not.
        "demo": Recipe(
            "Qwen3NextConfig",
            {
                **_SMALL,
                **_FOUR_EXPERTS,
                "vocab_size": 4096,
                "hidden_size": 512,
                "intermediate_size": 1024,
                "num_hidden_layers": 8,
                "num_attention_heads": 8,
                "head_dim": 64,
                "linear_num_key_heads": 4,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 128,
                "linear_value_head_dim": 128,
                "moe_intermediate_size": 384,
                "shared_expert_intermediate_size": 384,
                "max_position_embeddings": 32768,
            },
            decay_rates=(0.001, 0.01),
        ),
    }
)


def write_checkpoint(shape: str, path: Path, seed: int = 0) -> None:
    """Make the random checkpoint `shape` (a key of RECIPES) in the folder `path`, unless it is there already.

    The folder appears complete or not at all; one that another recipe or seed made is replaced. Weights are bfloat16.
    Raises ConfigError for an unknown shape and for a folder that holds something else.
    """
    recipe = RECIPES.get(shape)
    if recipe is None:
        raise ConfigError(f"checkpoint shape {shape!r} is unknown; use one of {', '.join(RECIPES)}")
    marker = {"format": _MARKER_FORMAT, "shape": shape, "seed": seed, "recipe": asdict(recipe)}
    if _is_current(path, marker):
        return
    if path.exists() and (not path.is_dir() or (any(path.iterdir()) and not (path / MARKER_FILE).exists())):
        raise ConfigError(f"{path} holds something that ucmcache did not make; name an empty or a new folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        _save_random(recipe, seed, building)
        (building / MARKER_FILE).write_text(json.dumps(marker, indent=1))
        _replace_folder(building, path, marker)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _is_current(path: Path, marker: Mapping[str, Any]) -> bool:
    try:
        found = json.loads((path / MARKER_FILE).read_text())
    except (OSError, ValueError):  # absent or half-written by something else: build it
        return False
    return bool(found == marker)


def _replace_folder(building: Path, path: Path, marker: Mapping[str, Any]) -> None:
    building.chmod(0o755)  # mkdtemp makes it private to this user
    if path.exists():
        outdated = Path(tempfile.mkdtemp(prefix=f".{path.name}-outdated-", dir=path.parent))
        os.replace(path, outdated)  # a rename onto an empty folder is allowed
        shutil.rmtree(outdated)
    try:
        os.replace(building, path)
    except OSError:
        # Another process built the same checkpoint meanwhile; anything else in the way is an error.
        if not _is_current(path, marker):
            raise


def _save_random(recipe: Recipe, seed: int, folder: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(seed)  # covers the vectors (norms, biases, decay rates) that keep transformers' initial values
    config = getattr(transformers, recipe.config_class)(**recipe.config)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() >= 2:
                parameter.normal_(0.0, recipe.matrix_std, generator=generator)
            elif name.endswith("A_log") and recipe.decay_rates is not None:
                parameter.uniform_(*recipe.decay_rates, generator=generator).log_()
    model.save_pretrained(folder)
    if recipe.config_json:
        config_file = folder / "config.json"
        config_file.write_text(json.dumps({**json.loads(config_file.read_text()), **recipe.config_json}, indent=1))


def main(arguments: list[str]) -> int:
    """Command line of this module: SHAPE PATH [SEED]."""
    if len(arguments) not in (2, 3):
        print("usage: python -m ucmcache.demo.checkpoints SHAPE PATH [SEED]", file=sys.stderr)
        return 2
    write_checkpoint(arguments[0], Path(arguments[1]), int(arguments[2]) if len(arguments) == 3 else 0)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
