"""Match the names of a checkpoint's weights with the patterns of --freeze. The manifest keeps the patterns."""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from paddle_te import manifest
from paddle_te.weights.tensors import CheckpointError

FROZEN = "frozen"  # in a manifest's values of the model
NOTHING = "nothing"


def frozen_by(patterns: Iterable[str]) -> str:
    """Return what a manifest says of the patterns: one regular expression, or NOTHING."""
    return "|".join(f"(?:{pattern})" for pattern in sorted(patterns)) if patterns else NOTHING


def frozen_in(folder: str | Path) -> Callable[[str], object]:
    """Return a function that is true of the names of weights that the run did not train.

    The run is the one that saved the checkpoint in the folder.

    Raises CheckpointError for a manifest that does not say it.
    """
    pattern = _pattern_of(folder)
    if pattern == NOTHING:
        return lambda name: False
    try:
        return re.compile(pattern).search
    except (re.error, TypeError) as error:
        raise CheckpointError(f"{folder}/{manifest.MANIFEST}: {FROZEN} is {pattern!r}: {error}") from error


def _pattern_of(folder: str | Path) -> str:
    if not (Path(folder) / manifest.COMPLETE_MARK).is_file():
        return NOTHING
    try:
        saved = manifest.read(folder)
    except manifest.CheckpointDamaged as error:
        raise CheckpointError(f"{folder}: {error}") from error
    return ((saved and saved.run.get("model")) or {}).get(FROZEN, NOTHING)


def check_all_trained(folder: str | Path) -> None:
    """Raise CheckpointError where the optimizer has no state of some weights of the checkpoint in a folder."""
    if (pattern := _pattern_of(folder)) != NOTHING:
        raise CheckpointError(
            f"{folder}: --with_optimizer: this run did not train {pattern}, and has no optimizer's state of "
            "it; convert the weights only"
        )


def matching(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """Return those of some names in which one of the patterns is found."""
    return [name for name in names if any(re.search(pattern, name) for pattern in patterns)]


def check_patterns(names: Sequence[str], patterns: Sequence[str]) -> None:
    """Raise ValueError where a pattern of --freeze is in none of a model's names, or the patterns are in all."""
    for pattern in patterns:
        if not matching(names, [pattern]):
            raise ValueError(
                f"--freeze {pattern}: is found in no weight's name; they are such as {names[0]} and "
                f"{names[len(names) // 2]}"
            )
    if len(matching(names, patterns)) == len(names):
        raise ValueError(f"--freeze {' '.join(patterns)}: is found in all weights' names, and nothing would be trained")
