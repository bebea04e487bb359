"""Which of Transformer Engine's entry points run, and in which precision: the answer to "is fp8 really on?"."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from paddle_te.ops.te import runtime


@contextmanager
def count_entry_points() -> Iterator[Counter[tuple[str, str]]]:
    """Count what this process calls while the context is open; the native module counts always, in C++.

    Yields a Counter that has keys (entry point, precision), such as ("gemm", "fp8"), once the context is closed.
    """
    te, counts = runtime.current().te, Counter[tuple[str, str]]()
    before = Counter(te.counts())
    try:
        yield counts
    finally:
        counts.update(Counter(te.counts()) - before)
