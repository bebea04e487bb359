"""Tune a model on preferences: pairs of a better and a worse answer (DPO and its kin)."""

from __future__ import annotations

from functools import partial

from paddle_te.launch.tuning import FIXED, OUTPUT_NAME, folders, model_config, preference_flags, preferring
from paddle_te.options import launcher as options

ARGUMENTS, VARIABLES = options.PREFERENCE, options.FINETUNE_VARIABLES
__all__ = ["ARGUMENTS", "FIXED", "OUTPUT_NAME", "VARIABLES", "flags", "folders", "model_config", "told"]

told = preferring
flags = partial(preference_flags, labelled=False)
