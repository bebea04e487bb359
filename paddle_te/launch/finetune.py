"""Fine-tune a model on questions and answers."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from paddle_te import host
from paddle_te.launch import tuning
from paddle_te.launch.checks import read_tokenizer_folder
from paddle_te.launch.flags import extra_words
from paddle_te.launch.tuning import OUTPUT_NAME, folders, model_config
from paddle_te.launch.tuning_data import check_data
from paddle_te.options import launcher as options

ARGUMENTS, VARIABLES = options.FINETUNE, options.FINETUNE_VARIABLES
FIXED: Mapping[str, object] = {**tuning.FIXED, "PP": 1, "VP": 1}
__all__ = ["ARGUMENTS", "FIXED", "OUTPUT_NAME", "VARIABLES", "flags", "folders", "model_config", "told"]


def told(args: argparse.Namespace, device: str, world: int) -> dict[str, object]:
    """Return the training script's flags that say how it trains; None leaves one out."""
    return {
        **tuning.told((*ARGUMENTS, *VARIABLES), args, device, world),
        "src_length": args.max_seqlen // 2,
        "pad_to_max_length": int(args.SP),  # sequence parallelism wants all batches equally long
    }


def flags(args: argparse.Namespace, device: str, world: int, output: Path) -> dict[str, object]:
    """Return the training script's flags."""
    every = tuning.read_from(args, output) | told(args, device, world)
    if args.HOST == host.PADDLENLP:
        check_data(every, extra_words(args))
    else:
        read_tokenizer_folder(Path(str(every["tokenizer_name_or_path"])))
    return every
