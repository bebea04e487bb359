"""Accuracy beside NumPy; over ranks in tests/multiprocess/distributed/test_cross_entropy.py."""

import numpy as np
import paddle
import pytest

from paddle_te.layers import linear_cross_entropy
from paddle_te.layers.accuracy import Accuracy


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_counts(seed, dtype):
    """bfloat16 has ties, of which the first word is the likeliest, as NumPy's argmax and Paddle's take it."""
    generator, accuracy, right, count = np.random.default_rng(seed), Accuracy(ignore_index=-100), 0, 0
    for rows in (3, 17):
        logits = paddle.to_tensor(generator.standard_normal([2, rows, 5], "float32")).astype(dtype)
        logits[0, 0] = 1.0
        exact = logits.astype("float32").numpy()
        labels = np.where(generator.random([2, rows]) < 0.6, exact.argmax(-1), generator.integers(0, 5, [2, rows]))
        labels[1, :2] = -100
        accuracy.add(logits, paddle.to_tensor(labels))
        right, count = right + (labels == exact.argmax(-1)).sum(), count + (labels != -100).sum()
    assert 0 < right < count
    assert (accuracy.right.item(), accuracy.count.item()) == (right, count)


def test_of_a_head_in_chunks(seed):
    generator = np.random.default_rng(seed)
    hidden, weight = generator.standard_normal([2, 19, 8], "float32"), generator.standard_normal([8, 11], "float32")
    labels = (hidden @ weight).argmax(-1)
    labels[:, ::3] += 20  # no word
    accuracy = Accuracy(ignore_index=-100)
    with paddle.no_grad():
        tensors = map(paddle.to_tensor, (hidden, weight, np.minimum(labels, 10)))
        linear_cross_entropy(*tensors, chunk_tokens=5, accuracy=accuracy)
    want = (np.minimum(labels, 10) == (hidden @ weight).argmax(-1)).sum()
    assert (accuracy.right.item(), accuracy.count.item()) == (want, labels.size)
