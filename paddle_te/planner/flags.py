"""The Layout of a run, from the flags of its training script.

The launcher, `auto`, `paddle-te plan` and the advice after an out-of-memory have one way to it: `layout_of`, of a
Trainer's arguments, or of a command line's words by way of `read`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping

from paddle_te.options import scripts
from paddle_te.options.option import FLAG, SEQUENCES, TEXT, TOKENS, Kind, Option, choice
from paddle_te.planner.layout import Layout, Lora

# {flag: field of a Layout}, of those that say one thing alone
FIELDS = {
    **{name: name for name in (*scripts.OPTIMIZER, "offload_optimizer", "offload_activations", "mlp_chunk_tokens")},
    "recompute_modules": "recompute_modules",
    "release_grads": "release_grads",
    "amp_master_grad": "main_grads",
    "activation_func_fp8_input_store": "fp8_input_store",
    "use_fused_linear_cross_entropy": "loss_in_chunks",
    "fp8_lm_head": "fp8_head",
    "fp8_dpa": "fp8_attention",
}
_DEGREES = ("tensor", "pipeline", "sep", "context", "sharding")
# PaddleNLP's flags that a Layout depends on, with its defaults
_PADDLENLPS = (
    *(Option(f"{kind}_parallel_degree", Kind(int, "a whole number", read=int), -1) for kind in _DEGREES),
    *(Option(name, SEQUENCES, 1) for name in ("virtual_pp_degree", "gradient_accumulation_steps")),
    Option("per_device_train_batch_size", SEQUENCES, 8),
    *(Option(name, FLAG, False) for name in ("recompute", "amp_master_grad", "release_grads", "lora")),
    Option("recompute_granularity", choice("full", "core_attn", "full_attn"), "full"),
    *(Option(name, TEXT, "") for name in ("sharding", "sharding_parallel_config")),
    *(Option(name, TOKENS, None) for name in ("max_seq_length", "max_length")),
)
_OURS = (*scripts.LAYERS, *scripts.TRAINING, *scripts.FINETUNE_MODEL, *scripts.FINETUNE_DATA, *scripts.PADDLENLPS)
_READ = {option.name: option for option in (*_OURS, *_PADDLENLPS, Option("do_eval", FLAG, False))}
_NAMES = {*FIELDS, *(option.name for option in _PADDLENLPS), "transformer_engine_backend", "use_fp8"}
_NAMES |= {"lora_rank", "lora_targets", "quantize_base"}


def read(words: Iterable[str]) -> argparse.Namespace:
    """The flags that a Layout depends on, of a script's command line; those that are not there have their defaults.

    Raises ValueError for a value that a flag may not have.
    """
    given, _ = said(words, _NAMES)
    return argparse.Namespace(**{name: _READ[name].default for name in _NAMES} | given)


def said(
    words: Iterable[str], names: Iterable[str], options: Mapping[str, Option] = _READ
) -> tuple[dict[str, object], list[str]]:
    """({flag: value} of those named that stand among a script's words, the other words). options: by name."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in names:
        kind = options[name].kind
        several = {"nargs": "+"} if kind.read is str.split else {}
        flag = {"nargs": "?", "const": True} if kind is FLAG else {}
        reader = _boolean if kind is FLAG else _one_of(kind) if several else kind.argument
        parser.add_argument(f"--{name}", type=reader, default=argparse.SUPPRESS, **several, **flag)
    try:
        found, others = parser.parse_known_args(list(words))
    except argparse.ArgumentError as error:
        raise ValueError(str(error).removeprefix("argument ")) from error
    return vars(found), others


def _one_of(kind: Kind):
    return lambda word: kind.argument(word)[0]


def _boolean(text: str) -> bool:
    """As PaddleNLP's parser reads it."""
    words = ("yes", "true", "t", "y", "1"), ("no", "false", "f", "n", "0")
    for value, these in zip((True, False), words, strict=True):
        if text.lower() in these:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} must be true or false")


def layout_of(flags, gpus: int, sequence: int | None = None, lora: Lora | None = None) -> Layout:
    """The Layout of a run on so many GPUs.

    flags: a Trainer's arguments, or what `read` has of a command line. sequence: tokens; by default as the flags say.
    lora: of a Trainer, whose arguments do not say it.
    """
    tp, pp, sep, cp, sharding = (max(getattr(flags, f"{kind}_parallel_degree"), 1) for kind in _DEGREES)
    stages = flags.sharding if isinstance(flags.sharding, str) else _words(flags.sharding)
    stage = re.search(r"stage([123])", stages)
    if stage and flags.sharding_parallel_degree < 1:  # all ranks that are left
        sharding = max(gpus // (tp * pp * sep * cp), 1)
    one_for_one = {field: getattr(flags, name, None) for name, field in FIELDS.items()}
    one_for_one["recompute_modules"] = tuple(one_for_one["recompute_modules"] or ())
    return Layout(
        gpus,
        sequence or getattr(flags, "max_seq_length", None) or flags.max_length,
        tp=tp,
        pp=pp,
        vp=flags.virtual_pp_degree,
        sep=sep,
        cp=cp,
        sharding=sharding if stage else 1,
        stage=int(stage[1]) if stage else 1,
        batch=flags.per_device_train_batch_size,
        micro_batches=flags.gradient_accumulation_steps,
        precision="fp8" if flags.use_fp8 else "bf16",
        recompute=flags.recompute_granularity if flags.recompute else "none",
        overlap="overlap" in (flags.sharding_parallel_config or ""),
        lora=lora or _lora(flags),
        **one_for_one,
    )


def _words(values) -> str:
    """Of a Trainer's list of PaddleNLP's ShardingOptions."""
    return " ".join(str(getattr(each, "value", each)) for each in values or ())


def _lora(flags) -> Lora | None:
    if not getattr(flags, "lora", False):
        return None
    return Lora(flags.lora_rank, flags.lora_targets, flags.quantize_base == "fp8")
