"""Names of PaddleFormers' modules that stand for something of ours for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(module: Any, **ours: Any) -> Iterator[None]:
    """Let a module's names stand for ours while it lasts."""
    kept = {name: getattr(module, name) for name in ours}
    for name, value in ours.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(module, name, value)
