"""Fine-tune a model on questions and answers."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paddle_te import host
from paddle_te.data.records import DEV, has_split
from paddle_te.launch.checks import check_tokenizer_folder, check_weights, read_config
from paddle_te.launch.finetune_data import check_data
from paddle_te.launch.flags import common, extra_words, of_folder
from paddle_te.launch.machines import LaunchError
from paddle_te.options import launcher as options

ARGUMENTS = options.FINETUNE
VARIABLES = options.FINETUNE_VARIABLES
FIXED: Mapping[str, object] = dict(PP=1, VP=1, init_weight="none", OVERLAP=False, LOGGING_STEPS=1)
OUTPUT_NAME = "output"


def model_config(args: argparse.Namespace) -> dict[str, Any]:
    check_weights("model_name", args.model_name)
    return read_config(args)


def folders(args: argparse.Namespace, nodes: int, dp: int) -> tuple[Path, Path]:
    if not args.output:
        raise LaunchError("output: give a folder for the result")
    folder = Path(args.output).expanduser().absolute()
    return folder, folder


def told(args: argparse.Namespace, device: str, world: int) -> dict[str, object]:
    """The training script's flags that say how it trains; None leaves one out."""
    if args.max_seqlen % 16:
        raise LaunchError(f"max_seqlen: '{args.max_seqlen}' must be a multiple of 16, to which batches are padded")
    lora = args.method != "full"
    return {
        **common((*ARGUMENTS, *VARIABLES), args, device, world),
        "lora": 1 if lora else None,
        "lora_targets": options.METHODS[args.method] if lora else None,
        "src_length": args.max_seqlen // 2,
        "pad_to_max_length": int(args.SP),  # sequence parallelism wants all batches equally long
        "logging_steps": args.LOGGING_STEPS,
    }


def flags(args: argparse.Namespace, device: str, world: int, output: Path) -> dict[str, object]:
    if not args.dataset:
        raise LaunchError("dataset: give a folder of train.json, or a file of it")
    model, dataset = Path(args.model_name).expanduser(), Path(args.dataset).expanduser().absolute()
    tokenizer = Path(args.tokenizer_name or args.model_name).expanduser()
    if not tokenizer.is_dir():
        raise LaunchError(f"tokenizer_name: {args.tokenizer_name or args.model_name!r} is no folder")
    check_tokenizer_folder(tokenizer)
    every = {
        "model_name_or_path": model.absolute(),
        "tokenizer_name_or_path": tokenizer.absolute(),
        "dataset_name_or_path": dataset,
        **of_folder(args, output),
        **told(args, device, world),
        "do_eval": 1 if has_split(dataset, DEV) else None,
        "chat_template": _chat_template(args),
    }
    if args.HOST == host.PADDLENLP:
        check_data(every, extra_words(args))
    return every


def _chat_template(args: argparse.Namespace) -> str | Path | None:
    from paddle_te.data.chat_template import NONE  # here, as it imports Jinja

    chosen = args.CHAT_TEMPLATE
    return chosen if chosen in (None, NONE) else Path(chosen).expanduser().absolute()
