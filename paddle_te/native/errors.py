"""Errors of this package's native part."""

from collections.abc import Iterable
from typing import NamedTuple


class Problem(NamedTuple):
    """One missing condition: what is missing, and what the user can do about it."""

    what: str
    remedy: str


class BackendUnavailable(RuntimeError):
    """Transformer Engine cannot run here. The message lists every missing condition with its remedy."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = list(problems)
        lines = [f"  {i}. {what}\n     remedy: {remedy}" for i, (what, remedy) in enumerate(self.problems, 1)]
        super().__init__("\n".join(["Transformer Engine cannot run here:", *lines]))


class TransformerEngineError(RuntimeError):
    """A call into a native library failed: entry point, the library's own message, tensors' dtypes and shapes."""
