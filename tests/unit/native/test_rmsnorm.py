"""The kernels of rmsnorm_statistics.cu and rmsnorm_cast.cu: their own source run on the CPU against NumPy."""

import numpy as np
import pytest

from paddle_te.native import DType, casts, rmsnorm
from tests.unit.native.casts_on_cpu import Output
from tests.unit.native.cuda_on_cpu import NUMPY, address, aligned

EPSILON = 1e-3


@pytest.fixture
def te(monkeypatch, on_cpu):
    monkeypatch.setattr(rmsnorm, "CAST_TILING", casts.Tiling(64, 2, 1))
    return on_cpu


def inputs(seed, rows, hidden, mean=0):
    """(x, gamma) in bfloat16."""
    random, arrays = np.random.default_rng(seed), []
    for shape in ((rows, hidden), (hidden,)):
        arrays.append(aligned(shape, NUMPY[DType.BFLOAT16]))
        arrays[-1][:] = random.standard_normal(shape) * np.exp2(random.integers(-4, 4, shape)) + mean
    return arrays


def norm_of(x, gamma, rsigma, zero_centered):
    places = address(x), address(gamma), address(rsigma)
    return rmsnorm.RMSNorm(*places, *x.shape, DType.BFLOAT16, EPSILON, zero_centered)


def run_statistics(te, x, gamma, amax=0, zero_centered=False, copy=0):
    rsigma = np.full(x.shape[0], np.nan, np.float32)
    rmsnorm.statistics(te, te, norm_of(x, gamma, rsigma, zero_centered), amax, copy)
    return rsigma


@pytest.mark.parametrize("mean", [0, 100])
@pytest.mark.parametrize("hidden", [768, 1024, 4096])
def test_statistics(te, seed, hidden, mean):
    """Of rows that one warp computes, four of which are a block, and of one that four share; and a copy of these rows
    alone."""
    x, gamma = inputs(seed, 5, hidden, mean)
    memory = aligned((6, hidden), NUMPY[DType.BFLOAT16])
    memory[:] = 7
    rsigma = run_statistics(te, x, gamma, copy=address(memory))
    np.testing.assert_array_equal(memory[:5], x)
    assert (memory[5] == 7).all()
    want = 1 / np.sqrt((x.astype(np.float64) ** 2).mean(1) + EPSILON)
    np.testing.assert_allclose(rsigma, want, rtol=4e-7)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("rounded, plain", [(False, False), (True, False), (True, True)])
def test_norm(te, seed, rounded, plain, zero_centered):
    """The bits of the norm and its cast from the statistics, and the amax that these may come with."""
    x, gamma = inputs(seed, 80, 1024)
    beside = aligned(x.shape, NUMPY[DType.BFLOAT16])
    amax, out = np.zeros(1, np.float32), Output(x.shape, DType.FLOAT8_E4M3, 3)
    rsigma = run_statistics(te, x, gamma, address(amax), zero_centered)
    norm, options = norm_of(x, gamma, rsigma, zero_centered), (DType.FLOAT8_E4M3, rounded)
    rmsnorm.cast_transpose(te, te, norm, out.target, *options, plain=address(beside) if plain else 0)
    factors = gamma.astype(np.float32) + np.float32(zero_centered)
    want = factors * (rsigma[:, None] * x.astype(np.float32))
    stored = want.astype(x.dtype).astype(np.float32)
    assert amax == np.abs(stored).max()
    assert not plain or (beside == stored).all()
    want = stored if rounded else want
    np.testing.assert_array_equal(out.data, out.bits(want))
    np.testing.assert_array_equal(out.transposed, out.data.T)
    assert out.amax == np.abs(want).max() and out.scale_inv == np.float32(1) / out.scale


def test_which_norms_fit():
    assert rmsnorm.takes(4096, DType.BFLOAT16) and not rmsnorm.takes(5120, DType.BFLOAT16)
    assert not rmsnorm.takes(4096, DType.FLOAT32)
