"""Compare tokens' log-probabilities and their gradients with float64 NumPy. Each token's gradient differs.

te's sum of a weight's gradient and bf16 are in tests/gpu/test_cross_entropy.py.
"""

import numpy as np
import paddle
import pytest

from paddle_te.layers.log_probabilities import linear_log_probabilities
from tests import emulated_te
from tests.cross_entropy_cases import draw


def reference(hidden, weight, labels, dlogp, ignore_index):
    """(log-probabilities, d hidden, d weight) in float64, of rows; weight [h, vocab]."""
    x, w = hidden.astype("float64"), weight.astype("float64")
    logits = x @ w
    log_softmax = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    rows, counts = np.arange(len(labels)), labels != ignore_index
    labels = np.where(counts, labels, 0)
    hot = np.eye(w.shape[1])[labels]
    dlogits = (hot - np.exp(log_softmax)) * (dlogp * counts)[:, None]
    return np.where(counts, log_softmax[rows, labels], 0), dlogits @ w.T, x.T @ dlogits


def rows(seed, ignore_index=-100):
    hidden, weight, labels = draw(seed)
    labels[labels == -100] = ignore_index
    return hidden.reshape(-1, hidden.shape[-1]), weight, labels.ravel()


@pytest.mark.parametrize("backend, frozen", [("paddle", False), ("paddle", True), ("transformer_engine", True)])
@pytest.mark.parametrize("chunk_tokens, transpose_y, ignored", [(8, False, -100), (19, True, 7), (64, True, -100)])
def test_values_and_gradients(seed, monkeypatch, backend, frozen, chunk_tokens, transpose_y, ignored):
    emulated_te.install(monkeypatch.setattr)
    hidden, weight, labels = rows(seed, ignored)
    x, w = paddle.to_tensor(hidden), paddle.to_tensor(weight)
    dlogp = np.random.default_rng(seed).standard_normal(len(labels))
    want, dx, dw = reference(hidden, weight, labels, dlogp, ignored)
    w = w.t().contiguous() if transpose_y else w
    x.stop_gradient, w.stop_gradient = False, frozen
    got = linear_log_probabilities(
        x, w, paddle.to_tensor(labels), transpose_y=transpose_y, ignore_index=ignored,
        chunk_tokens=chunk_tokens, backend=backend,
    )  # fmt: skip
    assert got.dtype == paddle.float32 and got.shape == [len(labels)]
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-5, atol=1e-5)
    (got * paddle.to_tensor(dlogp.astype("float32"))).sum().backward()
    assert np.linalg.norm(x.grad.numpy() - dx) < 3e-6 * np.linalg.norm(dx)
    if frozen:
        assert w.grad is None
    else:
        dw = dw.T if transpose_y else dw
        assert np.linalg.norm(w.grad.numpy() - dw) < 3e-6 * np.linalg.norm(dw)
    with paddle.no_grad():
        again = linear_log_probabilities(
            x, w, paddle.to_tensor(labels), transpose_y=transpose_y, ignore_index=ignored, backend=backend
        )
    np.testing.assert_allclose(again.numpy(), got.numpy(), rtol=1e-5, atol=1e-5)


def test_capped_logits(seed):
    """Their gradient has the cap's slope: against differences of the values in float64."""
    hidden, weight, labels = rows(seed)
    cap, dlogp = 3.0, np.random.default_rng(seed).standard_normal(len(labels))

    def values(x):
        logits = cap * np.tanh(x @ weight.astype("float64") / cap)
        found = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        kept = np.where(labels == -100, 0, labels)
        return np.where(labels == -100, 0, found[np.arange(len(labels)), kept])

    x, w = paddle.to_tensor(hidden), paddle.to_tensor(weight)
    x.stop_gradient = False
    got = linear_log_probabilities(x, w, paddle.to_tensor(labels), chunk_tokens=8, softcap=cap)
    np.testing.assert_allclose(got.numpy(), values(hidden.astype("float64")), rtol=1e-5, atol=1e-5)
    (got * paddle.to_tensor(dlogp.astype("float32"))).sum().backward()
    step = np.random.default_rng(seed + 1).standard_normal(hidden.shape)
    ends = [(values(hidden.astype("float64") + sign * 1e-6 * step) * dlogp).sum() for sign in (1, -1)]
    slope = (ends[0] - ends[1]) / 2e-6
    assert (x.grad.numpy() * step).sum() == pytest.approx(slope, rel=1e-4, abs=1e-4)


def test_only_the_weight_learns(seed):
    hidden, weight, labels = rows(seed)
    dlogp = np.random.default_rng(seed).standard_normal(len(labels))
    x, w = paddle.to_tensor(hidden), paddle.to_tensor(weight)
    w.stop_gradient = False
    got = linear_log_probabilities(x, w, paddle.to_tensor(labels), chunk_tokens=5)
    (got * paddle.to_tensor(dlogp.astype("float32"))).sum().backward()
    _, _, dw = reference(hidden, weight, labels, dlogp, -100)
    assert np.linalg.norm(w.grad.numpy() - dw) < 3e-6 * np.linalg.norm(dw) and x.grad is None


def test_other_shapes_are_refused():
    with pytest.raises(ValueError, match="each token needs one label"):
        linear_log_probabilities(paddle.ones([3, 4]), paddle.ones([4, 5]), paddle.zeros([2], "int64"))
