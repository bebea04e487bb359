"""Cross-entropy and its gradient."""

from __future__ import annotations

import paddle.nn.functional as F
from paddle import Tensor, _C_ops
from paddle.distributed.fleet.meta_parallel import ParallelCrossEntropy

from paddle_te.ops.interface import Ranks


def cross_entropy(
    logits: Tensor, labels: Tensor, ignore_index: int, *, tp: Ranks | None = None, train: bool = True
) -> tuple[Tensor, Tensor | None]:
    """(loss, dlogits) of logits [n, vocab / tp.size], in float32 inside: see `paddle_te.ops`."""
    dtype, logits = logits.dtype, logits.astype("float32")
    if tp is None:
        options = False, True, True, ignore_index, -1  # class numbers for labels, logits, stable; the last axis
        softmax, loss = _C_ops.cross_entropy_with_softmax_(logits, labels, *options)
    else:
        options = ignore_index, tp.group.id, tp.rank, tp.size
        softmax, loss = _C_ops.c_softmax_with_cross_entropy(logits, labels, *options)
    if not train:
        return loss, None
    dloss = (loss > 0).astype("float32")
    if tp is None:
        dlogits = _C_ops.cross_entropy_with_softmax_grad_(labels, softmax, dloss, *options)
    else:
        dlogits = _C_ops.c_softmax_with_cross_entropy_grad_(softmax, labels, dloss, *options)
    return loss, dlogits.astype(dtype)


def parallel_cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int, *, tp: Ranks | None = None) -> Tensor:
    """The loss [n, 1] of logits [n, vocab / tp.size], in float32 inside: see `paddle_te.ops`."""
    logits = logits.astype("float32")
    if tp is None:
        return F.cross_entropy(logits, labels, reduction="none", ignore_index=ignore_index)
    return ParallelCrossEntropy(tp.group, ignore_index=ignore_index)(logits, labels)
