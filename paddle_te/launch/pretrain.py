"""Pretrain a model."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping
from pathlib import Path

from paddle_te import configs
from paddle_te.folders import OUTPUT
from paddle_te.launch.checks import check_data, check_tokenizer, read_config
from paddle_te.launch.errors import LaunchError
from paddle_te.launch.flags import common, of_folder
from paddle_te.launch.overlap import overlap_flags
from paddle_te.options import launcher as options

ARGUMENTS = options.PRETRAIN
VARIABLES = options.PRETRAIN_VARIABLES
FIXED: Mapping[str, object] = {}
OUTPUT_NAME = "OUTPUT_BASE, EXP_NAME or OUTPUT_DIR"
WARM_UP = 30  # steps, but at most a tenth of a run's
model_config = read_config


def experiment_name(args: argparse.Namespace, nodes: int, dp: int) -> str:
    """Return the original's name of a run, with a model name that makes no folders of its own."""
    model = configs.canonical(args.model_name)
    if model is None or (Path(args.model_name).expanduser() / "config.json").is_file():
        model = Path(args.model_name).expanduser().absolute().name
    sharing = "".join(f"_{name}{getattr(args, name)}" for name in ("SEP", "CP", "EP") if getattr(args, name) > 1)
    return (
        f"N{nodes}_DP{dp}_TP{args.TP}_PP{args.PP}_VP{args.VP}_GA{args.GA}_SP{str(args.SP).lower()}_FSDP{args.FSDP}{sharing}"
        f"_MBS{args.batch_size_per_device}_{args.backend}_{args.precision}_{args.recompute}"
        f"_{re.sub(r'[^A-Za-z0-9._-]', '_', model)}"
    )


def folders(args: argparse.Namespace, nodes: int, dp: int) -> tuple[Path, Path]:
    if args.OUTPUT_DIR:
        folder = Path(args.OUTPUT_DIR).expanduser().absolute()
        return folder, folder
    experiment = args.EXP_NAME or experiment_name(args, nodes, dp)
    base = Path(args.OUTPUT_BASE).expanduser().absolute()
    folder = base / experiment
    if Path(os.path.normpath(base)) not in Path(os.path.normpath(folder)).parents:
        raise LaunchError(f"EXP_NAME: {args.EXP_NAME!r} must name a folder in OUTPUT_BASE, {base}")
    return folder, folder / OUTPUT


def told(args: argparse.Namespace, device: str, world: int) -> dict[str, object]:
    """Return the training script's flags that say how it trains; None leaves one out."""
    # PaddleNLP takes "nvgpu:0" for a GPU with CUDA kernels, so what needs those is said here.
    cuda = int(device == "gpu")
    return {
        **common((*ARGUMENTS, *VARIABLES), args, device, world),
        "mock_data": 1 if args.MOCK_DATA else None,
        "pipeline_parallel_config": "disable_partial_send_recv" if args.SP else None,
        "logging_steps": args.LOGGING_STEPS or 1,
        "split": "949,50,1",
        "use_flash_attention": cuda,
        "use_fused_rope": cuda,
        "use_fused_rms_norm": 0,
        "fuse_attention_qkv": 0,
        "fuse_attention_ffn": 1,
        "learning_rate": f"{args.LEARNING_RATE:g}",
        "min_learning_rate": f"{args.LEARNING_RATE / 10:g}",
        "warmup_steps": min(WARM_UP, args.MAX_STEPS // 10),
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "eval_steps": 1000,
        "dataloader_num_workers": 1,
        "report_to": "visualdl",
        "continue_training": 0,
    }


def flags(args: argparse.Namespace, device: str, world: int, output: Path) -> dict[str, object]:
    tokenizer, data = check_tokenizer(args), check_data(args, read_config(args))
    overlap = overlap_flags(args, device, world)  # which says something, hence behind what may be refused
    plain = told(args, device, world)
    pipeline = plain["pipeline_parallel_config"], overlap.pop("pipeline_parallel_config", None)
    return {
        "model_name_or_path": configs.resolve(args.model_name),
        "tokenizer_name_or_path": tokenizer,
        "input_dir": data,
        "te_init_weight_path": None if args.init_weight == "none" else Path(args.init_weight).expanduser().absolute(),
        **of_folder(args, output),
        **plain,
        "pipeline_parallel_config": " ".join(str(each) for each in pipeline if each) or None,
        **overlap,
    }
