"""What the jobs that tune a model have in common: fine-tuning, and tuning on preferences."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paddle_te.data.records import DEV, has_split
from paddle_te.launch.checks import check_weights, read_config
from paddle_te.launch.errors import LaunchError
from paddle_te.launch.flags import common, extra_flags, extra_words, of_folder
from paddle_te.launch.tuning_data import check_preferences
from paddle_te.options import Option
from paddle_te.options import launcher as options

FIXED: Mapping[str, object] = dict(init_weight="none", OVERLAP=False, LOGGING_STEPS=1)
OUTPUT_NAME = "output"


def model_config(args: argparse.Namespace) -> dict[str, Any]:
    """Return the config.json of the model's folder."""
    check_weights("model_name", args.model_name)
    return read_config(args)


def folders(args: argparse.Namespace, nodes: int, dp: int) -> tuple[Path, Path]:
    """Return where a job keeps its logs, and what its script writes."""
    if not args.output:
        raise LaunchError("output: give a folder for the result")
    folder = Path(args.output).expanduser().absolute()
    return folder, folder


def told(arguments: Iterable[Option], args: argparse.Namespace, device: str, world: int) -> dict[str, object]:
    """Return the training script's flags that say how it trains; None leaves one out. arguments: the job's own."""
    if args.max_seqlen % 16:
        raise LaunchError(f"max_seqlen: '{args.max_seqlen}' must be a multiple of 16, to which batches are padded")
    return {
        **common(arguments, args, device, world),
        **options.METHODS[args.method],
        "logging_steps": args.LOGGING_STEPS,
    }


def preferring(args: argparse.Namespace, device: str, world: int) -> dict[str, object]:
    """Return the same flags for tuning on preferences, where questions may have half of a row."""
    return {
        **told((*options.PREFERENCE, *options.FINETUNE_VARIABLES), args, device, world),
        "max_prompt_len": args.max_seqlen // 2,
        "pipeline_parallel_config": "disable_partial_send_recv" if args.SP and args.PP > 1 else None,
    }


def preference_flags(
    args: argparse.Namespace, device: str, world: int, output: Path, *, labelled: bool
) -> dict[str, object]:
    """Return all flags of tuning on preferences. labelled: answers have labels instead of standing in pairs."""
    every = read_from(args, output) | preferring(args, device, world)
    check_preferences(every, extra_words(args), labelled=labelled)
    return every


def read_from(args: argparse.Namespace, output: Path) -> dict[str, object]:
    """Return the flags for the folders that training reads and writes."""
    if not args.dataset and "train_dataset_path" not in extra_flags(args):
        raise LaunchError("dataset: give a folder of train.json, or a file of it")
    model = Path(args.model_name).expanduser()
    dataset = Path(args.dataset).expanduser().absolute() if args.dataset else None
    tokenizer = Path(args.tokenizer_name or args.model_name).expanduser()
    if not tokenizer.is_dir():
        raise LaunchError(f"tokenizer_name: {args.tokenizer_name or args.model_name!r} is no folder")
    return {
        "model_name_or_path": model.absolute(),
        "tokenizer_name_or_path": tokenizer.absolute(),
        "dataset_name_or_path": dataset,
        **of_folder(args, output),
        "do_eval": 1 if dataset and has_split(dataset, DEV) else None,
        "chat_template": _chat_template(args),
    }


def _chat_template(args: argparse.Namespace) -> str | Path | None:
    from paddle_te.data.chat_template import NONE  # here, as it imports Jinja

    chosen = args.CHAT_TEMPLATE
    return chosen if chosen in (None, NONE) else Path(chosen).expanduser().absolute()
