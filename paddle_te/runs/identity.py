"""Say in a manifest which run saved a checkpoint, and tell it from another run. Knows no Paddle."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from paddle_te.configs import MODEL_VALUES
from paddle_te.weights.frozen import FROZEN, frozen_by

LAYOUT_VALUES = (
    "tensor_parallel_degree pipeline_parallel_degree virtual_pp_degree sharding_parallel_degree data_parallel_degree "
    "expert_parallel_degree"
).split()


def model_values(
    config: Any, lora: Any = None, quantized: str | None = None, frozen: Iterable[str] | None = None
) -> dict[str, Any]:
    """Return {name: value} of a model: what tells a checkpoint of it from another model's.

    config: its configuration, an object with PaddleNLP's names. `MODEL_VALUES` are taken from it, and the layout of its
    decoder layers' weights. lora: PaddleNLP's LoRAConfig of the adapter that is trained on it. quantized: the
    precision in which only the weights under the adapter exist; None for the model's own. frozen: the patterns of
    --freeze.
    """
    values: dict[str, Any] = {name: getattr(config, name, None) for name in MODEL_VALUES}
    values["num_key_value_heads"] = values["num_key_value_heads"] or values["num_attention_heads"]
    te = getattr(config, "transformer_engine_backend", "none") != "none"
    values["weights"] = "Transformer Engine's" if te else native_weights(config)
    if lora is not None:
        values["adapter"] = f"rank {lora.r}, alpha {lora.lora_alpha}, on {' '.join(lora.target_modules)}"
        values["adapter"] += ", rank-stabilized" if lora.rslora else ""
        plus = getattr(lora, "lora_plus_scale", 1)
        values["adapter"] += f", B's learning rate times {plus:g}" if plus != 1 else ""
        values["adapter"] += f", over weights in {quantized}" if quantized else ""
    else:
        values[FROZEN] = frozen_by(frozen or ())
    return values


def native_weights(flags: object) -> str:
    """Name PaddleNLP's own layout of weights. flags: an object that may have fuse_attention_qkv and _ffn."""
    fused = [name for name in ("qkv", "ffn") if getattr(flags, f"fuse_attention_{name}", False)]
    return "PaddleNLP's" + (f" with fused {' and '.join(fused)}" if fused else "")


def layout_values(arguments: Any) -> dict[str, bool | int | str]:
    """Return the degrees of parallelism in PaddleNLP's TrainingArguments, and how the ranks save."""
    values = {name: max(getattr(arguments, name), 1) for name in LAYOUT_VALUES}
    sharding = [str(getattr(option, "value", option)) for option in arguments.sharding or ()]
    return values | {"sharding": " ".join(sharding), "unified_checkpoint": bool(arguments.unified_checkpoint)}


def fingerprint(paths: Iterable[str | Path], settings: Iterable[object] = ()) -> str:
    """Return a short text that tells files from others: by their sizes, their first and last MiB, and the settings."""
    digest, total = xxhash.xxh3_64(repr(list(settings)).encode()), 0
    for path in paths:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            digest.update(f"{size} ".encode() + file.read(2**20))
            file.seek(max(size - 2**20, 0))
            digest.update(file.read())
        total += size
    return f"{total:,} bytes, {digest.hexdigest()}"


def differences(there: Mapping[str, object], here: Mapping[str, object]) -> list[str]:
    """Return ["hidden_size is 256 there and 128 here", …] of two such dicts, for the names that both have."""
    return [
        f"{name} is {there[name]} there and {here[name]} here"
        for name in here
        if there.get(name, here[name]) != here[name]
    ]
