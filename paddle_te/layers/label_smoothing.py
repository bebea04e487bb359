"""Label smoothing: the cross-entropy against labels that are mixed with a uniform distribution over all words.

It is torch's `cross_entropy(label_smoothing=e)`. Let x be the logits, l = log(sum(exp(x))), y the label and V the
number of words. The loss of a token is

    (1 - e) (l - x_y) + e (l - mean of x)  =  (l - x_y) + e (x_y - mean of x)

The first term is each backend's own cross-entropy. This file adds the second, with the gradient e (1 at y - 1 / V).
Both are 0 for a label that does not count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_te.distributed import TensorParallel
from paddle_te.options.training import LOSS_CHUNK_TOKENS as CHUNK_TOKENS


@dataclass(frozen=True)
class Smoothing:
    """Say how labels are smoothed.

    factor: e. ignore_index: the label that does not count. tp: the `distributed.TensorParallel` ranks that share the
    vocabulary, or None.
    """

    factor: float
    ignore_index: int
    tp: TensorParallel | None = None

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return what is added to the losses, float32 [n, 1], of logits [n, vocab / tp.size] and labels [n, 1]."""
        words = self._words(logits.shape[1])
        difference = paddle.concat(
            [_difference(is_label, rows, words) for is_label, rows in self._chunks(labels, logits.shape[1], logits)]
        )
        if self.tp is not None:
            difference = self.tp.all_reduce(difference)
        return self.factor * difference * self._kept(labels)

    def gradient(self, dloss: Tensor, labels: Tensor, columns: int, dtype: Any) -> Tensor:
        """Return that of the logits [n, columns] from dloss, float32 [n, 1]."""
        scaled, words = self.factor * dloss * self._kept(labels), self._words(columns)
        parts = self._chunks(labels, columns, scaled * (1 - 1 / words), -scaled / words)
        return paddle.concat(
            [paddle.where(is_label, at_label, elsewhere).astype(dtype) for is_label, at_label, elsewhere in parts]
        )

    def _words(self, columns: int) -> int:
        return columns * (1 if self.tp is None else self.tp.size)

    def _kept(self, labels: Tensor) -> Tensor:
        return (labels != self.ignore_index).astype("float32")

    def _chunks(self, labels: Tensor, columns: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield (which of this rank's columns is a row's label, bool [rows, columns], rows of each tensor)."""
        first = 0 if self.tp is None else self.tp.rank * columns
        numbers = paddle.arange(first, first + columns, dtype="int64")
        for start in range(0, len(labels), CHUNK_TOKENS):
            rows = slice(start, start + CHUNK_TOKENS)
            yield labels[rows].astype("int64") == numbers, *(tensor[rows] for tensor in tensors)


def _difference(is_label: Tensor, logits: Tensor, words: int) -> Tensor:
    """Return a rank's part of x_y - mean of x, float32 [rows, 1]."""
    logits = logits.astype("float32")
    return (paddle.where(is_label, logits, paddle.zeros_like(logits)) - logits / words).sum(1, keepdim=True)


class AddedLoss(PyLayer):
    """Add what a Smoothing adds to the losses of logits, with gradients."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, smoothing: Smoothing) -> Tensor:
        ctx.saved = labels, smoothing, logits.shape[1], logits.dtype
        return smoothing.loss(logits, labels)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]  # Paddle takes None, too
        (labels, smoothing, columns, dtype), ctx.saved = ctx.saved, None
        return smoothing.gradient(dloss, labels, columns, dtype), None
