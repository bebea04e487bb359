"""Checks of layers' arguments."""

from collections.abc import Collection
from typing import TypeVar

Value = TypeVar("Value")


def probability(**named: float) -> float:
    """Return the one value that is given. Raises ValueError with its name unless it is a probability below 1."""
    ((name, value),) = named.items()
    if not 0 <= value < 1:
        raise ValueError(f"{name}={value}: it must be at least 0 and below 1")
    return value


def one_of(allowed: Collection[Value], **named: Value) -> Value:
    """Return the one value that is given. Raises ValueError with its name if it is not allowed."""
    ((name, value),) = named.items()
    if value not in allowed:
        raise ValueError(f"{name}={value!r}; it may be one of {', '.join(map(repr, allowed))}")
    return value
