"""Label smoothing beside torch's formula in float64 NumPy; over ranks in tests/multiprocess/distributed."""

import numpy as np
import paddle
import pytest

from paddle_te.layers import linear_cross_entropy, parallel_cross_entropy
from tests import emulated_te
from tests.cross_entropy_cases import draw, reference

# torch.nn.functional.cross_entropy(x, y, label_smoothing=0.1, ignore_index=-100) of torch 2.14 in float64, and its
# gradient's row 0, with x[i, j] = sin(3 i + 2 j), y = [1, 4, -100, 0]
TORCHS = 1.7116404857978362, [0.03839375093, -0.19480067753, 0.01447406747, 0.02740917591, 0.11452368322]


def logits_and_labels():
    x = np.sin(3 * np.arange(4)[:, None] + 2 * np.arange(5)[None])
    return x, np.array([1, 4, -100, 0])


def test_reference_is_torchs():
    x, labels = logits_and_labels()
    loss, gradient, _ = reference(x, np.eye(5), labels, smoothing=0.1)
    assert loss == pytest.approx(TORCHS[0], abs=1e-7)
    np.testing.assert_allclose(gradient[0], TORCHS[1], atol=1e-7)


@pytest.mark.parametrize("backend", ["paddle", "transformer_engine"])
@pytest.mark.parametrize("dtype, tolerance", [("float32", 4e-6), ("bfloat16", 1e-2)])
def test_of_logits(seed, backend, dtype, tolerance, monkeypatch):
    emulated_te.install(monkeypatch.setattr)
    _, logits, labels = draw(seed, vocab=48, h=38)
    logits = paddle.to_tensor(logits).astype(dtype)
    loss, want, _ = reference(logits.astype("float32").numpy(), np.eye(48), labels, smoothing=0.3)
    logits.stop_gradient = False
    got = parallel_cross_entropy(logits, paddle.to_tensor(labels.ravel()), backend=backend, smoothing=0.3)
    (got * 3).backward()
    assert abs(got.item() - loss) < 2e-6 * loss and logits.grad.dtype == logits.dtype
    gradient = logits.grad.astype("float32").numpy() / 3
    assert np.linalg.norm(gradient - want) < tolerance * np.linalg.norm(want)


@pytest.mark.parametrize("transpose_y", [False, True])
def test_in_chunks(seed, transpose_y):
    hidden, weight, labels = draw(seed)
    loss, dx, dw = reference(hidden, weight, labels, smoothing=0.2)
    x, w = paddle.to_tensor(hidden), paddle.to_tensor(weight.T.copy() if transpose_y else weight)
    x.stop_gradient = w.stop_gradient = False
    options = dict(transpose_y=transpose_y, smoothing=0.2, chunk_tokens=7)
    got = linear_cross_entropy(x, w, paddle.to_tensor(labels), **options)
    got.backward()
    assert got.item() == pytest.approx(loss, rel=1e-5)
    np.testing.assert_allclose(x.grad.numpy(), dx, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(w.grad.numpy().T if transpose_y else w.grad.numpy(), dw, rtol=2e-5, atol=2e-6)
    with paddle.no_grad():
        assert linear_cross_entropy(x, w, paddle.to_tensor(labels), **options).item() == pytest.approx(loss, rel=1e-5)
