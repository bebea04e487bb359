"""What PaddleNLP prints while it reads or builds an index goes to a logger, at level DEBUG.

It prints a line for each of its steps, of every part of a corpus: some fifty before a run says its first word.
"""

import logging

from paddlenlp.data import causal_dataset, indexed_dataset

from paddle_te.upstream.replacement import Replacement, Replacements

PACKAGE, VERSION = "paddlenlp", "3.0.0b4"
SYMPTOM = "Lines like 'reading sizes...' fill the screen before training begins."

logger = logging.getLogger(__name__)


def _tell(*words, **_):
    """print_rank_0."""
    logger.debug(" ".join(map(str, words)).strip())


_replacements = Replacements(
    *(Replacement(module, "print_rank_0", _tell) for module in (causal_dataset, indexed_dataset))
)
apply, undo = _replacements.apply, _replacements.undo
