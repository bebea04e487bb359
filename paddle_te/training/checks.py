"""Checks of a run's arguments against each other, the model and the device, before anything starts.

`args` has the launcher's names as attributes (`launch.ARGUMENTS`, `launch.KNOBS`); `check_flags` does the same for
the scripts' own flags. What does not fit raises LaunchError: one line that names the argument and what it may be.

Imports neither paddle nor paddlenlp, which take seconds.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from paddle_te.training.checkpoints import complete_checkpoints, find_checkpoint
from paddle_te.training.machines import LaunchError, count_gpus


def _load_configs():
    """paddle_te.llama.configs without its parent package, which imports paddle."""
    spec = importlib.util.spec_from_file_location("_configs", Path(__file__).parents[1] / "llama/configs/__init__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


configs = _load_configs()

# Tokenizers that PaddleNLP knows by name and downloads; any other one is a folder.
TOKENIZERS = [name for name in configs.known_names() if name.startswith("meta-llama/")]
TOKENIZERS += [f"facebook/llama-{size}" for size in ("7b", "13b", "30b", "65b")]


class Names(dict):
    """What the user calls an argument; the launcher's name where nothing else is said."""

    def __missing__(self, name):
        return name


LAUNCHER = Names()
# the scripts' names of the launcher's arguments
FLAGS = Names(
    TP="--tensor_parallel_degree",
    PP="--pipeline_parallel_degree",
    VP="--virtual_pp_degree",
    FSDP="--sharding_parallel_degree",
    GA="--gradient_accumulation_steps",
    SP="--sequence_parallel",
    max_seqlen="--max_seq_length",
    sharding_stage="--sharding",
)


