"""Newton–Schulz of both backends beside its polynomial of singular values."""

import sys

import numpy as np
import paddle
import pytest

from paddle_te.ops import get_ops, newton_schulz
from tests import emulated_te

STEPS, FACTOR = 5, 12.8
SHAPES = [(24, 40), (40, 24), (32, 32), (1, 8)]


def reference(matrix, steps=STEPS):
    """Jordan's quintic on the singular values, which is what the steps do: X = U f(f(…(s))) Vᵀ."""
    u, s, v = np.linalg.svd(matrix.astype("float64"), full_matrices=False)
    s = s / np.linalg.norm(s)
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return FACTOR * (u * s) @ v


def relative(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.parametrize("shape", SHAPES)
def test_pd_is_the_polynomial(shape, seed):
    matrices = np.random.default_rng(seed).standard_normal((3, *shape)).astype("float32")
    tensors = [paddle.to_tensor(matrix) for matrix in matrices]
    got = get_ops("paddle").newton_schulz(tensors, STEPS, FACTOR)
    assert got.shape == [3, *shape] and got.dtype == paddle.float32
    for matrix, tensor, result in zip(matrices, tensors, got.numpy(), strict=True):
        assert relative(result, reference(matrix)) < 1e-5  # 200 seeds: 1.6e-6
        np.testing.assert_array_equal(tensor.numpy(), matrix)
        assert 0.6 * FACTOR < np.linalg.norm(result, 2) < 1.3 * FACTOR


def test_zeros_stay(seed):
    zeros, other = paddle.zeros([2, 3]), paddle.to_tensor(np.random.default_rng(seed).standard_normal((2, 3)))
    got = get_ops("paddle").newton_schulz([zeros, other.astype("float32")], STEPS, FACTOR).numpy()
    assert (got[0] == 0).all() and np.isfinite(got).all() and (got[1] != 0).all()


def test_te_refuses_float32(monkeypatch):
    emulated_te.install(monkeypatch.setattr)
    with pytest.raises(TypeError, match=r"Newton-Schulz is paddle\.float32; it must be"):
        get_ops("transformer_engine").newton_schulz([paddle.ones([2, 2])], STEPS, FACTOR)


@pytest.mark.parametrize("shape", SHAPES)
def test_tes_gemms_are_the_polynomial(shape, seed, monkeypatch):
    """In bfloat16, on the emulated library; the CPU has no division in bfloat16, so that pd's makes the norm 1."""
    emulated_te.install(monkeypatch.setattr)

    def normalized(matrices):
        return newton_schulz.normalized([matrix.astype("float32") for matrix in matrices]).astype("bfloat16")

    monkeypatch.setattr(sys.modules["paddle_te.ops.te.newton_schulz"], "normalized", normalized)
    matrices = np.random.default_rng(seed).standard_normal((2, *shape)).astype("float32")
    tensors = [paddle.to_tensor(matrix).astype("bfloat16") for matrix in matrices]
    got = get_ops("transformer_engine").newton_schulz(tensors, STEPS, FACTOR)
    assert got.shape == [2, *shape] and got.dtype == paddle.bfloat16
    for tensor, result in zip(tensors, got.astype("float32").numpy(), strict=True):
        want = reference(tensor.astype("float32").numpy())
        assert 1e-3 < relative(result, want) < 0.05  # 100 seeds: 0.007 to 0.028
