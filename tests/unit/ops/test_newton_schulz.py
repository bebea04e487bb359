"""Newton–Schulz of both backends beside its polynomial of singular values."""

import numpy as np
import paddle
import pytest

from paddle_te import native
from paddle_te.native import newton_schulz as kernels
from paddle_te.ops import get_ops
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


# shape, the block rows of a symmetric product at least, native calls for two matrices: a step at a time has 3 products,
# with 3 steps at once 14 are symmetric and 3 not
WAYS = {
    "singly": ((32, 41), 2048, {"gemm": 30}),
    "singly, tall": ((41, 32), 2048, {"gemm": 30}),
    "a vector": ((1, 8), 2048, {"gemm": 30}),
    "grouped": ((32, 40), 2048, {"grouped_gemm": 15}),
    "grouped, tall": ((40, 32), 2048, {"grouped_gemm": 15}),
    "grouped, square": ((32, 32), 2048, {"grouped_gemm": 15}),
    "symmetric": ((192, 256), 64, {"gemm": 2 * 5 * (2 * 3 + 1)}),
    "symmetric, square": ((128, 128), 64, {"gemm": 2 * 5 * (2 * 2 + 1)}),
    "singly, steps at once": ((128, 201), 2048, {"gemm": 34}),
    "grouped, steps at once": ((128, 192), 2048, {"grouped_gemm": 17}),
    "grouped, tall, steps at once": ((192, 128), 2048, {"grouped_gemm": 17}),
    "symmetric, steps at once": ((128, 256), 64, {"gemm": 2 * (14 * 2 + 3)}),
    "symmetric, tall, steps at once": ((320, 192), 64, {"gemm": 2 * (14 * 3 + 3)}),
}


def spread(shape, draw):
    """Singular values 1, 1/2, 1/3 and so on."""
    u, _, v = np.linalg.svd(draw.standard_normal(shape), full_matrices=False)
    return (u / np.arange(1, u.shape[1] + 1)) @ v


@pytest.mark.parametrize("way", WAYS)
def test_tes_gemms_are_the_polynomial(way, seed, monkeypatch):
    """In bfloat16, on the emulated library."""
    shape, height, calls = WAYS[way]
    emulated_te.install(monkeypatch.setattr)
    monkeypatch.setattr(kernels, "BLOCK_ROWS", height)

    draw = np.random.default_rng(seed)
    matrices = [array.astype("float32") for array in (draw.standard_normal(shape), spread(shape, draw))]
    tensors = [paddle.to_tensor(matrix).astype("bfloat16") for matrix in matrices]
    got = get_ops("transformer_engine").newton_schulz(tensors, STEPS, FACTOR)
    counts = native.load().counts()
    for name, number in calls.items():
        assert sum(n for (kernel, _), n in counts.items() if kernel == name) == number
    assert got.shape == [2, *shape] and got.dtype == paddle.bfloat16
    for tensor, result in zip(tensors, got.astype("float32").numpy(), strict=True):
        want = reference(tensor.astype("float32").numpy())
        assert 1e-3 < relative(result, want) < 0.042  # 60 seeds: at most 0.028


@pytest.mark.parametrize("shape", [(32, 40), (192, 128)])
def test_many_experts_are_each_of_them(shape, seed, monkeypatch):
    """Grouped GEMMs of experts whose updates have unlike sizes, beside each expert by itself."""
    emulated_te.install(monkeypatch.setattr)
    numbers = np.random.default_rng(seed).standard_normal((5, *shape)) * 10.0 ** np.arange(-2, 3)[:, None, None]
    experts = [paddle.to_tensor(matrix.astype("float32")).astype("bfloat16") for matrix in numbers]
    backend = get_ops("transformer_engine")
    together = backend.newton_schulz(experts, STEPS, FACTOR).astype("float32").numpy()
    for expert, result in zip(experts, together, strict=True):
        (want,) = backend.newton_schulz([expert], STEPS, FACTOR).astype("float32").numpy()
        np.testing.assert_allclose(result, want, atol=0.02 * np.abs(want).max())
    assert {name for name, _ in native.load().counts()} >= {"gemm", "grouped_gemm"}


@pytest.mark.parametrize("backend, dtype", [("paddle", "float32"), ("transformer_engine", "bfloat16")])
@pytest.mark.parametrize("count", [1, 300])
def test_a_stack_is_its_matrices(backend, dtype, count, seed, monkeypatch):
    """By themselves and beside others. te has one grouped GEMM for any number of them."""
    emulated_te.install(monkeypatch.setattr)
    numbers = np.random.default_rng(seed).standard_normal((count + 1, 8, 16)).astype("float32")
    stack, ops = paddle.to_tensor(numbers).astype(dtype), get_ops(backend)
    before = stack.astype("float32").numpy()
    for given in ([stack], [stack[0], stack[1:]]):
        got = ops.newton_schulz(given, STEPS, FACTOR)
        assert got.shape == stack.shape and got.dtype == stack.dtype
        for matrix, result in zip(before, got.astype("float32").numpy(), strict=True):
            # 100 seeds: at most 2.2e-6, and 0.036 in te
            assert relative(result, reference(matrix)) < (1e-5 if dtype == "float32" else 0.054)
    np.testing.assert_array_equal(stack.astype("float32").numpy(), before)
    if backend == "transformer_engine":
        calls = sum(n for (kernel, _), n in native.load().counts().items() if kernel == "grouped_gemm")
        assert calls == 2 * 3 * STEPS


def test_which_way_is_taken():
    """Llama-3-8B's and Qwen3-30B-A3B's matrices."""
    blocks, grouped, first = kernels.blocks_of, kernels.is_grouped, kernels.first_steps
    assert [blocks(*shape) for shape in ((14336, 4096), (4096, 4096), (8192, 28672), (5120, 5120))] == [2, 2, 4, 2]
    assert [blocks(*shape) for shape in ((1024, 4096), (2048, 768), (4100, 4100), (7168, 7168))] == [1, 1, 1, 2]
    assert grouped(2, 1024, 4096) and grouped(128, 2048, 768)
    assert [first(*shape) for shape in ((4096, 14336), (768, 2048), (4096, 4096), (64, 256))] == [3, 3, 1, 1]
    assert not (grouped(1, 1024, 4096) or grouped(2, 1020, 4096) or grouped(2, 4096, 4096))
