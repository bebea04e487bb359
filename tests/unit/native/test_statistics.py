"""The counting of statistics.cuh: kernels' own source run on the CPU against NumPy's counting."""

import numpy as np
import pytest

from paddle_te.fp8.statistics import AMAX, ERROR, SCALE, SCALE_INV, counted
from paddle_te.native import DType, casts, experts, rmsnorm, statistics, swiglu
from tests.unit.native.casts_on_cpu import FLOAT8, Output
from tests.unit.native.cuda_on_cpu import NUMPY, aligned
from tests.unit.native.test_swiglu import expected, inputs

BF16, E4M3, E5M2 = DType.BFLOAT16, DType.FLOAT8_E4M3, DType.FLOAT8_E5M2


@pytest.fixture
def te(monkeypatch, on_cpu):
    small = casts.Tiling(64, 2, 1)
    monkeypatch.setattr(casts, "CAST_TILING", small)
    monkeypatch.setitem(swiglu.TILINGS, "DSwiGLU", small)
    for module in (rmsnorm, experts):
        monkeypatch.setattr(module, "CAST_TILING", small)
    return on_cpu


def drawn(random, shape):
    """Of all magnitudes, with zeros, and with numbers that are none and infinite ones."""
    x = aligned(shape, NUMPY[BF16])
    x[:] = random.standard_normal(shape) * np.exp2(random.integers(-30, 4, shape))
    x.reshape(-1)[random.integers(0, x.size, 50)] = random.choice([0.0, -0.0, np.nan, np.inf, -np.inf], 50)
    return x


def new_record():
    record = aligned((7,), np.int64)
    record[:] = 0
    return record


def check(record, values, scale, float8):
    """Sums and greatest numbers to the bit; errors up to the rounding of their sum."""
    dtype, greatest = FLOAT8[float8]
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = np.clip(values * scale, -greatest, greatest)
        want = counted(values, scale, scaled.astype(dtype).astype(np.float32), greatest)
    exact = [field for field in range(7) if field not in (ERROR, SCALE, SCALE_INV)]
    np.testing.assert_array_equal(record[exact], want[exact])
    np.testing.assert_allclose(record[ERROR], want[ERROR], rtol=1e-5)
    got, of_scale = (each[[SCALE, SCALE_INV]].astype(np.int32).view(np.float32) for each in (record, want))
    np.testing.assert_allclose(got, of_scale, rtol=1e-6)
    assert min(record[1:4]) > 0 and record[AMAX] > 0


def target_of(out, record):
    return out.target._replace(statistics=record.ctypes.data)


@pytest.mark.parametrize("float8", [E4M3, E5M2])
def test_a_cast_counts_and_casts(te, seed, float8):
    """A second matrix adds to the same record; without a place for data nothing else is written."""
    random, record = np.random.default_rng(seed), new_record()
    x, scale = drawn(random, (80, 144)), 3e3
    out = Output(x.shape, float8, scale)
    casts.cast_transpose(te, te, x.ctypes.data, target_of(out, record), *x.shape, BF16, float8)
    values = x.astype(np.float32)
    finite = np.isfinite(values)
    np.testing.assert_array_equal(out.data[finite], out.bits(values)[finite])
    np.testing.assert_array_equal(out.transposed, out.data.T)
    check(record, values, out.scale, float8)
    again, other = aligned((64, 64), NUMPY[BF16]), new_record()
    again[:] = random.standard_normal((64, 64))
    form, address = casts.Form(BF16, float8), out.scale.ctypes.data
    for one in (other, record):
        statistics.of_cast(te, te, again.ctypes.data, address, one.ctypes.data, *again.shape, form)
    before = new_record()
    statistics.of_cast(te, te, x.ctypes.data, address, before.ctypes.data, *x.shape, form)
    np.testing.assert_array_equal(record[:4], before[:4] + other[:4])
    np.testing.assert_array_equal(record[4:], np.maximum(before[4:], other[4:]))


def test_the_scale_of_zeros_does_not_count(te):
    record, x, scale = new_record(), aligned((64, 64), NUMPY[BF16]), np.ones(1, np.float32)
    form = casts.Form(BF16, E4M3)
    statistics.of_cast(te, te, x.ctypes.data, scale.ctypes.data, record.ctypes.data, *x.shape, form)
    assert not record.any()


