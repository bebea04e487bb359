"""Read how a configuration scales rotary positions for long contexts, in Hugging Face's or PaddleNLP's words.

The kinds, and the formulas behind them in `paddle_te.layers.rotary`:

- linear: positions are divided by `factor`.
- ntk: θ grows once, by `factor`. PaddleNLP's; Hugging Face has it not.
- dynamic: θ grows with what a sequence has beyond max_position_embeddings; PaddleNLP's dynamic_ntk.
- llama3: long wavelengths are slowed by `factor`.
- yarn: as llama3, with another ramp, and attention is sharpened.
- longrope: each frequency is divided by a number of its own, one in sequences up to the length of the first training,
  another in longer ones, and attention is sharpened. Microsoft called it su once.

Hugging Face has one dictionary, rope_scaling (in transformers 5 rope_parameters). PaddleNLP's Llama has the same for
llama3 and rope_scaling_type with rope_scaling_factor for the first three. What PaddleNLP's own layers have not stands
in Hugging Face's dictionary in a PaddleNLP config.json too, for backends paddle and transformer_engine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from paddle_te.configs.families import Config, Family, family_of, value
from paddle_te.configs.schema import SCHEMAS, ConfigError, keys_of

ENDLESS = sys.maxsize  # tokens
_LENGTH = "original_max_position_embeddings"
# kind: the numbers that its dictionary must have, and those that it may have
_NEEDED = {
    "linear": ("factor",),
    "ntk": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _LENGTH),
    "yarn": ("factor", _LENGTH),
    "longrope": ("short_factor", "long_factor", _LENGTH),
}
_NO_FORMULA = ("rope_theta", "finetuned")
_RAMPS = (("high_freq_factor", "low_freq_factor"), ("beta_fast", "beta_slow"))
_PADDLENLP = {"linear": "linear", "ntk": "ntk", "dynamic": "dynamic_ntk"}  # kind: rope_scaling_type


def scaling_of(config: Config) -> dict[str, Any] | None:
    """Return the scaling of a configuration, a dict or PaddleNLP's object, as Hugging Face's dictionary with rope_type.

    None where nothing is scaled. Raises ConfigError for an unknown kind, for numbers that are missing, and where the
    configuration says two things.
    """
    get = _reader(config)
    said = {word: _scaling(word, get(word), get) for word in ("rope_parameters", "rope_scaling") if get(word)}
    if name := get("rope_scaling_type"):
        kinds = {theirs: kind for kind, theirs in _PADDLENLP.items()}
        scaling = {"rope_type": kinds.get(name, name), "factor": get("rope_scaling_factor", 1.0)}
        said["rope_scaling_type"] = _scaling("rope_scaling_type", scaling, get)
    first, *others = said.values() or (None,)
    if any(other != first for other in others):
        raise ConfigError(f"{' and '.join(said)} say different things: leave one of them out")
    return first


def longest_sequence(config: Config) -> int:
    """Return how many tokens a sequence of a model may have, ENDLESS with dynamic scaling.

    max_position_embeddings may be the length of the first training: with Llama's linear and ntk, as PaddleNLP counts
    it, and with yarn (Qwen2.5's). A sequence may then be `factor` times as long. Gemma 3's linear is counted in.
    """
    scaling, family, word = scaling_of(config) or {}, family_of(config), "max_position_embeddings"
    trained = int(value(config, word, getattr(SCHEMAS[family.model_type], word)))
    match scaling.get("rope_type"):
        case "dynamic":
            return ENDLESS
        case "linear" | "ntk" if _has_words(family):
            return int(trained * scaling["factor"])
        case "yarn":
            return max(trained, int(scaling[_LENGTH] * scaling["factor"]))
        case _:
            return trained


def theta_of(config: Config) -> float:
    """Return the base of a configuration's rotary angles, which transformers 5 keeps together with their scaling."""
    get = _reader(config)
    usual = getattr(SCHEMAS.get(get("model_type") or "llama"), "rope_theta", 10000.0)
    return (get("rope_parameters") or {}).get("rope_theta") or get("rope_theta") or usual


def _kinds(model_type: str | None) -> list[str]:
    """Return those that a family may have: longrope only where config.json says the length of the first training."""
    says_length = hasattr(SCHEMAS.get(model_type or "llama"), _LENGTH)
    return [kind for kind in _NEEDED if kind != "longrope" or says_length]


def _turns_parts(model_type: str | None) -> bool:
    return hasattr(SCHEMAS.get(model_type or "llama"), "partial_rotary_factor")


def _scaling(word: str, said: Mapping[str, Any], get: Callable[..., Any]) -> dict[str, Any] | None:
    scaling = {name: value for name, value in said.items() if value is not None and name not in _NO_FORMULA}
    if scaling.get("truncate", False):  # what it means where it is left out
        del scaling["truncate"]
    kind = scaling.pop("type", "default")
    kind = scaling.pop("rope_type", kind)
    if scaling.pop("partial_rotary_factor", 1.0) != 1.0 and not _turns_parts(get("model_type")):
        part = said["partial_rotary_factor"]
        raise ConfigError(f"{word}: partial_rotary_factor={part!r}: whole heads are turned, so it can only be 1")
    if kind == "default":
        return None
    kind, kinds = "longrope" if kind == "su" else kind, _kinds(get("model_type"))
    if kind == "yarn":
        scaling = _complete(scaling, get("max_position_embeddings"))
    if kind == "longrope":
        default = getattr(SCHEMAS.get(get("model_type") or "llama"), _LENGTH, None)
        scaling[_LENGTH] = get(_LENGTH) or scaling.get(_LENGTH) or default
    return {"rope_type": kind, **_checked(word, kind, kinds, scaling)}


def _reader(config: Config) -> Callable[..., Any]:
    return partial(value, config)


def _complete(scaling: dict[str, Any], max_position_embeddings: int | None) -> dict[str, Any]:
    """Add what transformers takes from max_position_embeddings where the dictionary of yarn leaves it out."""
    length = scaling.get(_LENGTH) or max_position_embeddings
    factor = scaling.get("factor") or (max_position_embeddings or 0) / (length or 1)
    return scaling | {"factor": factor, _LENGTH: length}


def _checked(word: str, kind: str, kinds: list[str], scaling: dict[str, Any]) -> dict[str, Any]:
    if kind not in kinds:
        raise ConfigError(f"{word}: rope type {kind!r} is not supported; it may be default, {', '.join(kinds)}")
    missing = [key for key in _NEEDED[kind] if scaling.get(key) is None]
    if missing:
        raise ConfigError(f"{word} of type {kind} lacks {', '.join(missing)}")
    for larger, smaller in _RAMPS:
        if kind in ("llama3", "yarn") and scaling.get(larger, 2**63) <= scaling.get(smaller, 0):
            raise ConfigError(f"{word}: {larger}={scaling[larger]} must be above {smaller}={scaling[smaller]}")
    return scaling


def to_paddlenlp(scaling: dict[str, Any] | None, family: Family) -> dict[str, Any]:
    """Return what config.json has for a scaling in PaddleNLP's words, for a model of a Family."""
    if scaling is None:
        return {}
    if _has_words(family) and scaling["rope_type"] in _PADDLENLP:
        return {"rope_scaling_type": _PADDLENLP[scaling["rope_type"]], "rope_scaling_factor": scaling["factor"]}
    return {"rope_scaling": scaling}


def _has_words(family: Family) -> bool:
    """Return whether PaddleNLP's layers of a Family read a scaling: then its record has rope_scaling_type's kinds."""
    return keys_of(SCHEMAS[family.model_type])["rope_scaling_type"].only != (None,)


def check_paddlenlps_layers(config: Config) -> None:
    """Raise ConfigError for a scaling that PaddleNLP's own layers would leave out without a word.

    config: in PaddleNLP's words, a dict or PaddleNLP's object.
    """
    get, scaling, family = _reader(config), scaling_of(config), family_of(config)
    read = get("rope_scaling_type") or (get("rope_scaling") or {}).get("rope_type") == "llama3"
    if scaling and not (_has_words(family) and read):
        raise ConfigError(
            f"rope_scaling of type {scaling['rope_type']}: PaddleNLP's own {family.title} would leave it out; use "
            "backend paddle or transformer_engine, whose weights are in te layout"
        )
