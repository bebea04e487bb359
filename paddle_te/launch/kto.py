"""Tune a model on single answers that are wanted or not (KTO)."""

from __future__ import annotations

import argparse
from pathlib import Path

from paddle_te.launch import tuning
from paddle_te.launch.finetune_data import check_preferences
from paddle_te.launch.flags import extra_words
from paddle_te.launch.tuning import FIXED, OUTPUT_NAME, folders, model_config
from paddle_te.options import launcher as options

ARGUMENTS, VARIABLES = options.PREFERENCE, options.FINETUNE_VARIABLES
__all__ = ["ARGUMENTS", "FIXED", "OUTPUT_NAME", "VARIABLES", "flags", "folders", "model_config", "told"]


def told(args: argparse.Namespace, device: str, world: int) -> dict[str, object]:
    """The training script's flags that say how it trains; None leaves one out."""
    return tuning.preferring((*ARGUMENTS, *VARIABLES), args, device, world)


def flags(args: argparse.Namespace, device: str, world: int, output: Path) -> dict[str, object]:
    """The training script's flags."""
    every = tuning.read_from(args, output) | told(args, device, world)
    check_preferences(every, extra_words(args), labelled=True)
    return every
