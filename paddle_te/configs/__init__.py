"""Model configurations that come with the package, so that pretraining from scratch downloads nothing.

Each is a folder with PaddleNLP's config.json. The hyper-parameters are those that are published with the weights
(https://huggingface.co/meta-llama, Qwen, google, microsoft, allenai, zai-org, deepseek-ai, moonshotai, mistralai), the
names those of PaddleNLP's tokenizers. `gpt-…` have GPT-3's sizes (Brown et al., 2020, table 2.1), 126M and 5B those of
NVIDIA's NeMo, heads of 64 or 128 numbers; `llama-125m` (grouped kv heads, 125 million parameters) is for convergence
runs, `tiny-llama-demo` for tests and the quickstart.

Imports neither paddle nor paddlenlp: the launcher checks its arguments with this in well under a second.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from paddle_te.configs.reading import ModelConfig, check_computed, model_config, read_file
from paddle_te.configs.schema import ConfigError
from paddle_te.configs.translation import to_paddlenlp

__all__ = [
    "MODEL_VALUES",
    "ConfigError",
    "ModelConfig",
    "canonical",
    "check_computed",
    "known_names",
    "model_config",
    "name_of",
    "read",
    "read_file",
    "read_model",
    "resolve",
    "words_of_model",
]

CONFIGS = Path(__file__).parent

# Two models whose values differ in one of these compute other numbers from the same weights, or have other weights.
MODEL_VALUES = (
    "model_type num_hidden_layers hidden_size intermediate_size num_attention_heads num_key_value_heads vocab_size "
    "rope_theta rope_scaling rope_scaling_type rope_scaling_factor rms_norm_eps tie_word_embeddings sliding_window "
    "hidden_activation num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob "
    "shared_expert_intermediate_size decoder_sparse_step mlp_only_layers partial_rotary_factor "
    "original_max_position_embeddings rope_local_base_freq sliding_window_pattern layer_types query_pre_attn_scalar "
    "attn_logit_softcapping final_logit_softcapping embedding_multiplier residual_multiplier attention_multiplier "
    "logits_scaling kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim n_routed_experts "
    "n_shared_experts first_k_dense_replace moe_layer_freq scoring_func topk_method n_group topk_group "
    "routed_scaling_factor"
).split()


@cache
def known_names() -> tuple[str, ...]:
    """Return the names that `resolve` knows, as on Hugging Face: `meta-llama/Llama-2-7b`, `Qwen/Qwen2.5-7B`, ..."""
    return tuple(sorted(path.parent.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("config.json")))


def canonical(name: str) -> str | None:
    """Return the full name of a known model, also from a short one; None for any other name.

    `meta-llama/Meta-Llama-3-8B`, `meta-llama/Llama-3-8B`, `Meta-Llama-3-8B` and `llama-3-8b` are one model.
    """
    return _written().get(name.lower())


@cache
def _written() -> dict[str, str]:
    """Return {each way to write a known model's name, in lower case: the name}."""
    names: dict[str, str] = {}
    for known in known_names():
        organisation, slash, model = known.lower().rpartition("/")
        short = model.removeprefix("meta-")
        names |= dict.fromkeys((model, short, organisation + slash + model, organisation + slash + short), known)
    return names


def resolve(name_or_path: str) -> Path:
    """Return the folder whose config.json describes a model.

    A folder comes before a known name, as in PaddleNLP: weights downloaded to ./meta-llama/Llama-2-7b are found there.

    Raises:
        ValueError: neither a folder with config.json nor a known name; says which ones are like it, or lists all.
    """
    folder = Path(name_or_path).expanduser()
    if (folder / "config.json").is_file():
        return folder.absolute()
    if name := canonical(name_or_path):
        return CONFIGS / name
    problem = "a folder without config.json" if folder.is_dir() else "neither a folder nor a known model"
    alike = " or ".join(_like(name_or_path))
    names = f"a known name, perhaps {alike}" if alike else f"one of: {_listed(known_names())}"
    raise ValueError(
        f"{name_or_path!r} is {problem}; give a folder with config.json, PaddleNLP's or Hugging Face's, or {names}"
    )


def _listed(names: Iterable[str]) -> str:
    """Return names in a line, without the organisation of the one before, and as "-72B" where only the end differs."""
    shown, before, whose = list[str](), "", ""
    for name in names:
        organisation, slash, model = name.rpartition("/")
        stem, _, end = name.rpartition("-")
        shown.append(f"-{end}" if stem and stem == before else model if slash and organisation == whose else name)
        before, whose = stem, organisation
    return ", ".join(shown)


def _like(name: str) -> list[str]:
    """Return the names of known models that are most like another one."""
    from difflib import get_close_matches  # here, since only a wrong name needs it

    written = _written()
    return [*dict.fromkeys(written[each] for each in get_close_matches(name.lower(), written, n=2))]


def name_of(name_or_path: str) -> str:
    """Return the name by which `resolve` knows the model: for a folder of this package its name."""
    path = Path(name_or_path)
    return path.relative_to(CONFIGS).as_posix() if path.is_relative_to(CONFIGS) else name_or_path


def read_model(name_or_path: str) -> ModelConfig:
    """Return the config.json of `resolve(name_or_path)`. Raises ValueError, as `read`."""
    return read_file(resolve(name_or_path) / "config.json")


def read(name_or_path: str) -> dict[str, Any]:
    """Return config.json of `resolve(name_or_path)` in PaddleNLP's words, with num_key_value_heads filled in.

    Raises:
        ValueError: an unknown name; a config.json that is none, or that of a model which no layers here compute.
    """
    return words_of_model(read_model(name_or_path))


def words_of_model(config: ModelConfig) -> dict[str, Any]:
    """Return a ModelConfig as the dict that `read` returns."""
    content = config.content
    if config.theirs and config.family.hf_model_type:  # sizes have other names there
        content = to_paddlenlp(config, content.get("torch_dtype"))
    return content | {"num_key_value_heads": config.record.kv_heads}
