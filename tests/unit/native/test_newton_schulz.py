"""The kernels of newton_schulz.cu: their own source run on the CPU, and how they are launched."""

import numpy as np
import pytest

from paddle_te.native import DType, newton_schulz
from tests.unit.native.cuda_on_cpu import aligned

TILE = newton_schulz.TILE


@pytest.mark.parametrize("size", [4, 1023, 1024, 4500])
def test_divide_by_norms(on_cpu, monkeypatch, seed, size):
    """By vectors and one by one; parts of which the last has less; nothing behind the last matrix is written."""
    monkeypatch.setattr(newton_schulz, "_PART", 600)
    x, sums = aligned(3 * size + 1, np.float32), aligned((3, newton_schulz.parts_of(size)), np.float32)
    x[:] = np.random.default_rng(seed).standard_normal(x.size)
    x[size : 2 * size], x[-1] = 0, 7
    want = x[:-1].reshape(3, size).astype("float64")
    want /= np.maximum(np.linalg.norm(want, axis=1, keepdims=True), 1e-7)
    addresses = x.ctypes.data, sums.ctypes.data
    newton_schulz.divide_by_norms(on_cpu, on_cpu, *addresses, 3, size, 1e-7, DType.FLOAT32)
    np.testing.assert_allclose(x[:-1].reshape(3, size), want, rtol=1e-5)
    assert x[-1] == 7 and (x[size : 2 * size] == 0).all()
    assert sums.shape[1] == {4: 1, 1023: 1, 1024: 1, 4500: 7}[size]


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_mirror(on_cpu, seed, blocks):
    """Of a matrix that is not symmetric the upper block rows are taken; nothing behind the last element is written."""
    n, rows = 6 * TILE, 6 * TILE // blocks
    bits = np.random.default_rng(seed).integers(0, 2**31, (n, n), "uint32")
    upper = [bits[first : first + rows, first:].ravel() for first in range(0, n, rows)]
    begins = np.cumsum([0, *(part.size for part in upper[:-1])])
    assert newton_schulz.upper_rows(n, rows) == [(b, p.size // rows) for b, p in zip(begins, upper, strict=True)]
    given, out = aligned(sum(p.size for p in upper), np.uint32), aligned(n * n + 1, np.uint32)
    given[:], out[:] = np.concatenate(upper), 7
    newton_schulz.mirror(on_cpu, on_cpu, given.ctypes.data, out.ctypes.data, n, rows, DType.FLOAT32)
    block = np.arange(n) // rows
    want = np.where(block[:, None] <= block, bits, bits.T)
    np.testing.assert_array_equal(out[:-1].reshape(n, n), want)
    assert out[-1] == 7


@pytest.mark.parametrize("shape", [(TILE, 3 * TILE), (2 * TILE, TILE)])
def test_transpose(on_cpu, seed, shape):
    bits, size = np.random.default_rng(seed).integers(0, 2**31, shape, "uint32"), shape[0] * shape[1]
    given, out = aligned(size, np.uint32), aligned(size + 1, np.uint32)
    given[:], out[:] = bits.ravel(), 7
    newton_schulz.transpose(on_cpu, on_cpu, given.ctypes.data, out.ctypes.data, *shape, DType.FLOAT32)
    np.testing.assert_array_equal(out[:-1].reshape(shape[::-1]), bits.T)
    assert out[-1] == 7
