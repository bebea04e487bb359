"""Make docs/reference/config.md, the keys that config.json of each family may have, from `configs.schema`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, get_type_hints

from paddle_te import typed
from paddle_te.configs.families import FAMILIES, Family
from paddle_te.configs.others import CHANGING
from paddle_te.configs.reading import MOST_BYTES
from paddle_te.configs.schema import SAME, SCHEMAS, Decoder, Key, Multiplied, Rotary, Scaling, SomeLayers

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/config.md"
_HEAD = "| key | it must be | default | unit | what it says |\n|---|---|---|---|---|"


def page() -> str:
    """Return the content of the page."""
    parts = [
        "# config.json",
        "Made by `python -m paddle_te.configs` from `paddle_te/configs/schema.py`; edit that instead.",
        "A model's folder has a config.json, PaddleNLP's or Hugging Face's. The launcher, the training scripts, the "
        "evaluation, the converter and the planner read it through one door. It is JSON in UTF-8 of at most "
        f"{MOST_BYTES // 2**20} MiB, in which no key stands twice and all numbers are finite. A value that a key may "
        "not have is refused in one line, which names the file, the key, the value and what it must be, with exit "
        "status 2, before work starts.",
        "A default is the one of the library that wrote the file. `transformers` wrote it where the file has "
        "transformers_version or torch_dtype, or where model_type is `gpt2`; else PaddleNLP did. Two defaults in a row "
        "are those of transformers and of PaddleNLP.",
        _section("All families", "A family's own table replaces a row.", Decoder),
        _section("Llama, Qwen2 and Mistral", "They have rotary positions, RMSNorm and a gated MLP.", Rotary),
        _section(
            "Mixtures of experts",
            "The families whose layers have experts have some of these; Qwen's have all.",
            SomeLayers,
            inherited=True,
        ),
        _section("Granite's factors", "Both of Granite's families have them.", Multiplied),
        *(_section(FAMILIES[name].title, _model_types(FAMILIES[name]), record) for name, record in SCHEMAS.items()),
        "## rope_scaling and rope_parameters",
        "The kinds are `default`, `linear`, `dynamic`, `ntk`, `llama3`, `yarn` and, of Phi3, `longrope`. "
        "PaddleNLP's rope_scaling_type says `linear`, `ntk` or `dynamic_ntk`, with rope_scaling_factor.",
        "\n".join(["| key | it must be |", "|---|---|", *map(_scaling_row, fields(Scaling))]),
        "## Other keys",
        "transformers and PaddleNLP also write keys that say nothing about training, such as `use_cache` or "
        "`temperature`. They are known, and left alone. A key that nothing here knows is named once in the log, and "
        "the model is built without it. A key whose name is nearly that of a known one is refused, as it may be a "
        "mistyped one.",
        "These keys change what a model computes, and no layer here does it. They are refused with any other value:",
        "\n".join(_changing()),
        "A `quantization_config` that names no method, as PaddleNLP writes one, is no refusal.",
        "## Size",
        "A model of more than ten million million parameters is refused: no machine holds it. Before a model is built, "
        "its weights are "
        "compared with the memory of the GPU or of the machine, and the error says how many parameters the sizes make.",
    ]
    return "\n\n".join(parts) + "\n"


def _section(title: str, says: str, record: type, inherited: bool = False) -> str:
    """Return the keys that a record says itself, and, if inherited, those that it takes over."""
    hints = get_type_hints(record)
    own = hints if inherited else record.__annotations__
    rows = [_row(entry, hints[entry.name]) for entry in fields(record) if entry.name in own]
    return "\n\n".join([f"## {title}", says, "\n".join([_HEAD, *rows])])


def _model_types(family: Family) -> str:
    theirs = f", in transformers' files `{family.hf_model_type}`" if family.hf_model_type else ""
    part = f", or that of `text_config` where the file's is `{family.part_of}`" if family.part_of else ""
    return f"model_type is `{family.model_type}`{theirs}{part}."


def _changing() -> list[str]:
    """Return lines of the keys of CHANGING by the values that they may have."""
    names: dict[str, list[str]] = {}
    for name, values in CHANGING.items():
        names.setdefault(_values((None, *values)), []).append(f"`{name}`")
    return [f"- {values}: {', '.join(of_these)}" for values, of_these in names.items()]


def _row(entry: Field[Any], kind: Any) -> str:
    key: Key = entry.metadata["key"]
    cells = [_name(entry.name, key), _wanted(entry, kind, key), _defaults(entry, key), key.unit, _means(key)]
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def _name(name: str, key: Key) -> str:
    theirs = f", transformers' {' and '.join(f'`{word}`' for word in key.theirs)}" if key.theirs else ""
    return f"`{name}`{theirs}"


def _wanted(entry: Field[Any], kind: Any, key: Key) -> str:
    if key.only:
        theirs = f"; transformers' {_values(tuple(key.values))}" if key.values else ""
        return _values(key.only) + theirs
    words = typed.wanted(kind, entry.metadata.get("bounds")).replace("'", "`")
    return f"{words}; with backends pd and te {_values(key.ours)}" if key.ours else words


def _defaults(entry: Field[Any], key: Key) -> str:
    if entry.default is MISSING:
        return "must be there"
    return _value(entry.default) if key.paddlenlp is SAME else f"{_value(entry.default)}, {_value(key.paddlenlp)}"


def _means(key: Key) -> str:
    return key.means + (f" (only {key.written_by} has it)" if key.written_by else "")


def _scaling_row(entry: Field[Any]) -> str:
    words = typed.wanted(get_type_hints(Scaling)[entry.name], entry.metadata.get("bounds"))
    return f"| `{entry.name}` | {words} |"


def _value(value: object) -> str:
    return f"`{json.dumps(value)}`"


def _values(values: Iterable[object]) -> str:
    return " or ".join(_value(value) for value in values)
