"""Checks of layers' arguments."""

from collections.abc import Collection, Mapping
from typing import TypeVar

Value = TypeVar("Value")


def probability(**named: float) -> float:
    """Return the one value that is given. Raises ValueError with its name unless it is a probability below 1."""
    ((name, value),) = named.items()
    if not 0 <= value < 1:
        raise ValueError(f"{name}={value}: it must be at least 0 and below 1")
    return value


def refuse(wanted: Mapping[str, object], why: str) -> None:
    """Raise ValueError for the first of {what: whether it is asked for} that is. why: a text with {} for what."""
    for what, asked in wanted.items():
        if asked:
            raise ValueError(why.format(what))


def check_length(sequence_parallel: bool, max_sequence_length: int | None) -> None:
    """Raise ValueError for attention that cannot tell where a sequence ends."""
    if sequence_parallel and max_sequence_length is None:
        raise ValueError("sequence_parallel=True needs max_sequence_length: tokens arrive flattened")


def one_of(allowed: Collection[Value], **named: Value) -> Value:
    """Return the one value that is given. Raises ValueError with its name if it is not allowed."""
    ((name, value),) = named.items()
    if value not in allowed:
        raise ValueError(f"{name}={value!r}; it may be one of {', '.join(map(repr, allowed))}")
    return value