def check_flags(flags: argparse.Namespace, world: int) -> None:
    """`check_layout` and `check_model` for the scripts' parsed flags; PaddleNLP's degrees below 1 are its defaults.

    Raises:
        LaunchError: a layout that cannot run, or an unknown model.
    """
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
        if getattr(flags, name) < 1:
            raise LaunchError(f"--{name}={getattr(flags, name)} must be at least 1")
    tp, pp = max(flags.tensor_parallel_degree, 1), max(flags.pipeline_parallel_degree, 1)
    fsdp = flags.sharding_parallel_degree
    if fsdp < 1:  # all ranks that are left
        fsdp = max(world // (tp * pp), 1) if flags.sharding else 1
    length = "max_seq_length" if hasattr(flags, "max_seq_length") else "max_length"  # fine-tuning's
    names = Names(FLAGS, max_seqlen=f"--{length}")
    args = argparse.Namespace(
        TP=tp,
        PP=pp,
        VP=max(flags.virtual_pp_degree, 1),
        FSDP=fsdp,
        GA=flags.gradient_accumulation_steps,
        SP=flags.sequence_parallel,
        max_seqlen=getattr(flags, length),
        sharding_stage=(flags.sharding or "stage1").split()[0],
        model_name=flags.model_name_or_path,
    )
    check_layout(args, world, names)
    config = configs.read(args.model_name)
    check_model(args, config, names)
    if pp > 1 and config.get("tie_word_embeddings") and "split_param" in (flags.sharding_parallel_config or ""):
        raise LaunchError(
            f"--sharding_parallel_config split_param with --pipeline_parallel_degree={pp}: Paddle would count the tied "
            f"embeddings of {args.model_name} twice when it clips; leave split_param out"
        )


def check_layout(args: argparse.Namespace, world: int, names: Mapping[str, str] = LAUNCHER) -> None:
    """Degrees against each other and against the number of devices."""

    def say(name):
        return f"{names[name]}={str(getattr(args, name)).lower()}"

    degrees = args.TP * args.PP * args.FSDP
    if world % degrees:
        remedy = "; one process a device: python -m paddle.distributed.launch, or the launch script"
        if names is LAUNCHER:
            remedy = " (DEVICES=0,1,... chooses the devices)"
        raise LaunchError(
            f"{say('TP')} x {say('PP')} x {say('FSDP')} = {degrees} must divide the number of devices, {world}; "
            f"DP is what remains{remedy}"
        )
    if args.VP > 1 and args.PP < 3:
        raise LaunchError(
            f"{say('VP')} needs {names['PP']} of at least 3, not {args.PP} (Paddle asserts more than 2 stages)"
        )
    if args.SP and args.TP == 1:
        raise LaunchError(
            f"{say('SP')} needs {names['TP']} of at least 2: it splits the sequence over the tensor-parallel devices"
        )
    if args.SP and args.max_seqlen % args.TP:
        raise LaunchError(f"{say('max_seqlen')} must be a multiple of {say('TP')} with {say('SP')}")
    if args.PP > 1 and args.GA < args.PP:
        raise LaunchError(f"{say('GA')} must be at least {say('PP')}, to fill the pipeline")
    if args.VP > 1 and (args.GA < 2 * args.PP or args.GA % args.PP):
        raise LaunchError(
            f"{say('GA')} must be a multiple of {say('PP')} of at least {2 * args.PP} with {names['VP']} above 1"
        )
    if args.FSDP > 1 and args.PP > 1 and args.sharding_stage != "stage1":
        raise LaunchError(f"{say('sharding_stage')} does not go with {say('PP')} in PaddleNLP; use stage1")
    if args.FSDP > 1 and args.TP > 1 and args.sharding_stage == "stage3":
        raise LaunchError(f"{say('sharding_stage')} does not go with {say('TP')} in PaddleNLP; use stage1 or stage2")


def check_model(args: argparse.Namespace, config: dict, names: Mapping[str, str] = LAUNCHER) -> None:
    """The layout against the model's dimensions."""
    split = {key: config[key] for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size")}
    for key, size in split.items():
        if size % args.TP:
            common = math.gcd(*split.values())
            possible = ", ".join(str(n) for n in range(1, 65) if common % n == 0)
            raise LaunchError(
                f"{names['TP']}={args.TP} must divide {key}={size} of {args.model_name}; it may be {possible}"
            )
    layers = config["num_hidden_layers"]
    if layers % (args.PP * args.VP):
        raise LaunchError(
            f"{names['PP']}={args.PP} x {names['VP']}={args.VP} = {args.PP * args.VP} must divide the {layers} layers "
            f"of {args.model_name}"
        )


def check_precision(args: argparse.Namespace, config: dict, device: str) -> None:
    """Backend and precision against the device, fp8 against the shapes of its matrix products."""
    if device == "cpu":
        if args.backend == "te":
            raise LaunchError(
                "backend=te needs an NVIDIA GPU (DEVICE=gpu with paddlepaddle-gpu, or DEVICE=nvgpu with tools/nvgpu); "
                "on a CPU use pd, the same layers in plain Paddle"
            )
        if args.precision == "bf16":
            raise LaunchError(
                "precision=bf16 does not train on a plain CPU in Paddle; use fp32, or DEVICE=gpu or nvgpu"
            )
        for name, used in (("TP", args.TP > 1), ("PP", args.PP > 1), ("sharding_stage", args.FSDP > 1)):
            if used and (name, args.sharding_stage) != ("sharding_stage", "stage1"):
                raise LaunchError(
                    f"{name}={getattr(args, name)} does not work on DEVICE=cpu (Paddle's gloo has DP and stage1 only); "
                    "use DEVICE=nvgpu, whose host runtime needs no GPU (tools/nvgpu)"
                )
    if device == "nvgpu" and args.backend == "te" and not args.DRY_RUN and not count_gpus():
        raise LaunchError("backend=te needs an NVIDIA GPU, and nvidia-smi finds none; on nvgpu's host runtime use pd")
    if args.precision == "fp8" and args.backend != "te":
        pd = "; pd emulates it: precision=fp32, EXTRA_ARGS='--use_fp8 true'" if args.backend == "pd" else ""
        raise LaunchError(f"precision=fp8 needs backend=te, not {args.backend}{pd}")
    if args.precision == "fp32" and args.backend == "te":
        raise LaunchError(
            "precision=fp32 does not go with backend=te, whose attention kernels take bf16; use bf16 or fp8"
        )
    if args.precision == "fp8":
        _check_fp8(args, config)


def _check_fp8(args: argparse.Namespace, config: dict) -> None:
    # cuBLASLt's fp8 GEMM wants leading dimensions in multiples of 16; each dimension leads in fprop, dgrad or wgrad.
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    tokens = args.batch_size_per_device * args.max_seqlen
    sizes = {
        f"hidden_size of {args.model_name}": config["hidden_size"],
        f"query size over TP={args.TP}": config["num_attention_heads"] * head_dim // args.TP,
        f"key size over TP={args.TP}": config["num_key_value_heads"] * head_dim // args.TP,
        f"intermediate_size over TP={args.TP}": config["intermediate_size"] // args.TP,
        "batch_size_per_device x max_seqlen": tokens,
    }
    if args.SP:
        sizes[f"batch_size_per_device x max_seqlen over TP={args.TP}"] = tokens // args.TP
    for name, size in sizes.items():
        if size % 16:
            raise LaunchError(f"precision=fp8 needs multiples of 16; {name} is {size}")


def check_data(args: argparse.Namespace) -> str | None:
    """The folder of the data set, or None for mock data."""
    if args.MOCK_DATA:
        return None
    path = Path(args.DATA_PATH or "/dataset").expanduser().absolute()
    if not args.DATA_PATH and not path.is_dir():
        if args.DRY_RUN:  # the machine it is meant for may have it
            print(f"note: there is no {path} here; a run needs DATA_PATH or MOCK_DATA=1", file=sys.stderr)
            return str(path)
        raise LaunchError("DATA_PATH is not set and there is no /dataset; set DATA_PATH=folder, or MOCK_DATA=1")
    if not path.is_dir():
        raise LaunchError(f"DATA_PATH: there is no folder {path}")
    if not any(path.glob("*.idx")) and not any(path.glob("*_idx.npz")):
        raise LaunchError(f"DATA_PATH: {path} holds no .idx file; prepare it with tools/prepare_data.py")
    return str(path)


def check_tokenizer(args: argparse.Namespace) -> str | None:
    """The tokenizer's folder, full name, or none."""
    name = args.tokenizer_name
    if name == "none":
        if not args.MOCK_DATA:
            raise LaunchError("tokenizer_name=none goes with MOCK_DATA=1 only")
        return name
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not any(any(folder.glob(pattern)) for pattern in ("tokenizer_config.json", "tokenizer.json", "*.model")):
            raise LaunchError(f"tokenizer_name: {name!r} holds no tokenizer_config.json, tokenizer.json or *.model")
        return str(folder.absolute())
    full = configs.canonical(name) or name
    if full not in TOKENIZERS:
        raise LaunchError(f"tokenizer_name: {name!r} is neither a folder nor one of {', '.join(TOKENIZERS)}")
    return full


def check_output(args: argparse.Namespace, folder: Path) -> None:
    """The experiment's folder is there and can be written, or can be made."""
    there = folder
    while not os.path.lexists(there):
        there = there.parent
    if not args.DRY_RUN and not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise LaunchError(f"OUTPUT_BASE: {folder} cannot be made or written, for {there} is no folder that can be")


def check_start(args: argparse.Namespace, output: Path) -> None:
    """Where the weights come from: a checkpoint, a converted checkpoint, or neither; never both, and nothing lost."""
    there = ", ".join(str(number) for number, _ in complete_checkpoints(output))
    try:
        find_checkpoint(str(args.resume_step), output)
    except FileNotFoundError as error:
        raise LaunchError(f"resume_step={args.resume_step}: {error}") from error
    if args.resume_step == "none" and there and not args.OVERWRITE:
        raise LaunchError(
            f"resume_step=none starts anew, but {output} holds checkpoints (steps {there}); "
            "resume with auto or a step, set another EXP_NAME or OUTPUT_BASE, or OVERWRITE=1"
        )
    if args.init_weight == "none":
        return
    if args.resume_step != "none" and there:
        raise LaunchError(
            f"init_weight and resume_step={args.resume_step} exclude each other: {output} holds steps {there}; "
            "set one of them to none"
        )
    folder = Path(args.init_weight).expanduser()
    if not folder.is_dir():
        raise LaunchError(f"init_weight: there is no folder {args.init_weight!r}")
    if not any(folder.glob("model_state*")) and not any(folder.glob("*.safetensors")):
        raise LaunchError(f"init_weight: {args.init_weight!r} holds neither model_state* nor *.safetensors")
