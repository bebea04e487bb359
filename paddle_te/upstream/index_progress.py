"""Send what the C++ code that builds PaddleNLP's sample index prints of its arguments to the log.

It writes to the process's standard output, five lines for each part of a corpus. What PaddleNLP's Python code prints
beside it, `runs.noise` keeps off the screen.
"""

import importlib.util
from typing import Any

from paddle_te.runs import noise
from paddle_te.upstream.replacement import Replacement, Replacements

PACKAGE, VERSION = "paddlenlp", "3.0.0b4"
SYMPTOM = "Lines like 'total number of samples' fill the screen before training begins."


def _build(*arguments: Any) -> Any:
    with noise.kept_out_of_descriptor(1):
        return _replacement.original(*arguments)


if importlib.util.find_spec("fast_dataindex"):  # pretraining alone needs it, and says so
    from fast_dataindex import helpers

    _replacement = Replacement(helpers, "build_sample_idx", _build)
    _replacements = Replacements(_replacement)
else:
    _replacements = Replacements()
apply, undo = _replacements.apply, _replacements.undo
