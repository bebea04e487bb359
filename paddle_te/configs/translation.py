"""Translate config.json between the libraries' words: transformers' to PaddleNLP's, and back."""

from __future__ import annotations

from typing import Any

from paddle_te.configs.families import Family
from paddle_te.configs.reading import ModelConfig, check_computed, model_config
from paddle_te.configs.rope import scaling_of, theta_of
from paddle_te.configs.rope import to_paddlenlp as rope_in_paddlenlp
from paddle_te.configs.schema import ConfigError, Key, keys_of, words_of
from paddle_te.configs.spec import spec_of


def in_paddlenlps_words(config: ModelConfig) -> dict[str, Any]:
    """Return a config.json's content, translated where transformers wrote it.

    Raises ConfigError for a model that PaddleNLP cannot express.
    """
    check_computed(config)
    content = config.content
    return (
        to_paddlenlp(config, content.get("dtype") or content.get("torch_dtype") or "float32")
        if config.theirs
        else content
    )


def to_paddlenlp(config: ModelConfig, dtype: str | None) -> dict[str, Any]:
    """Return a transformers' config.json in PaddleNLP's words, each written as the defaults differ.

    dtype: of the weights. Raises ConfigError for a model that PaddleNLP cannot express.
    """
    check_computed(config)
    record, family = config.record, config.family
    said = {name: getattr(record, name) for name, key in keys_of(type(record)).items() if key.carried}
    if said["intermediate_size"] is None:
        said["intermediate_size"] = 4 * record.hidden_size
    said |= {"architectures": [family.architecture], "model_type": family.model_type, "dtype": dtype}
    if family.learned_positions:
        return said
    said |= {"num_key_value_heads": record.kv_heads, "rope_theta": theta_of(config.content)}
    if "partial_rotary_factor" in said and (rotation := spec_of(config.content).layer.attention.rotation):
        said["partial_rotary_factor"] = rotation.fraction
    said |= rope_in_paddlenlp(scaling_of(config.content), family)
    check_computed(model_config(said))
    return said


def to_transformers(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """Return a PaddleNLP config.json in transformers' words. Raises ConfigError where these have none."""
    check_computed(config)
    record, family = config.record, config.family
    scaling = None if family.learned_positions else scaling_of(config.content)
    if getattr(record, "alibi", False):
        raise ConfigError("config.json: alibi: Hugging Face's models have only rotary positions")
    if scaling and scaling["rope_type"] == "ntk":
        raise ConfigError("config.json: rope_scaling_type='ntk': Hugging Face's models have no such scaling")
    said: dict[str, Any] = {}
    for name, key in keys_of(type(record)).items():
        if key.carried or (key.only and key.only[0] is not None):
            said |= dict.fromkeys(words_of(name, key, theirs=True), _in_transformers(key, getattr(record, name)))
    said |= {"architectures": [family.hf_architecture or family.architecture], "torch_dtype": dtype}
    said["model_type"] = family.hf_model_type or family.model_type
    if not family.learned_positions:
        said |= {
            "num_key_value_heads": record.kv_heads,
            "rope_theta": theta_of(config.content),
            "rope_scaling": _scaling_in_transformers(scaling, family),
        }
    return said


def _scaling_in_transformers(scaling: dict[str, Any] | None, family: Family) -> dict[str, Any] | None:
    """Return rope_scaling; transformers' Phi3 takes one of three words only, and DeepSeek's own code reads type."""
    if scaling and family.latent:
        return {"type": scaling["rope_type"]} | {name: said for name, said in scaling.items() if name != "rope_type"}
    if not scaling or scaling["rope_type"] != "longrope":
        return scaling
    return {"type": "longrope"} | {name: scaling[name] for name in ("short_factor", "long_factor")}


def _in_transformers(key: Key, value: object) -> object:
    return next((theirs for theirs, ours in key.values.items() if ours == value), value)
