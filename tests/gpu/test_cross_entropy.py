"""The losses in bf16 on the GPU, with pd's operations and with te's kernels."""

import numpy as np
import paddle
import pytest

from paddle_te import device
from paddle_te.layers import linear_cross_entropy, parallel_cross_entropy
from paddle_te.layers.accuracy import Accuracy
from paddle_te.layers.log_probabilities import linear_log_probabilities
from tests.cross_entropy_cases import draw, reference
from tests.te_weights import relative


@pytest.mark.parametrize("vocabulary", [1000, 1001])  # rows of whole vectors, or not
@pytest.mark.parametrize("transpose_y", [False, True])
@pytest.mark.parametrize("backend", ["paddle", "transformer_engine"])
def test_bf16(seed, gpu, backend, transpose_y, vocabulary):
    hidden, weight, labels = draw(seed, 2, 300, 128, vocabulary)
    hidden, weight = (paddle.to_tensor(a).astype("bfloat16") for a in (hidden, weight / 8))
    loss, dx, dw = reference(hidden.astype("float32").numpy(), weight.astype("float32").numpy(), labels)
    if transpose_y:
        weight, dw = weight.t().contiguous(), dw.T
    hidden.stop_gradient = weight.stop_gradient = False
    labels = paddle.to_tensor(labels)
    got = linear_cross_entropy(hidden, weight, labels, transpose_y=transpose_y, chunk_tokens=128, backend=backend)
    got.backward()
    assert got.dtype == paddle.float32 and abs(got.item() - loss) < 1e-3 * loss
    for tensor, want in ((hidden, dx), (weight, dw)):
        assert tensor.grad.dtype == paddle.bfloat16 and tensor.grad.place == tensor.place
        assert relative(tensor.grad.astype("float32"), want) < 1e-2
    with paddle.no_grad():
        again = linear_cross_entropy(hidden, weight, labels, transpose_y=transpose_y, chunk_tokens=128, backend=backend)
    assert again.item() == got.item()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("backend", ["paddle", "transformer_engine"])
def test_log_probabilities_have_gradients_of_their_own(seed, gpu, backend, frozen):
    """Of equal factors they are the loss; tests/unit/layers/test_log_probabilities.py has other factors in float32."""
    hidden, weight, labels = draw(seed, 2, 300, 128, 1000)
    x, w = (paddle.to_tensor(a).astype("bfloat16") for a in (hidden.reshape(-1, 128), weight / 8))
    loss, dx, dw = reference(x.astype("float32").numpy(), w.astype("float32").numpy(), labels)
    x.stop_gradient, w.stop_gradient = False, frozen
    got = linear_log_probabilities(x, w, paddle.to_tensor(labels.ravel()), chunk_tokens=128, backend=backend)
    factor = -1 / (labels != -100).sum()
    mean = (got * paddle.full_like(got, factor)).sum()
    mean.backward()
    assert abs(mean.item() - loss) < 1e-3 * loss
    for tensor, want in ((x, dx),) if frozen else ((x, dx), (w, dw)):
        assert tensor.grad.dtype == paddle.bfloat16 and tensor.grad.place == tensor.place
        assert relative(tensor.grad.astype("float32"), want) < 1e-2


@pytest.mark.parametrize("backend, bytes_a_logit", [("paddle", 8), ("transformer_engine", 2)])
def test_memory(seed, gpu, backend, bytes_a_logit):
    """One chunk's logits, in te as 16 bits and nothing else; and the weight's gradient, in float32, of a chunk, and
    rounded."""
    tokens, h, vocabulary, chunk_tokens = 1024, 16, 4096, 64
    paddle.seed(seed)
    hidden, weight = (paddle.randn(shape).astype("bfloat16") for shape in ([tokens, h], [h, vocabulary]))
    labels = paddle.randint(0, vocabulary, [tokens])
    hidden.stop_gradient = weight.stop_gradient = False
    linear_cross_entropy(hidden, weight, labels, chunk_tokens=tokens, backend=backend)  # libraries' workspaces
    device.reset_peak_memory()
    before = device.peak_memory()
    linear_cross_entropy(hidden, weight, labels, chunk_tokens=chunk_tokens, backend=backend).backward()
    peak = device.peak_memory() - before
    chunk, whole = chunk_tokens * vocabulary * bytes_a_logit, tokens * vocabulary * 2
    assert peak < 1.1 * chunk + (4 + 4 + 2) * h * vocabulary + 8 * tokens * h < whole / 2


