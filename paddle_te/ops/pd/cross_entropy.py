"""Cross-entropy and its gradient."""

from __future__ import annotations

from typing import Any

import paddle.nn.functional as F
from paddle import Tensor, _C_ops
from paddle.distributed.fleet.meta_parallel import ParallelCrossEntropy

from paddle_te.ops.interface import Ranks


def cross_entropy(
    logits: Tensor, labels: Tensor, ignore_index: int, *, tp: Ranks | None = None, train: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Return (loss, dlogits) of logits [n, vocab / tp.size], in float32 inside: see `paddle_te.ops`."""
    dtype, logits = logits.dtype, logits.astype("float32")
    ops: Any = _C_ops  # Paddle's annotations lack some of these, and arguments of others
    of_one = False, True, True, ignore_index, -1  # class numbers for labels, logits, stable; the last axis
    if tp is None:
        softmax, loss = ops.cross_entropy_with_softmax_(logits, labels, *of_one)
    else:
        of_all = ignore_index, tp.group.id, tp.rank, tp.size
        softmax, loss = ops.c_softmax_with_cross_entropy(logits, labels, *of_all)
    if not train:
        return loss, None
    dloss = (loss > 0).astype("float32")
    if tp is None:
        dlogits = ops.cross_entropy_with_softmax_grad_(labels, softmax, dloss, *of_one)
    else:
        dlogits = ops.c_softmax_with_cross_entropy_grad_(softmax, labels, dloss, *of_all)
    return loss, dlogits.astype(dtype)


def parallel_cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int, *, tp: Ranks | None = None) -> Tensor:
    """Return the loss [n, 1] of logits [n, vocab / tp.size], in float32 inside: see `paddle_te.ops`."""
    logits = logits.astype("float32")
    if tp is None:
        return F.cross_entropy(logits, labels, reduction="none", ignore_index=ignore_index)
    return ParallelCrossEntropy(tp.group, ignore_index=ignore_index)(logits, labels)
