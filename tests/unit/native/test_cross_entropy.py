"""The cross-entropy kernels: their own source run on the CPU against float64, and the arguments of their launch."""

import numpy as np
import pytest

from paddle_te.native import DType, cross_entropy
from paddle_te.native.cross_entropy import Sizes
from tests.unit.native.cuda_on_cpu import aligned


@pytest.fixture
def te(on_cpu, monkeypatch):
    monkeypatch.setattr(cross_entropy, "_BLOCK", 16)  # threads of the CPU
    return on_cpu


def reference(logits, labels, ignored):
    """(loss, gradient of the losses' sum) in float64."""
    x = logits.astype("float64")
    x -= x.max(1, keepdims=True)
    log_softmax = x - np.log(np.exp(x).sum(1, keepdims=True))
    counts, no_word = labels != ignored, (labels != ignored) & ((labels < 0) | (labels >= logits.shape[1]))
    rows, words = np.arange(len(labels)), np.where(counts & ~no_word, labels, 0)
    gradient = np.exp(log_softmax)
    gradient[rows, words] -= 1
    loss = np.where(counts, -log_softmax[rows, words], 0)
    loss[no_word] = np.nan
    return loss, gradient * np.where(no_word, np.nan, loss > 0)[:, None]


def copied(array):
    copy = aligned(array.shape)
    copy[:] = array
    return copy


def run(te, logits, labels, ranks=1, ignored=-100, dloss=None, in_place=True):
    """(loss, gradient), with the vocabulary over `ranks`; dloss [rows]: 1 for losses above 0 where it is None."""
    rows, columns = len(labels), logits.shape[1] // ranks
    parts = [copied(part) for part in np.split(logits, ranks, 1)]
    stats = np.full((ranks, 3, rows), np.nan, "float32")
    sizes = [Sizes(rows, columns, rank * columns, logits.shape[1], ignored, DType.FLOAT32) for rank in range(ranks)]
    for rank, (part, numbers) in enumerate(zip(parts, stats, strict=True)):
        at = part.ctypes.data, labels.ctypes.data, numbers.ctypes.data
        cross_entropy.cross_entropy_stats(te, te, *at, sizes[rank])
    greatest = stats[:, 0].max(0)
    total, picked = (stats[:, 1] * np.exp(stats[:, 0] - greatest)).sum(0), stats[:, 2].sum(0)
    whole, loss = np.stack([greatest, total, picked]).astype("float32"), np.full(rows, np.nan, "float32")
    at = labels.ctypes.data, whole.ctypes.data, loss.ctypes.data
    cross_entropy.cross_entropy_loss(te, te, *at, sizes[0])
    dloss = (loss > 0).astype("float32") if dloss is None else dloss
    gradients = parts if in_place else [aligned(part.shape) for part in parts]
    for rank, (part, gradient) in enumerate(zip(parts, gradients, strict=True)):
        at = (array.ctypes.data for array in (part, gradient, labels, whole, dloss))
        cross_entropy.cross_entropy_gradient(te, te, *at, sizes[rank])
    assert in_place or (np.concatenate(parts, 1) == logits).all()
    return loss, np.concatenate(gradients, 1)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("columns", [4, 10, 64, 300, 402])  # in vectors of 4, or one by one
def test_loss_and_gradient(te, seed, columns, ranks):
    random = np.random.default_rng(seed)
    logits = random.normal(0, 5, (7, columns)).astype("float32")
    logits[1] += 1000  # no overflow
    logits[2, : columns // 2] = -np.inf  # words that are masked
    labels = random.integers(columns // 2, columns, 7)
    labels[3:6] = -100, columns, -1  # ignored; no words
    loss, gradient = run(te, logits, labels, ranks)
    want, want_gradient = reference(logits, labels, -100)
    np.testing.assert_allclose(loss, want, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(gradient, want_gradient, rtol=2e-5, atol=1e-6)
    assert loss[3] == 0 and not gradient[3].any() and np.isnan(gradient[4:6]).all()


def test_certain_and_broken_rows(te):
    """A loss of exactly 0 has no gradient, as in PaddleNLP's criterion; NaN is not hidden."""
    logits = np.zeros((2, 8), "float32")
    logits[0, 3], logits[1, 2] = 200, np.nan
    loss, gradient = run(te, logits, np.array([3, 5]))
    assert loss[0] == 0 and not gradient[0].any()
    assert np.isnan(loss[1]) and np.isnan(gradient[1]).all()


@pytest.mark.parametrize("columns", [20, 21])
def test_gradients_of_weighted_losses(te, seed, columns):
    """Beside the logits, which stay."""
    random = np.random.default_rng(seed)
    logits, dloss = random.normal(size=(3, columns)).astype("float32"), random.normal(size=3).astype("float32")
    labels = np.array([0, 19, -100])
    loss, gradient = run(te, logits, labels, dloss=dloss, in_place=False)
    want, of_sum = reference(logits, labels, -100)
    np.testing.assert_allclose(loss, want, rtol=2e-6)
    np.testing.assert_allclose(gradient, dloss[:, None] * of_sum, rtol=2e-5, atol=1e-6)


def test_many_rows(te, seed):
    """More than a block of the losses' kernel."""
    logits = np.random.default_rng(seed).normal(size=(40, 4)).astype("float32")
    labels = np.arange(40) % 4
    np.testing.assert_allclose(run(te, logits, labels)[0], reference(logits, labels, -100)[0], rtol=2e-6)


def test_launch(fake, monkeypatch):
    asked, count = [], iter([6, 6, 10])  # of arguments, in the fake's handle
    monkeypatch.setattr(cross_entropy, "kernel", lambda *key: asked.append(key) or 0x700 + next(count))
    at, more, sizes = (0x10000, 0x20000, 0x30000), (0x40000, 0x50000), Sizes(1000, 64, 128, 256, -100, DType.BFLOAT16)
    cross_entropy.cross_entropy_stats(fake.te, fake.stream, *at, sizes)
    cross_entropy.cross_entropy_loss(fake.te, fake.stream, *at, sizes)
    cross_entropy.cross_entropy_gradient(fake.te, fake.stream, *at, *more, sizes._replace(dtype=DType.FLOAT16))
    assert fake.calls() == [
        ["cuLaunchKernel", 1000, 1, 1, 512, 1, 1, 4096, 0x5000, [*at, 1000, 64, 128], False],
        ["cuLaunchKernel", 2, 1, 1, 512, 1, 1, 0, 0x5000, [*at, 1000, 256, -100], False],
        ["cuLaunchKernel", 1000, 1, 1, 512, 1, 1, 0, 0x5000, [*at, *more, 1000, 64, 128, 256, -100], False],
    ]
    assert asked == [
        ("cross_entropy_stats_bfloat16", "cross_entropy.cu", (9, 0)),
        ("cross_entropy_loss", "cross_entropy.cu", (9, 0)),
        ("cross_entropy_gradient_float16", "cross_entropy.cu", (9, 0)),
    ]
