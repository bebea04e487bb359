"""linear_cross_entropy against float64 NumPy, and its memory.

Tensor parallelism and bf16 are in tests/multiprocess/distributed/test_cross_entropy.py.
"""

import numpy as np
import paddle
import pytest

from paddle_te.layers import linear_cross_entropy, parallel_cross_entropy
from paddle_te.ops import get_ops
from tests import emulated_te
from tests.cross_entropy_cases import draw, reference


def tensors(hidden, weight, labels, transpose_y=False):
    hidden, weight = paddle.to_tensor(hidden), paddle.to_tensor(weight.T.copy() if transpose_y else weight)
    hidden.stop_gradient = weight.stop_gradient = False
    return hidden, weight, paddle.to_tensor(labels)


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("backend", ["paddle", "transformer_engine"])
@pytest.mark.parametrize("dtype, tolerance", [("float32", 4e-6), ("bfloat16", 1e-2)])
def test_of_logits(seed, backend, dtype, tolerance, monkeypatch):
    """The identity as weight makes the reference one of logits, which stay as they are."""
    emulated_te.install(monkeypatch.setattr)
    _, logits, labels = draw(seed, vocab=48, h=38)
    labels[1, 2] = 5
    logits = paddle.to_tensor(logits).astype(dtype)
    loss, want, _ = reference(logits.astype("float32").numpy(), np.eye(48), labels)
    logits.stop_gradient = False
    twice = logits * 2  # a gradient that no leaf takes
    before = twice.astype("float32").numpy()
    got = parallel_cross_entropy((twice / 2).reshape([2, 19, 48]), paddle.to_tensor(labels), backend=backend)
    (got * 3).backward()
    assert got.dtype == paddle.float32 and got.shape == [] and abs(got.item() - loss) < 1e-6 * loss
    assert logits.grad.dtype == logits.dtype and (twice.astype("float32").numpy() == before).all()
    gradient = logits.grad.astype("float32").numpy() / 3
    assert np.linalg.norm(gradient - want) < tolerance * np.linalg.norm(want)
    with paddle.no_grad():
        again = parallel_cross_entropy(logits.reshape([2, 19, 48]), paddle.to_tensor(labels), backend=backend)
    assert again.item() == got.item() and again.stop_gradient


@pytest.mark.parametrize("backend", ["paddle", "transformer_engine"])
def test_of_logits_none_of_which_counts(seed, backend, monkeypatch):
    emulated_te.install(monkeypatch.setattr)
    logits = paddle.to_tensor(draw(seed)[1])
    logits.stop_gradient = False
    loss = parallel_cross_entropy(logits, paddle.full([16], 7, "int64"), ignore_index=7, backend=backend)
    loss.backward()
    assert loss.item() == 0 and not logits.grad.any()


@pytest.mark.parametrize("chunk_tokens", [1, 8, 19, 37, 38, None])  # of 38 tokens
@pytest.mark.parametrize("transpose_y", [False, True])
def test_loss_and_gradients(seed, chunk_tokens, transpose_y):
    arrays = draw(seed)
    loss, dx, dw = reference(*arrays)
    hidden, weight, labels = tensors(*arrays, transpose_y)
    got = linear_cross_entropy(hidden, weight, labels, transpose_y=transpose_y, chunk_tokens=chunk_tokens)
    assert got.shape == [] and abs(got.item() - loss) < 1e-6 * loss
    (got * 3).backward()
    close(hidden.grad.numpy(), 3 * dx)
    close(weight.grad.numpy(), 3 * (dw.T if transpose_y else dw))


def test_ignore_index(seed):
    hidden, weight, labels = draw(seed)
    labels[labels == -100] = 7
    loss, dx, dw = reference(hidden, weight, labels, ignore_index=7)
    x, w, y = tensors(hidden, weight, labels)
    got = linear_cross_entropy(x, w, y, ignore_index=7, chunk_tokens=5)
    got.backward()
    assert abs(got.item() - loss) < 1e-6 * loss
    close(x.grad.numpy(), dx)
    close(w.grad.numpy(), dw)


def test_all_ignored(seed):
    hidden, weight, labels = draw(seed)
    x, w, y = tensors(hidden, weight, np.full_like(labels, -100))
    loss = linear_cross_entropy(x, w, y, chunk_tokens=5)
    loss.backward()
    assert loss.item() == 0 and not x.grad.any() and not w.grad.any()


