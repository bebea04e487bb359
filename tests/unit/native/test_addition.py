"""The kernel of addition.cu: its own source run on the CPU, and how it is launched."""

import numpy as np
import pytest

from paddle_te.native import DType, addition
from tests.unit.native.cuda_on_cpu import OnCPU


@pytest.fixture(scope="module")
def cpu_kernel(gxx, tmp_path_factory):
    return OnCPU(gxx, tmp_path_factory.mktemp("addition"), "addition.cu")


@pytest.mark.parametrize("n", [1, 4, 1023, 1024, 1029, 2048])
def test_add_to(cpu_kernel, monkeypatch, seed, n):
    """Vectors and what is left over; nothing behind them is touched. 1024 numbers are the vectors of one block."""
    monkeypatch.setattr(addition, "kernel", lambda *key: key)
    draw = np.random.default_rng(seed).standard_normal
    out, other = (np.append(draw(n, "float32"), np.float32(7)) for _ in range(2))
    want = np.append(out[:n] + other[:n], np.float32(7))
    addition.add_to(cpu_kernel, cpu_kernel, out.ctypes.data, other.ctypes.data, n, DType.FLOAT32)
    np.testing.assert_array_equal(out, want)