def test_a_kernel_with_two_results(te, seed):
    """SwiGLU's gradient, of gate and up together."""
    dy, z = inputs(seed, 80, 96, BF16)
    want, record = expected(dy, z)[1], new_record()
    out = Output(want.shape, E5M2, 2000.0)
    form = casts.Form(BF16, E5M2)
    swiglu.dswiglu_cast_transpose(te, te, dy.ctypes.data, z.ctypes.data, target_of(out, record), dy.shape, form)
    np.testing.assert_array_equal(out.data, out.bits(want))
    check(record, want, out.scale, E5M2)


def test_a_norm(te, seed):
    random, record, shape = np.random.default_rng(seed), new_record(), (80, 144)
    x, gamma = aligned(shape, NUMPY[BF16]), aligned(shape[1:], NUMPY[BF16])
    x[:], gamma[:] = random.standard_normal(shape) * np.exp2(random.integers(-16, 1, shape)), 1.5
    rsigma = (random.random(80) + 1).astype(np.float32)
    out = Output(shape, E4M3, 300.0)
    addresses = x.ctypes.data, gamma.ctypes.data, rsigma.ctypes.data
    norm = rmsnorm.RMSNorm(*addresses, *shape, BF16, epsilon=0.0, zero_centered=False)
    rmsnorm.cast_transpose(te, te, norm, target_of(out, record), E4M3)
    values = gamma.astype(np.float32) * (rsigma[:, None] * x.astype(np.float32))
    np.testing.assert_array_equal(out.data, out.bits(values))
    check(record, values, out.scale, E4M3)


def test_rows_of_experts(te, seed):
    """Neither padding nor what lies behind the last expert's rows counts."""
    random, record, counts, columns = np.random.default_rng(seed), new_record(), [48, 0, 16], 144
    tokens, rows, used = 50, 96, 64
    token_of, x = np.full(rows, tokens, np.int32), aligned((tokens, columns), NUMPY[BF16])
    token_of[:40], token_of[used:] = random.integers(0, tokens, 40), 0
    x[:] = random.standard_normal(x.shape) * np.exp2(random.integers(-16, 1, x.shape))
    begins, scale_inv = np.cumsum([0, *counts]) * columns, np.zeros(3, np.float32)
    out = Output((rows, columns), E4M3, 300.0)
    of_rows = experts.Rows(x.ctypes.data, token_of.ctypes.data, begins.ctypes.data, tokens, 3, rows, columns)
    target = experts.ExpertsTarget(target_of(out, record), scale_inv.ctypes.data)
    experts.cast_transpose(te, te, of_rows, target, casts.Form(BF16, E4M3))
    check(record, x.astype(np.float32)[token_of[:40]], out.scale, E4M3)
    assert (scale_inv == 1 / out.scale).all()


@pytest.mark.parametrize("power_2", [True, False])
@pytest.mark.parametrize("square", [True, False])
def test_blocks(te, seed, square, power_2):
    """The least amax gives a block of zeros its scale. With rows of experts only those that tokens have count."""
    random, record, (rows, cols) = np.random.default_rng(seed), new_record(), (256, 384)
    x = aligned((rows, cols), NUMPY[BF16])
    x[:] = random.standard_normal((rows, cols)) * np.exp2(random.integers(-30, 4, (rows, cols)))
    x[:128, :128] = 0
    begins, used = np.array([0, 0, 128 * cols, 128 * cols], np.int64), 128
    blocks = statistics.Blocks(square, power_2, 2.0**-20)
    form = casts.Form(BF16, E4M3)
    for part, count in ((statistics.Part(), rows), (statistics.Part(begins.ctypes.data, 3), used)):
        record[:] = 0
        statistics.of_blocks(te, te, x.ctypes.data, record.ctypes.data, rows, cols, form, blocks, part)
        height = 128 if square else 1
        values = x[:count].astype(np.float32).reshape(count // height, height, cols // 128, 128)
        scale = np.float32(448) / np.maximum(np.abs(values).max((1, 3), keepdims=True), np.float32(2.0**-20))
        if power_2:
            scale = np.exp2(np.floor(np.log2(scale)))
        scaled = (values * scale).astype(FLOAT8[E4M3][0]).astype(np.float32)
        want = counted(values, scale, scaled, 448)
        np.testing.assert_array_equal(record[[0, 1, 2, AMAX]], want[[0, 1, 2, AMAX]])
        np.testing.assert_allclose(record[ERROR], want[ERROR], rtol=1e-5)
        assert record[1] > 0 and record[2] == 0
        assert record[SCALE].astype(np.int32).view(np.float32) == scale.max()  # of the block of zeros
