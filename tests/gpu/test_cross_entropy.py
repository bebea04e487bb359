"""linear_cross_entropy in bf16 on the GPU, with pd's operations and with te's kernels."""

import paddle
import pytest

from paddle_te.layers import linear_cross_entropy
from tests.layers.test_cross_entropy import draw, reference
from tests.llama.native import relative


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