@pytest.mark.parametrize("vocabulary", [1000, 1001])
@pytest.mark.parametrize("backend", ["paddle", "transformer_engine"])
def test_of_logits(seed, gpu, backend, vocabulary):
    """The identity as weight makes the reference one of logits."""
    _, logits, labels = draw(seed, 2, 300, 600, vocabulary)
    logits = paddle.to_tensor(logits * 3).astype("bfloat16")
    numbers = logits.astype("float32").numpy()
    loss, want, _ = reference(numbers, np.eye(vocabulary), labels)
    logits.stop_gradient = False
    got = parallel_cross_entropy(logits.reshape([2, 300, -1]), paddle.to_tensor(labels), backend=backend)
    (got / 3).backward()
    assert got.dtype == paddle.float32 and abs(got.item() - loss) < 1e-5 * loss
    gradient = 3 * logits.grad.astype("float32").numpy()
    assert logits.grad.dtype == paddle.bfloat16 and relative(gradient, want) < 1e-2
    assert (logits.astype("float32").numpy() == numbers).all()


@pytest.mark.parametrize("backend", ["paddle", "transformer_engine"])
def test_smoothed_labels(seed, gpu, backend):
    """Of logits, and in chunks of a head's."""
    hidden, weight, labels = draw(seed, 2, 300, 128, 1001)
    hidden, weight = (paddle.to_tensor(a).astype("bfloat16") for a in (hidden, weight / 8))
    exact = [tensor.astype("float32").numpy() for tensor in (hidden, weight)]
    hidden.stop_gradient = weight.stop_gradient = False
    loss, dx, dw = reference(*exact, labels, smoothing=0.2)
    got = linear_cross_entropy(
        hidden, weight, paddle.to_tensor(labels), chunk_tokens=128, backend=backend, smoothing=0.2
    )
    got.backward()
    assert abs(got.item() - loss) < 1e-3 * loss
    assert max(relative(t.grad.astype("float32"), want) for t, want in ((hidden, dx), (weight, dw))) < 1e-2
    logits = paddle.to_tensor(exact[0].reshape([-1, 128]) @ exact[1]).astype("bfloat16")
    loss, want, _ = reference(logits.astype("float32").numpy(), np.eye(1001), labels, smoothing=0.2)
    logits.stop_gradient = False
    got = parallel_cross_entropy(logits, paddle.to_tensor(labels.ravel()), backend=backend, smoothing=0.2)
    got.backward()
    assert abs(got.item() - loss) < 1e-5 * loss and relative(logits.grad.astype("float32"), want) < 1e-2


def test_accuracy(seed, gpu):
    _, logits, labels = draw(seed, 2, 300, 600, 1001)
    logits = paddle.to_tensor(logits).astype("bfloat16")  # with ties
    likeliest = logits.astype("float32").numpy().argmax(-1)
    labels = np.where((labels.ravel() != -100) & (np.arange(600) % 3 > 0), likeliest, labels.ravel())
    accuracy = Accuracy(ignore_index=-100)
    accuracy.add(logits, paddle.to_tensor(labels))
    assert (accuracy.right.item(), accuracy.count.item()) == ((labels == likeliest).sum(), (labels != -100).sum())


@pytest.mark.parametrize("backend, bytes_a_logit", [("paddle", 8), ("transformer_engine", 2)])
def test_memory_of_logits(seed, gpu, backend, bytes_a_logit):
    """te: the gradient, in 16 bits, and nothing else of that size."""
    paddle.seed(seed)
    logits, labels = paddle.randn([512, 4096]).astype("bfloat16"), paddle.randint(0, 4096, [512])
    logits.stop_gradient = False
    device.reset_peak_memory()
    before = device.peak_memory()
    parallel_cross_entropy(logits, labels, backend=backend).backward()
    peak = device.peak_memory() - before
    assert bytes_a_logit * logits.size <= peak < (1.02 if bytes_a_logit == 2 else 2) * bytes_a_logit * logits.size
