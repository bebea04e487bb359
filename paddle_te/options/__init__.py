"""Each option once: name, values, default, help, and what the documentation says. Imports neither Paddle nor PaddleNLP.

`scripts` has the flags of run_pretrain.py, run_finetune.py and run_eval.py, `launcher` the launcher's arguments and
variables. From them are made

- the launcher's parser (`launch.arguments`) and the scripts' flags that it passes on (`launch.flags`),
- the fields of the scripts' dataclasses (`with_options`), which PaddleNLP's parser reads, and their checks,
- what goes into a model's configuration, and how it is read from there (`LayerOptions`),
- docs/reference/options.md and docs/zh/reference/options.md (`python -m paddle_te.options` writes them).
"""

from paddle_te.options.option import REQUIRED, Kind, Option, check_values, configure, with_options
from paddle_te.options.scripts import BACKENDS, BOUNDS, DTYPES, FP8_RECIPES, LAYER_OPTIONS, LayerOptions

__all__ = [
    "BACKENDS",
    "BOUNDS",
    "DTYPES",
    "FP8_RECIPES",
    "LAYER_OPTIONS",
    "REQUIRED",
    "Kind",
    "LayerOptions",
    "Option",
    "check_values",
    "configure",
    "with_options",
]
