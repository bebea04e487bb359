"""MXFP8 (kernels/mxfp8.cuh) on the CPU. Its kernels and SwiGLU's are compared with the backend paddle and NumPy."""

import numpy as np
import paddle
import pytest

from paddle_te.fp8.emulation import rounded_to_mxfp8
from paddle_te.native import DType, casts, mxfp8, swiglu
from tests.unit.native.casts_on_cpu import Output
from tests.unit.native.cuda_on_cpu import NUMPY, aligned
from tests.unit.native.test_swiglu import SMALL, expected, inputs

BF16, E4M3 = DType.BFLOAT16, DType.FLOAT8_E4M3


@pytest.fixture
def te(monkeypatch, on_cpu):
    for function in swiglu.TILINGS:
        monkeypatch.setitem(swiglu.TILINGS, function, SMALL)
    return on_cpu


def stored(shape):
    """Poisoned memory for what stands for so many numbers."""
    memory = aligned((mxfp8.stored_bytes(int(np.prod(shape))),), np.uint8)
    memory[:] = 0x55
    return memory


def numbers_of(memory):
    """float64 of what lies there, as the standard says: bytes, then exponents."""
    blocks = len(memory) // (mxfp8.BLOCK + 1)
    bytes, exponents = np.split(memory, [blocks * mxfp8.BLOCK])
    mantissas, powers = bytes & 7, bytes >> 3 & 15
    values = np.where(powers == 0, mantissas / 8 * 2.0**-6, (1 + mantissas / 8) * 2.0 ** (powers.astype(int) - 7))
    values = np.where(bytes & 128, -values, values).reshape(blocks, mxfp8.BLOCK)
    return (values * 2.0 ** (exponents.astype(float)[:, None] - 127)).reshape(-1)


def kept(x):
    """x as the backend paddle says that MXFP8 keeps it."""
    return rounded_to_mxfp8(paddle.to_tensor(x.astype(np.float32)).astype("bfloat16")).astype("float32").numpy()


def test_store_and_restore(on_cpu, seed):
    """Of all magnitudes; the last block of threads is not full. The greatest number of a block loses at most a
    sixteenth, and a number that is not finite makes its block so."""
    random = np.random.default_rng(seed)
    x = aligned((65, 32), NUMPY[BF16])
    powers = random.integers(-90, 100, (65, 1)) + random.integers(-9, 1, (65, 32))
    x[:] = random.standard_normal((65, 32)) * np.exp2(powers)
    x[0], x[1], x[2] = 0, 448, 450  # no scale, the greatest number, and one that a scale of 1 would not hold
    memory, back = stored(x.shape), aligned(x.shape, NUMPY[BF16])
    mxfp8.store(on_cpu, on_cpu, x.ctypes.data, memory.ctypes.data, x.size, BF16)
    mxfp8.restore(on_cpu, on_cpu, memory.ctypes.data, back.ctypes.data, x.size, BF16)
    back = back.astype(np.float32)
    np.testing.assert_array_equal(back, kept(x))
    np.testing.assert_array_equal(back, numbers_of(memory).reshape(x.shape))
    amax = np.abs(x.astype(np.float32)).max(1)
    assert (abs(np.abs(back).max(1) - amax) <= amax / 16).all() and back[2, 0] == 448

    for wrong in (np.nan, np.inf):
        x[3, 17] = wrong
        mxfp8.store(on_cpu, on_cpu, x.ctypes.data, memory.ctypes.data, x.size, BF16)
        again = aligned(x.shape, NUMPY[BF16])
        mxfp8.restore(on_cpu, on_cpu, memory.ctypes.data, again.ctypes.data, x.size, BF16)
        assert not np.isfinite(again[3].astype(np.float32)).any() and np.isnan(kept(x)[3]).all()
        np.testing.assert_array_equal(np.delete(again.astype(np.float32), 3, 0), np.delete(back, 3, 0))


@pytest.mark.parametrize("rows, cols", [(64, 64), (80, 96)])
def test_swiglu(te, seed, rows, cols):
    """Forward stores its input beside all that it writes otherwise; both directions read it, and give 16 bits, fp8 or
    both."""
    dy, z = inputs(seed, rows, cols, BF16)
    memory, plain = stored(z.shape), aligned((rows, cols), NUMPY[BF16])
    out, want = Output((rows, cols), E4M3, 0.7), expected(dy, z)[0]
    more = swiglu.More(memory.ctypes.data, plain.ctypes.data)
    options = (rows, cols), casts.Form(BF16, E4M3)
    swiglu.swiglu_cast_transpose(te, te, z.ctypes.data, out.target, *options, more)
    np.testing.assert_array_equal(plain, want.astype(plain.dtype))
    np.testing.assert_array_equal(out.data, out.bits(want))
    np.testing.assert_array_equal(out.transposed, out.data.T)
    read = numbers_of(memory).reshape(z.shape)
    np.testing.assert_array_equal(read, kept(z))

    y, dz = expected(dy, read)
    again, plain = aligned(y.shape, NUMPY[BF16]), aligned(dz.shape, NUMPY[BF16])
    more = swiglu.More(memory.ctypes.data, plain.ctypes.data, again.ctypes.data)
    nothing = casts.CastTarget(0, 0, 0, 0, 0)
    swiglu.dswiglu_cast_transpose(te, te, dy.ctypes.data, 0, nothing, *options, more)
    np.testing.assert_array_equal(plain, dz.astype(plain.dtype))
    np.testing.assert_array_equal(again, y.astype(again.dtype))
    out = Output(y.shape, E4M3, 0.7)
    swiglu.swiglu_cast_transpose(te, te, 0, out.target, *options, swiglu.More(memory.ctypes.data))
    np.testing.assert_array_equal(out.data, out.bits(y))
