"""The degrees of parallelism against each other, the number of devices and the model, before anything starts.

The launcher checks its arguments with this, the training scripts their flags. Imports neither paddle nor paddlenlp,
which take seconds.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from typing import Any

from paddle_te import configs
from paddle_te.configs.families import family_of, is_tied
from paddle_te.configs.spec import spec_of
from paddle_te.hosts.paddlenlp.capabilities import PADDLENLP
from paddle_te.options import launcher


class LayoutError(ValueError):
    """What does not fit, by the argument's name, and what it may be: one line."""


class Names(dict[str, str]):
    """What the user calls an argument; the launcher's name where nothing else is said."""

    def __missing__(self, name: str) -> str:
        return name


LAUNCHER = Names()
FLAGS = Names({name: f"--{flag}" for name, flag in launcher.FLAGS.items()})


def check_flags(flags: argparse.Namespace, world: int) -> None:
    """`check_layout` and `check_model` for the scripts' parsed flags; PaddleNLP's degrees below 1 are its defaults.

    Raises:
        LayoutError: a layout that cannot run, or an unknown model.
    """
    args = argparse.Namespace(
        TP=max(flags.tensor_parallel_degree, 1),
        PP=max(flags.pipeline_parallel_degree, 1),
        SEP=max(flags.sep_parallel_degree, 1),
        CP=max(flags.context_parallel_degree, 1),
    )
    args.FSDP = flags.sharding_parallel_degree
    if args.FSDP < 1:  # all ranks that are left
        args.FSDP = max(world // ranks_of_a_sequence(args), 1) if flags.sharding else 1
    length = "max_seq_length" if hasattr(flags, "max_seq_length") else "max_length"  # fine-tuning's
    names = Names(FLAGS, max_seqlen=f"--{length}")
    args.VP = max(flags.virtual_pp_degree, 1)
    args.GA = flags.gradient_accumulation_steps
    args.SP = flags.sequence_parallel
    args.max_seqlen = getattr(flags, length)
    args.sharding_stage = (flags.sharding or "stage1").split()[0]
    args.model_name = flags.model_name_or_path
    check_layout(args, world, names)
    said = configs.read_model(args.model_name)
    configs.check_computed(said, flags.transformer_engine_backend)
    config = configs.words_of_model(said)
    check_model(args, config, names)
    if args.PP > 1 and is_tied(config) and "split_param" in (flags.sharding_parallel_config or ""):
        raise LayoutError(
            f"--sharding_parallel_config split_param with --pipeline_parallel_degree={args.PP}: Paddle would count the "
            f"tied embeddings of {args.model_name} twice when it clips; leave split_param out"
        )


def ranks_of_a_sequence(args: argparse.Namespace) -> int:
    """How many devices work on the same sequences: those between which data is not divided."""
    return args.TP * args.PP * args.SEP * args.CP


def _sharing(args: argparse.Namespace) -> list[str]:
    """Of SEP and CP what is above 1."""
    return [name for name in ("SEP", "CP") if getattr(args, name) > 1]


def check_layout(args: argparse.Namespace, world: int, names: Mapping[str, str] = LAUNCHER) -> None:
    """Degrees against each other and against the number of devices."""

    def say(name: str) -> str:
        return f"{names[name]}={str(getattr(args, name)).lower()}"

    degrees = ranks_of_a_sequence(args) * args.FSDP
    if world % degrees:
        split = ["TP", "PP", *_sharing(args), "FSDP"]
        remedy = "; one process a device: python -m paddle.distributed.launch, or the launch script"
        if names is LAUNCHER:
            remedy = " (DEVICES=0,1,... chooses the devices)"
        raise LayoutError(
            f"{' x '.join(map(say, split))} = {degrees} must divide the number of devices, {world}; "
            f"DP is what remains{remedy}"
        )
    if args.VP > 1 and args.PP < 3:
        raise LayoutError(
            f"{say('VP')} needs {names['PP']} of at least 3, not {args.PP} (Paddle asserts more than 2 stages)"
        )
    if args.SP and args.TP == 1:
        raise LayoutError(
            f"{say('SP')} needs {names['TP']} of at least 2: it splits the sequence over the tensor-parallel devices"
        )
    if args.SEP > 1 and args.CP > 1:
        raise LayoutError(f"{say('SEP')} does not go with {say('CP')}: both split sequences; use one of them")
    if args.max_seqlen % args.SEP:
        raise LayoutError(f"{say('max_seqlen')} must be a multiple of {say('SEP')}, which splits sequences")
    if args.CP > 1 and args.max_seqlen % (2 * args.CP):
        raise LayoutError(f"{say('max_seqlen')} must be a multiple of 2 x {say('CP')}: each device has two pieces")
    if args.SP and args.max_seqlen % (args.SEP * args.CP * args.TP):
        degrees = " x ".join(map(say, (*_sharing(args), "TP")))
        raise LayoutError(f"{say('max_seqlen')} must be a multiple of {degrees} with {say('SP')}")
    if args.PP > 1 and args.GA < args.PP:
        raise LayoutError(f"{say('GA')} must be at least {say('PP')}, to fill the pipeline")
    if args.VP > 1 and (args.GA < 2 * args.PP or args.GA % args.PP):
        raise LayoutError(
            f"{say('GA')} must be a multiple of {say('PP')} of at least {2 * args.PP} with {names['VP']} above 1"
        )
    if args.FSDP > 1 and args.PP > 1 and args.sharding_stage != "stage1":
        raise LayoutError(f"{say('sharding_stage')} does not go with {say('PP')} in PaddleNLP; use stage1")
    if args.FSDP > 1 and _sharing(args) and args.sharding_stage != "stage1":
        raise LayoutError(
            f"{say('sharding_stage')} does not go with {say(*_sharing(args))}: Paddle would not sum the gradients of "
            "the devices that share sequences; use stage1"
        )
    if args.FSDP > 1 and args.TP > 1 and args.sharding_stage == "stage3":
        raise LayoutError(f"{say('sharding_stage')} does not go with {say('TP')} in PaddleNLP; use stage1 or stage2")


def overlap_obstacle(args: argparse.Namespace, world: int) -> str | None:
    """What of a layout that `check_layout` accepts keeps sharding's communication from running at the same time as
    computation, in the launcher's words, and what to change; None where nothing does."""
    if args.FSDP == 1:
        return "it is for sharding, and FSDP=1 shards nothing: FSDP=all shards over all data-parallel devices"
    if args.sharding_stage == "stage3":
        return "it is for sharding_stage=stage1 or stage2; stage3's communication runs beside computation without it"
    if args.PP > 1 and _sharing(args):
        name = _sharing(args)[0]
        return f"Paddle has it for PP={args.PP} or for {name}={getattr(args, name)}, not for both"
    if args.sharding_stage == "stage2" and (dp := world // (ranks_of_a_sequence(args) * args.FSDP)) > 1:
        return f"stage2 has no float32 main gradients in PaddleNLP where DP is {dp}: set FSDP=all, or stage1"
    return None


def check_model(args: argparse.Namespace, config: dict[str, Any], names: Mapping[str, str] = LAUNCHER) -> None:
    """The layout against the model's dimensions, and what its family has."""
    family = family_of(config)
    if args.PP > 1 and not PADDLENLP[family.model_type].pipeline:
        raise LayoutError(f"{names['PP']}={args.PP}: PaddleNLP has no pipeline for {family.title}; it must be 1")
    split = {key: config[key] for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size")}
    for key, size in split.items():
        if size % args.TP:
            common = math.gcd(*split.values())
            possible = ", ".join(str(n) for n in range(1, 65) if common % n == 0)
            raise LayoutError(
                f"{names['TP']}={args.TP} must divide {key}={size} of {args.model_name}; it may be {possible}"
            )
    for key in ("num_attention_heads", "num_key_value_heads"):
        if config[key] // args.TP % args.SEP:
            raise LayoutError(
                f"{names['SEP']}={args.SEP} must divide {key} of a device, of {args.model_name} {config[key]} / "
                f"{names['TP']}={args.TP}: the devices that share a sequence share the heads in attention"
            )
    if _sharing(args) and family.learned_positions:
        name = _sharing(args)[0]
        raise LayoutError(
            f"{names[name]}={getattr(args, name)}: {family.title}'s embedding of positions would count each device's "
            "tokens from 0; it must be 1"
        )
    if args.CP > 1 and any(layer.attention.window for layer in spec_of(config).layers):
        raise LayoutError(
            f"{names['CP']}={args.CP}: ring attention has no sliding window, {args.model_name} has; use {names['SEP']}"
        )
    layers = config["num_hidden_layers"]
    if layers % (args.PP * args.VP):
        raise LayoutError(
            f"{names['PP']}={args.PP} x {names['VP']}={args.VP} = {args.PP * args.VP} must divide the {layers} layers "
            f"of {args.model_name}"
        )
