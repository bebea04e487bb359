"""Which of Transformer Engine's entry points run, and in which precision: the answer to "is fp8 really on?"."""

from collections import Counter
from contextlib import contextmanager

from paddle_te.native import DType
from paddle_te.ops.te import runtime

FP8 = (int(DType.FLOAT8_E4M3), int(DType.FLOAT8_E5M2))


class CountingLibrary:
    """In place of the native module: passes everything on and counts calls in counts[name, precision]."""

    def __init__(self, te, counts):
        self._te, self._counts = te, counts

    def __getattr__(self, name):
        value = getattr(self._te, name)
        if isinstance(value, type) or not callable(value):
            return value

        def counted(*args, **keywords):
            result = value(*args, **keywords)
            self._counts[name, self._precision(args)] += 1  # what raises has not run
            return result

        setattr(self, name, counted)  # found directly from now on
        return counted

    def _precision(self, args):
        """fp8 if any tensor is, else the first one's dtype; "" for calls without tensors."""
        dtypes = [int(arg.dtype) for arg in args if isinstance(arg, self._te.Tensor)]
        if any(dtype in FP8 for dtype in dtypes):
            return "fp8"
        return DType(dtypes[0]).name.lower() if dtypes else ""


@contextmanager
def count_entry_points():
    """Counts what runs on Paddle's current stream while the context is open; costs nothing otherwise.

    Yields a Counter with keys (entry point, precision), such as ("gemm", "fp8").
    """
    rt = runtime.current()
    te, counts = rt.te, Counter()
    rt.te = CountingLibrary(te, counts)
    try:
        yield counts
    finally:
        rt.te = te
