"""Cross-entropy and its gradient, by kernels of our own."""

from __future__ import annotations

from typing import Any

import paddle
import paddle.distributed as dist
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_te.native.cross_entropy import Sizes, cross_entropy_gradient, cross_entropy_loss, cross_entropy_stats
from paddle_te.ops.interface import Ranks
from paddle_te.ops.te import runtime
from paddle_te.ops.te.runtime import dense, dtype_code


def cross_entropy(
    logits: Tensor, labels: Tensor, ignore_index: int, *, tp: Ranks | None = None, train: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Return (loss, dlogits) of logits [n, vocab / tp.size], which dlogits overwrites: see `paddle_te.ops`."""
    losses = _Losses(logits, labels, ignore_index, tp)
    if not train:
        return losses.loss, None
    return losses.loss, losses.gradient(logits, (losses.loss > 0).astype("float32"), out=logits)


def parallel_cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int, *, tp: Ranks | None = None) -> Tensor:
    """Return the loss [n, 1] of logits [n, vocab / tp.size], with gradients: see `paddle_te.ops`."""
    return _CrossEntropy.apply(dense(logits), labels, ignore_index, tp)


class _CrossEntropy(PyLayer):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ignore_index: int, tp: Ranks | None) -> Tensor:
        losses = _Losses(logits, labels, ignore_index, tp)
        ctx.saved = logits, losses
        return losses.loss.detach()  # itself would keep ctx alive

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]  # Paddle takes None, too
        (logits, losses), ctx.saved = ctx.saved, None  # Paddle keeps the ctx of a backward that fails
        return losses.gradient(logits, dense(dloss)), None


class _Losses:
    """Compute the loss of rows of logits, float32 [n, 1]."""

    def __init__(self, logits: Tensor, labels: Tensor, ignore_index: int, tp: Ranks | None) -> None:
        rt, code = runtime.current(), dtype_code("logits", logits, runtime.DTYPES)
        (rows, columns), rank, size = logits.shape, *((0, 1) if tp is None else (tp.rank, tp.size))
        self._labels, stats = dense(labels.astype("int64")), rt.empty([3, rows], paddle.float32)
        self._sizes = Sizes(rows, columns, rank * columns, size * columns, ignore_index, code)
        at = logits.data_ptr(), self._labels.data_ptr(), stats.data_ptr()
        cross_entropy_stats(rt.te, rt.stream, *at, self._sizes)
        self._stats = stats if tp is None else _of_all_ranks(stats, tp)
        self.loss = rt.empty([rows, 1], paddle.float32)
        at = self._labels.data_ptr(), self._stats.data_ptr(), self.loss.data_ptr()
        cross_entropy_loss(rt.te, rt.stream, *at, self._sizes)

    def gradient(self, logits: Tensor, dloss: Tensor, out: Tensor | None = None) -> Tensor:
        """Return that of the logits from dloss, float32 [n, 1]; in `out`, which may be the logits, or a new tensor."""
        rt = runtime.current()
        out = rt.empty(logits.shape, logits.dtype) if out is None else out
        at = logits.data_ptr(), out.data_ptr(), self._labels.data_ptr(), self._stats.data_ptr(), dloss.data_ptr()
        cross_entropy_gradient(rt.te, rt.stream, *at, self._sizes)
        return out


def _of_all_ranks(stats: Tensor, tp: Ranks) -> Tensor:
    """Make [greatest, sum of exp(x - greatest), label's logit] of the whole vocabulary, from each rank's columns."""
    mine, rest = stats[0], stats[1:]
    greatest = mine.clone()
    dist.all_reduce(greatest, op=dist.ReduceOp.MAX, group=tp.group)
    rest = paddle.stack([rest[0] * paddle.exp(mine - greatest), rest[1]])
    return paddle.concat([greatest.unsqueeze(0), tp.all_reduce(rest)])
