"""The log-probabilities of tokens from a head's input and weight, a chunk of tokens at a time.

They are the negative losses of `cross_entropy`, but each has a gradient of its own, which backward tells first. A
token's gradient is a number times that of its loss. So forward computes the input's gradient at once where the weight
is frozen, and backward multiplies its rows; else backward computes each chunk's logits again.
"""

from __future__ import annotations

from typing import Any

import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_te.distributed import TensorParallel
from paddle_te.layers.cross_entropy import CHUNK_TOKENS, ChunkedHead
from paddle_te.ops import get_ops


def linear_log_probabilities(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    transpose_y: bool = False,
    ignore_index: int = -100,
    tp: TensorParallel | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
    backend: str = "paddle",
    softcap: float = 0.0,
) -> Tensor:
    """Return log softmax(hidden · weight) of each label, float32 [n]; 0 for ignore_index.

    hidden: [n, h]. weight: [h, vocab], or with `transpose_y` [vocab, h]. labels: integers [n]. tp, backend, softcap and
    the dtypes of gradients: as for `linear_cross_entropy`. No more than `chunk_tokens` tokens' logits exist at a time.

    Raises ValueError where there is not one label for each row of hidden, or no row.
    """
    if hidden.shape[:1] != labels.shape or not labels.size:
        raise ValueError(f"labels are {labels.shape} and hidden states {hidden.shape}: each token needs one label")
    head = ChunkedHead(get_ops(backend), transpose_y, ignore_index, tp, chunk_tokens=chunk_tokens, softcap=softcap)
    return head.run(_LinearLogProbabilities, hidden, weight, labels.unsqueeze(1), _negative)


def _negative(losses: list[Tensor]) -> Tensor:
    """Return the log-probabilities [n] from the losses [n, 1] of each chunk."""
    return -paddle.concat(losses).squeeze(1)


class _LinearLogProbabilities(PyLayer):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, head: ChunkedHead) -> Tensor:
        frozen = weight.stop_gradient
        losses, dx = [], []
        for x, y in head.chunks(hidden, labels):
            loss, dlogits = head.loss(x, weight, y, train=frozen)
            losses.append(loss)
            if dlogits is not None:
                dx.append(head.dx(dlogits, weight))
        ctx.head, ctx.dx, ctx.hidden_needs = head, paddle.concat(dx) if frozen else None, not hidden.stop_gradient
        if not frozen:
            ctx.save_for_backward(hidden, weight, labels)
        weight.read_in_backward = not frozen  # as te's GEMMs say it (ops/te/program.py)
        return _negative(losses)

    @staticmethod
    def backward(ctx: Any, dlogp: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]  # Paddle takes None, too
        factor = -dlogp.astype("float32").unsqueeze(1)
        if ctx.dx is not None:
            dx, ctx.dx = ctx.dx, None
            return _scaled(dx, factor), None, None
        head, (hidden, weight, labels) = ctx.head, ctx.saved_tensor()
        rows: list[Tensor] = []
        dw: Any = None
        for (x, y), (_, scale) in zip(head.chunks(hidden, labels), head.chunks(hidden, factor), strict=True):
            _, dlogits = head.loss(x, weight, y, train=True)
            assert dlogits is not None  # with train
            if ctx.hidden_needs:
                rows.append(_scaled(head.dx(dlogits, weight), scale))
            dw = head.accumulate_wgrad(_scaled(x, scale), dlogits, dw)
        if not hasattr(weight, "main_grad"):
            dw = dw.astype(weight.dtype)
        return paddle.concat(rows) if rows else None, dw, None


def _scaled(rows: Tensor, factor: Tensor) -> Tensor:
    """Return rows times float32 factors [n, 1], in the rows' dtype."""
    return (rows.astype("float32") * factor).astype(rows.dtype)
