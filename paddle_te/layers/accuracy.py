"""Count the labels that a language model finds, on the device: the metric "accuracy" of PaddleNLP's fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator

import paddle
import paddle.distributed as dist
from paddle import Tensor

from paddle_te.distributed import TensorParallel
from paddle_te.options.training import LOSS_CHUNK_TOKENS as CHUNK_TOKENS


class Accuracy:
    """Count what logits of an evaluation find: `right` of `count` labels, tensors [] that the host does not wait for.

    PaddleNLP gathers all predictions on the host, which takes the memory of all labels.
    """

    def __init__(self, ignore_index: int) -> None:
        self.ignore_index = ignore_index
        self.right = self.count = paddle.zeros([], "int64")

    @paddle.no_grad()
    def add(self, logits: Tensor, labels: Tensor, tp: TensorParallel | None = None) -> None:
        """Count what a batch finds.

        logits: [..., vocab / tp.size], with all ranks' columns in the `distributed.TensorParallel` tp, None: on one
        rank. labels: integers of logits' leading shape, or with one more axis of size 1.
        """
        logits, labels = logits.reshape([-1, logits.shape[-1]]), labels.reshape([-1])
        kept = labels != self.ignore_index
        self.right = self.right + (kept & (_likeliest(logits, tp) == labels)).astype("int64").sum()
        self.count = self.count + kept.astype("int64").sum()


def _likeliest(logits: Tensor, tp: TensorParallel | None) -> Tensor:
    """Return the word with the greatest of logits [n, columns], the first of equal ones, int64 [n]."""
    greatest_of = [(chunk.argmax(-1), chunk.max(-1)) for chunk in _chunks(logits)]
    words, mine = (paddle.concat(parts) for parts in zip(*greatest_of, strict=True))
    if tp is None:
        return words
    greatest = mine.clone()
    dist.all_reduce(greatest, op=dist.ReduceOp.MAX, group=tp.group)
    columns = logits.shape[-1]
    first = (tp.size * columns - words - tp.rank * columns).astype("float32")  # the greater, the further to the left
    first = paddle.where(mine == greatest, first, paddle.zeros_like(first))
    dist.all_reduce(first, op=dist.ReduceOp.MAX, group=tp.group)
    return tp.size * columns - first.astype("int64")


def _chunks(logits: Tensor) -> Iterator[Tensor]:
    """Yield float32 chunks, as Paddle has no kernels for 16 bits on a CPU; one exists at a time."""
    for start in range(0, len(logits), CHUNK_TOKENS):
        yield logits[start : start + CHUNK_TOKENS].astype("float32")
