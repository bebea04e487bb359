"""The kernel of swiglu.cu: its own source run on the CPU against NumPy, and the arguments it is launched with."""

import numpy as np
import pytest

from paddle_te.native import DType, casts, swiglu
from tests.unit.native.casts_on_cpu import Output
from tests.unit.native.cuda_on_cpu import NUMPY, aligned

SMALL = casts.Tiling(tile_rows=64, band=2, blocks_per_sm=1)


def inputs(seed, rows, cols, dtype):
    """(dy, z), among them zeros of both signs, and gates at which exp overflows."""
    random = np.random.default_rng(seed)
    arrays = []
    for shape in ((rows, cols), (rows, 2 * cols)):
        array = aligned(shape, NUMPY[dtype])
        array[:] = random.standard_normal(shape) * np.exp2(random.integers(-4, 4, shape))
        array.reshape(-1)[random.integers(0, array.size, 40)] = random.choice([0.0, -0.0, 120, -120], 40)
        arrays.append(array)
    return arrays


def expected(dy, z):
    """(y, dz) in float32, in TE's order."""
    dy, z = dy.astype(np.float32), z.astype(np.float32)
    gate, up = np.split(z, 2, 1)
    one = np.float32(1)
    with np.errstate(over="ignore"):
        s = one / (one + np.exp(-gate.astype(np.float64)).astype(np.float32))
    return gate * s * up, np.concatenate([(gate * (s * (one - s)) + s) * dy * up, dy * (gate * s)], 1)


def run(on_cpu, function, dy, z, target, dtype, float8, rounded=False):
    before = (dy.ctypes.data,) if function == "DSwiGLU" else ()
    call = swiglu.dswiglu_cast_transpose if before else swiglu.swiglu_cast_transpose
    call(on_cpu, on_cpu, *before, z.ctypes.data, target, dy.shape, casts.Form(dtype, float8, rounded))


def of(function, dy, z):
    return expected(dy, z)[function == "DSwiGLU"]


CASES = pytest.mark.parametrize(
    "function, float8, tiling",
    [
        ("SwiGLU", DType.FLOAT8_E4M3, SMALL),
        ("DSwiGLU", DType.FLOAT8_E5M2, SMALL),
        ("DSwiGLU", DType.FLOAT8_E4M3, casts.Tiling(128, 1, 1)),
    ],
)


@CASES
@pytest.mark.parametrize("rows, cols", [(64, 64), (208, 80), (16, 16), (176, 208)])
def test_bits(on_cpu, monkeypatch, seed, function, float8, tiling, rows, cols):
    """Both copies, amax and scale_inv; tiles, and bands of them, divide the sizes or not."""
    monkeypatch.setitem(swiglu.TILINGS, function, tiling)
    dy, z = inputs(seed, rows, cols, DType.BFLOAT16)
    want = of(function, dy, z)
    out = Output(want.shape, float8, 0.7)
    run(on_cpu, function, dy, z, out.target, DType.BFLOAT16, float8)
    np.testing.assert_array_equal(out.data, out.bits(want))
    np.testing.assert_array_equal(out.transposed, out.data.T)
    assert out.amax == np.abs(want).max()
    assert out.scale_inv == np.float32(1) / out.scale


def test_scaled_out_of_range(on_cpu, monkeypatch, seed):
    """What is too large becomes the greatest number; amax keeps what it had where that is greater."""
    monkeypatch.setitem(swiglu.TILINGS, "SwiGLU", SMALL)
    dy, z = inputs(seed, 64, 64, DType.BFLOAT16)
    want = of("SwiGLU", dy, z)
    out = Output(want.shape, DType.FLOAT8_E4M3, 1e4)
    out.amax[:] = 1e6
    run(on_cpu, "SwiGLU", dy, z, out.target, DType.BFLOAT16, DType.FLOAT8_E4M3)
    np.testing.assert_array_equal(out.data, out.bits(want))
    assert (np.abs(out.data.view(out.dtype).astype(np.float32)) == 448).mean() > 0.3
    assert out.amax == 1e6


@pytest.mark.parametrize("function, float8", [("SwiGLU", DType.FLOAT8_E4M3), ("DSwiGLU", DType.FLOAT8_E5M2)])
def test_what_is_not_wanted_is_not_written(on_cpu, monkeypatch, seed, function, float8):
    """The data alone, the transpose alone, and the amax alone; rounded to the input's dtype, here float32, or not."""
    monkeypatch.setitem(swiglu.TILINGS, function, SMALL)
    dy, z = inputs(seed, 48, 48, DType.FLOAT32)
    want = of(function, dy, z)
    for name in ("data", "transposed"):
        out = Output(want.shape, float8, 2)
        run(on_cpu, function, dy, z, out.target._replace(**{name: 0}), DType.FLOAT32, float8, rounded=True)
        assert (getattr(out, name) == 0x55).all()
        kept = out.transposed.T if name == "data" else out.data
        np.testing.assert_array_equal(kept, out.bits(want))
    amax = np.zeros(1, np.float32)
    run(on_cpu, function, dy, z, casts.CastTarget.only_amax(amax.ctypes.data), DType.FLOAT32, float8, rounded=True)
    assert amax == np.abs(want).max()
