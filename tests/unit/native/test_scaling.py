"""The kernel of scaling.cu: its own source run on the CPU, and how it is launched."""

import numpy as np
import pytest

from paddle_te.native import scaling


@pytest.mark.parametrize("n", [1, 255, 256, 700])
def test_reciprocals(on_cpu, n):
    """Correctly rounded, and nothing between them or behind them is touched."""
    scale = np.exp2(np.random.uniform(-30, 30, n)).astype("float32")
    inverse = np.full([n + 1, 4], np.nan, "float32")
    scaling.reciprocals(on_cpu, on_cpu, scale.ctypes.data, inverse.ctypes.data, n)
    np.testing.assert_array_equal(inverse[:n, 0], np.float32(1) / scale)
    assert np.isnan(inverse[:n, 1:]).all() and np.isnan(inverse[n]).all()


def test_raise_amaxes(on_cpu):
    first, second, amaxes = np.float32([3]), np.float32([4]), np.float32([5, 1, 7])
    at = amaxes.ctypes.data
    scaling.raise_amaxes(on_cpu, on_cpu, first.ctypes.data, at, second.ctypes.data, at + 4)
    assert amaxes.tolist() == [5, 4, 7]
