"""The kernels of cast.cu: their own source run on the CPU against NumPy."""

import numpy as np
import pytest

from paddle_te.native import DType, casts
from tests.unit.native.casts_on_cpu import Output
from tests.unit.native.cuda_on_cpu import NUMPY, aligned


@pytest.mark.parametrize("shapes", [[(80, 144), (208, 64)], [(16, 16), (64, 272)]], ids=str)
def test_two_matrices_by_one_kernel(monkeypatch, on_cpu, seed, shapes):
    """Each under its own scale, with its own amax; whose tiles are partly empty."""
    monkeypatch.setattr(casts, "CAST_TILING", casts.Tiling(64, 2, 1))
    random, calls, outputs = np.random.default_rng(seed), [], []
    for shape, scale in zip(shapes, (3, 0.5), strict=True):
        x, out = aligned(shape, NUMPY[DType.BFLOAT16]), Output(shape, DType.FLOAT8_E4M3, scale)
        x[:] = random.standard_normal(shape) * np.exp2(random.integers(-8, 8, shape))
        calls.append((x.ctypes.data, out.target, *shape))
        outputs.append((x.astype(np.float32), out, x))
    casts.cast_transpose_both(on_cpu, on_cpu, *calls, DType.BFLOAT16, DType.FLOAT8_E4M3)
    for values, out, _ in outputs:
        np.testing.assert_array_equal(out.data, out.bits(values))
        np.testing.assert_array_equal(out.transposed, out.data.T)
        assert out.amax == np.abs(values).max() and out.scale_inv == np.float32(1) / out.scale
