"""One rank of two that share the vocabulary of the losses; started by test_cross_entropy.py.

Each draws the same numbers, keeps its half of the weight or logits, and compares with float64 NumPy; te's kernels
are emulated. "OK" at the end.
"""

import sys

import numpy as np
import paddle
from paddle.distributed import fleet

from paddle_te.distributed import TensorParallel
from paddle_te.layers import linear_cross_entropy, parallel_cross_entropy
from paddle_te.layers.accuracy import Accuracy
from tests import emulated_te
from tests.cross_entropy_cases import draw, reference
from tests.te_weights import relative

TOKENS, VOCAB = 38, 42


def start():
    paddle.set_device("nvgpu")
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = dict(dp_degree=1, mp_degree=2, pp_degree=1)
    fleet.init(is_collective=True, strategy=strategy)


def check(seed, dtype, tolerance, transpose_y, sequence_parallel, all_ignored=False, backend="paddle"):
    tp = TensorParallel.from_fleet(sequence_parallel)
    hidden, weight, labels = draw(seed, 1, TOKENS, 16, VOCAB)
    hidden, labels = hidden[0], np.full_like(labels[0], -100) if all_ignored else labels[0]
    if dtype == "bfloat16":  # what the numbers are after rounding
        hidden, weight = (paddle.to_tensor(a).astype(dtype).astype("float32").numpy() for a in (hidden, weight))
    loss, dx, dw = reference(hidden, weight, labels)
    half = slice(tp.rank * VOCAB // 2, (tp.rank + 1) * VOCAB // 2)
    rows = slice(tp.rank * TOKENS // 2, (tp.rank + 1) * TOKENS // 2) if sequence_parallel else slice(None)
    x = paddle.to_tensor(hidden[rows]).astype(dtype)
    w = paddle.to_tensor(weight[:, half].T.copy() if transpose_y else weight[:, half].copy()).astype(dtype)
    x.stop_gradient = w.stop_gradient = False
    y = paddle.to_tensor(labels)
    got = linear_cross_entropy(tp.enter(x), w, y, transpose_y=transpose_y, tp=tp, chunk_tokens=11, backend=backend)
    (got / 3).backward()
    assert x.grad.dtype == w.grad.dtype == x.dtype and got.dtype == paddle.float32
    mine = w.grad.astype("float32").numpy()
    if all_ignored:
        assert got.item() == 0 and not mine.any() and not x.grad.astype("float32").numpy().any()
        return
    errors = (
        abs(got.item() - loss) / loss,
        relative(3 * x.grad.astype("float32").numpy(), dx[rows]),
        relative(3 * (mine.T if transpose_y else mine), dw[:, half]),
    )
    assert max(errors) < tolerance, (dtype, transpose_y, sequence_parallel, errors)
    # rounding is as often up as down: a factor that was rounded would move all gradients alike
    slope = 1 if dtype == "float32" else (3 * x.grad.astype("float32").numpy() * dx[rows]).sum() / (dx[rows] ** 2).sum()
    assert abs(slope - 1) < tolerance / 5, slope


def check_of_logits(seed, dtype, tolerance, backend):
    tp = TensorParallel.from_fleet()
    _, logits, labels = draw(seed, 1, TOKENS, TOKENS, VOCAB)
    logits = paddle.to_tensor(logits).astype(dtype)
    loss, want, _ = reference(logits.astype("float32").numpy(), np.eye(VOCAB), labels)
    half = slice(tp.rank * VOCAB // 2, (tp.rank + 1) * VOCAB // 2)
    mine = logits[:, half].contiguous()
    mine.stop_gradient = False
    got = parallel_cross_entropy(mine, paddle.to_tensor(labels[0]), tp=tp, backend=backend)
    (got / 3).backward()
    errors = abs(got.item() - loss) / loss, relative(3 * mine.grad.astype("float32").numpy(), want[:, half])
    assert mine.grad.dtype == mine.dtype and max(errors) < tolerance, (dtype, backend, errors)


def check_smoothed(seed, dtype, tolerance, backend):
    """Of logits, and in chunks of a head's."""
    tp = TensorParallel.from_fleet()
    hidden, weight, labels = draw(seed, 1, TOKENS, 16, VOCAB)
    logits = paddle.to_tensor(hidden[0] @ weight).astype(dtype)
    half = slice(tp.rank * VOCAB // 2, (tp.rank + 1) * VOCAB // 2)
    mine, y = logits[:, half].contiguous(), paddle.to_tensor(labels[0])
    mine.stop_gradient = False
    loss, want, _ = reference(logits.astype("float32").numpy(), np.eye(VOCAB), labels[0], smoothing=0.2)
    got = parallel_cross_entropy(mine, y, tp=tp, backend=backend, smoothing=0.2)
    got.backward()
    errors = [abs(got.item() - loss) / loss, relative(mine.grad.astype("float32").numpy(), want[:, half])]
    if dtype == "float32":
        x, w = (paddle.to_tensor(array) for array in (hidden[0], weight[:, half].copy()))
        x.stop_gradient = w.stop_gradient = False
        loss, dx, dw = reference(hidden[0], weight, labels[0], smoothing=0.2)
        got = linear_cross_entropy(tp.enter(x), w, y, tp=tp, chunk_tokens=11, smoothing=0.2)
        got.backward()
        errors += [abs(got.item() - loss) / loss, relative(x.grad.numpy(), dx), relative(w.grad.numpy(), dw[:, half])]
    assert max(errors) < tolerance, (dtype, backend, errors)


def check_accuracy(seed, dtype):
    """Words that are equally likely on both ranks: the first one is the likeliest."""
    tp, accuracy = TensorParallel.from_fleet(), Accuracy(ignore_index=-100)
    _, logits, labels = draw(seed, 1, TOKENS, TOKENS, VOCAB)
    logits[:9, [3, VOCAB // 2 + 1]] = 9.0
    logits = paddle.to_tensor(logits).astype(dtype)
    likeliest = logits.astype("float32").numpy().argmax(-1)
    labels = np.where((labels[0] != -100) & (np.arange(TOKENS) % 3 > 0), likeliest, labels[0])
    half = slice(tp.rank * VOCAB // 2, (tp.rank + 1) * VOCAB // 2)
    accuracy.add(logits[:, half].contiguous(), paddle.to_tensor(labels), tp)
    want = (labels == likeliest).sum(), (labels != -100).sum()
    assert 0 < want[0] < want[1] and (accuracy.right.item(), accuracy.count.item()) == want, (want, accuracy)


def main():
    start()
    emulated_te.install()
    seed = int(sys.argv[1])
    for transpose_y in (False, True):
        for sequence_parallel in (False, True):
            check(seed, "float32", 4e-6, transpose_y, sequence_parallel)
            for backend in ("paddle", "transformer_engine"):
                check(seed, "bfloat16", 1e-2, transpose_y, sequence_parallel, backend=backend)
    for backend in ("paddle", "transformer_engine"):
        check_of_logits(seed, "float32", 4e-6, backend)
        check_of_logits(seed, "bfloat16", 1e-2, backend)
        check_smoothed(seed, "float32", 1e-5, backend)
        check_smoothed(seed, "bfloat16", 1e-2, backend)
    for dtype in ("float32", "bfloat16"):
        check_accuracy(seed, dtype)
    check(seed, "float32", 0, False, False, all_ignored=True)
    check(seed, "bfloat16", 0, False, False, all_ignored=True, backend="transformer_engine")
    print("OK")


main()
