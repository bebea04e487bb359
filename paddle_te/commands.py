"""Commands of paddle-te that are printed for a user to run.

Only this module makes one of values. tests/unit/test_commands.py gives each to its program's parser, and so each
command that stands in a text.
"""

from __future__ import annotations

import shlex

# Words in the place of what a user must put in, with what that is.
NUMBER, MODEL, DATASET, OUTPUT = "N", "MODEL", "DATASET", "OUTPUT"
PLACEHOLDERS = {
    NUMBER: "a number",
    MODEL: "the folder with the model's weights and tokenizer",
    DATASET: "the folder with train.json",
    OUTPUT: "a new folder for the result",
}


def line(name: str, *words: object) -> str:
    """`paddle-te NAME word ...`, quoted as a shell takes it."""
    return shlex.join(["paddle-te", name, *map(str, words)])
