"""The kernel of addition.cu: its own source run on the CPU, and how it is launched."""

import numpy as np
import pytest

from paddle_te.native import DType, addition


@pytest.mark.parametrize("n", [1, 4, 1023, 1024, 1029, 2048])
def test_add_to(on_cpu, seed, n):
    """Vectors and what is left over; nothing behind them is touched. 1024 numbers are the vectors of one block."""
    draw = np.random.default_rng(seed).standard_normal
    out, other = (np.append(draw(n, "float32"), np.float32(7)) for _ in range(2))
    want = np.append(out[:n] + other[:n], np.float32(7))
    addition.add_to(on_cpu, on_cpu, out.ctypes.data, other.ctypes.data, n, DType.FLOAT32)
    np.testing.assert_array_equal(out, want)
