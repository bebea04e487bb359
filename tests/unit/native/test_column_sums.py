"""The kernel of column_sums.cu: its own source run on the CPU, and how it is launched."""

import numpy as np
import pytest

from paddle_te.native import DType, column_sums


@pytest.mark.parametrize("rows, cols", [(1, 16), (64, 4), (65, 20), (200, 48)])
def test_column_sums(on_cpu, seed, rows, cols):
    """Fewer rows than threads and more, a strip of columns that is not full, several strips; nothing behind them."""
    x = np.random.default_rng(seed).standard_normal((rows, cols)).astype("float32")
    out = np.full(cols + 1, 7, "float32")
    column_sums.column_sums(on_cpu, on_cpu, x.ctypes.data, out.ctypes.data, rows, cols, DType.FLOAT32)
    # each of at most `rows` additions is off by half a unit in the last place of a partial sum
    bound = rows * 2.0**-24 * np.abs(x.astype("float64")).sum(0)
    assert (np.abs(out[:-1] - x.astype("float64").sum(0)) <= bound).all() and out[-1] == 7
