"""Each option once: name, values, default, help, and what the documentation says. Imports neither Paddle nor PaddleNLP.

`layers` has the flags of the decoder layers, `training` the others of all training, `pretraining`, `tuning` and
`evaluation` those of their scripts, `launcher` the launcher's arguments and variables. From them are made

- the launcher's parser (`launch.arguments`) and the scripts' flags that it passes on (`launch.flags`),
- the fields of the scripts' dataclasses (`with_options`), which PaddleNLP's parser reads, and their checks,
- what goes into a model's configuration, and how it is read from there (`LayerOptions`),
- docs/reference/options.md and docs/zh/reference/options.md (`python -m paddle_te.options` writes them).
"""

from paddle_te.options.evaluation import DTYPES
from paddle_te.options.layers import BACKENDS, FP8_RECIPES, LAYER_OPTIONS, LayerOptions
from paddle_te.options.option import REQUIRED, Kind, Option, check_values, configure, with_options
from paddle_te.options.training import BOUNDS

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