def test_a_loss_of_zero_counts():
    """As in transformers: the mean is over labels. PaddleNLP's criteria leave out tokens that a model is sure of."""
    hidden = np.array([[1.0, 0], [0, 1]], "float32")
    weight = np.array([[100.0, 0], [1, 1]], "float32")  # the first token is certain, the second has no idea
    x, w, y = tensors(hidden, weight, np.array([0, 1]))
    loss = linear_cross_entropy(x, w, y, chunk_tokens=1)
    loss.backward()
    assert abs(loss.item() - np.log(2) / 2) < 1e-6 and x.grad[1].any()
    assert parallel_cross_entropy(x @ w, y).item() == pytest.approx(loss.item())


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_no_gradient_of_what_is_frozen_is_computed(seed, frozen, monkeypatch):
    arrays = draw(seed)
    hidden, weight, labels = tensors(*arrays)
    dict(hidden=hidden, weight=weight)[frozen].stop_gradient = True
    products, matmul = [], paddle.matmul
    monkeypatch.setattr(paddle, "matmul", lambda *args, **kwargs: products.append(1) or matmul(*args, **kwargs))
    linear_cross_entropy(hidden, weight, labels, chunk_tokens=19).backward()
    assert len(products) == 4  # of 2 chunks, forward and the one gradient
    _, dx, dw = reference(*arrays)
    if frozen == "hidden":
        assert hidden.grad is None
        close(weight.grad.numpy(), dw)
    else:
        assert weight.grad is None
        close(hidden.grad.numpy(), dx)


def test_without_gradients(seed, monkeypatch):
    arrays = draw(seed)
    products, matmul = [], paddle.matmul
    monkeypatch.setattr(paddle, "matmul", lambda *args, **kwargs: products.append(1) or matmul(*args, **kwargs))
    with paddle.no_grad():
        loss = linear_cross_entropy(*tensors(*arrays), chunk_tokens=19)
    assert len(products) == 2 and loss.stop_gradient
    assert abs(loss.item() - reference(*arrays)[0]) < 1e-6 * loss.item()


def test_labels_that_do_not_fit(seed):
    hidden, weight, labels = tensors(*draw(seed))
    with pytest.raises(ValueError, match="each token needs one label"):
        linear_cross_entropy(hidden, weight, labels[:, 1:])
    with pytest.raises(ValueError, match="each token needs one label"):
        linear_cross_entropy(hidden[:, :0], weight, labels[:, :0])
    with pytest.raises(ValueError, match=r"logits .*each token needs one label"):
        parallel_cross_entropy(hidden, labels[:, 1:])
    with pytest.raises(ValueError, match=r"logits .*each token needs one label"):
        parallel_cross_entropy(hidden[:, :0], labels[:, :0])


def allocated(train, loss):
    """Host bytes at the peak, beyond those before, of the loss of 2048 tokens and 8192 words."""
    arrays = draw(0, 1, 2048, 32, 8192)
    hidden, weight, labels = tensors(*arrays)
    core = paddle.base.core
    core.host_memory_stat_reset_peak_value("Allocated", 0)
    before = core.host_memory_stat_current_value("Allocated", 0)
    with paddle.set_grad_enabled(train):
        result = loss(hidden, weight, labels)
        if train:
            result.backward()
    return core.host_memory_stat_peak_value("Allocated", 0) - before


def plain(hidden, weight, labels):
    return paddle.nn.functional.cross_entropy(paddle.matmul(hidden, weight), labels)


@pytest.mark.parametrize("train", [True, False])
def test_only_one_chunks_logits_exist(train):
    logits, chunk, weight = 2048 * 8192 * 4, 128 * 8192 * 4, 32 * 8192 * 4
    peak = allocated(train, lambda *args: linear_cross_entropy(*args, chunk_tokens=128))
    assert peak < 1.1 * chunk + 3 * weight < logits / 4
    assert allocated(train, plain) > logits  # what is measured is there


def test_autocast_is_followed_for_the_product_only(seed, monkeypatch):
    """Paddle's CPU has no autocast: what it would say is told, with float64 for its dtype."""
    arrays = draw(seed)
    monkeypatch.setattr(paddle, "is_autocast_enabled", lambda: True)
    monkeypatch.setattr(paddle, "get_autocast_dtype", lambda: "float64")
    dtypes, matmul = set(), paddle.matmul
    monkeypatch.setattr(
        paddle, "matmul", lambda x, y, **kwargs: dtypes.update((x.dtype, y.dtype)) or matmul(x, y, **kwargs)
    )
    hidden, weight, labels = tensors(*arrays)
    loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=19)
    loss.backward()
    assert dtypes == {paddle.float64} and loss.dtype == hidden.grad.dtype == weight.grad.dtype == paddle.float32
    close(weight.grad.numpy(), reference(*arrays)[2])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_te_adds_the_weights_gradient_in_float32(seed, dtype, monkeypatch):
    emulated_te.install(monkeypatch.setattr)
    paddle.seed(seed)
    x, dy = paddle.randn([48, 16]).astype(dtype)[16:], paddle.randn([32, 24]).astype(dtype)
    want = x.astype("float32").numpy().T @ dy.astype("float32").numpy()
    accumulate = get_ops("transformer_engine").accumulate_wgrad
    out = accumulate(x, dy)
    assert out.dtype == paddle.float32
    close(out.numpy(), want)
    assert accumulate(x, dy, out) is out
    close(out.numpy(), 2 * want)
