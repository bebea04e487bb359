"""A language model's loss, from its logits, or from its head's input and weight in chunks of tokens.

The chunks are Liger-Kernel's FusedLinearCrossEntropy (Hsu et al., 2024, arXiv 2410.10989). Forward computes the
gradients of each chunk at once, so only one chunk's logits exist at a time. That costs nothing: the loss ends the
graph, and its gradients are known except for one factor.

PaddleNLP 3.0.0b4's FusedHeadAndCrossEntropy does not do: its test for hidden's gradient is inverted
(`if hidden_states.stop_gradient`), and one cross-entropy takes a dozen float32 passes over each chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_te.distributed import ContextParallel, TensorParallel
from paddle_te.layers.accuracy import Accuracy
from paddle_te.layers.label_smoothing import AddedLoss, Smoothing
from paddle_te.ops import get_ops
from paddle_te.ops.activations import soft_cap
from paddle_te.ops.interface import Ops
from paddle_te.options.training import LOSS_CHUNK_TOKENS as CHUNK_TOKENS


def parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    tp: TensorParallel | None = None,
    cp: ContextParallel | None = None,
    backend: str = "paddle",
    smoothing: float = 0.0,
) -> Tensor:
    """Return the mean cross-entropy, in float32, of all tokens whose label is not ignore_index; 0 if there are none.

    PaddleNLP's criteria count the tokens whose loss is above 0, and so leave out tokens of which a model is sure.

    logits: [..., vocab / tp.size], this rank's columns.
    labels: integers of logits' leading shape.
    tp: the `distributed.TensorParallel` whose ranks share the columns; None: this rank has all.
    cp: the `distributed.ContextParallel` whose ranks share the sequences. Each rank gets the mean over all their
        tokens, and the gradient of its own tokens. Sum the gradients of weights over these ranks.
    backend: te reads the 16-bit logits as they are, pd a float32 copy.
    smoothing: the share of each label that is spread over all words (`label_smoothing`).

    Raises ValueError unless each row of logits has one label, and for no rows.
    """
    logits, labels = _rows(logits, labels, "logits")
    with paddle.amp.auto_cast(False):
        losses = get_ops(backend).parallel_cross_entropy(logits, labels, ignore_index, tp=tp)
        if smoothing:
            losses = losses + AddedLoss.apply(logits, labels, Smoothing(smoothing, ignore_index, tp))
        return _mean([losses], labels, ignore_index, cp)[0]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    transpose_y: bool = False,
    ignore_index: int = -100,
    tp: TensorParallel | None = None,
    cp: ContextParallel | None = None,
    chunk_tokens: int | None = None,
    backend: str = "paddle",
    accuracy: Accuracy | None = None,
    smoothing: float = 0.0,
    softcap: float = 0.0,
) -> Tensor:
    """Return `parallel_cross_entropy` of the logits hidden · weight.

    hidden: [..., h]. weight: [h, vocab], or with `transpose_y` [vocab, h] (tied embeddings). labels: integers of
    hidden's leading shape. Gradients have their tensor's dtype, but float32 for a weight with `main_grad`; the weight's
    is summed in float32. Without gradients to compute only the loss is.
    tp: the `distributed.TensorParallel` ranks that share the vocabulary, each with its vocab / tp.size columns; then
    hidden is what `tp.enter` returned. cp: as for `parallel_cross_entropy`.
    chunk_tokens: the most tokens whose logits exist at a time; CHUNK_TOKENS by default.
    backend: whose cross-entropy and whose sum of the weight's gradient; te's take the 16-bit logits as they are.
    accuracy: an `Accuracy` to which the labels are added. smoothing: as for `parallel_cross_entropy`.
    softcap: the cap of the logits (`ops.activations.soft_cap`), 0 for none.

    Raises ValueError where there is not one label for each row of hidden, or no row.
    """
    hidden, labels = _rows(hidden, labels, "hidden states")
    smoothed = Smoothing(smoothing, ignore_index, tp) if smoothing else None
    head = ChunkedHead(
        get_ops(backend),
        transpose_y,
        ignore_index,
        tp,
        cp=cp,
        chunk_tokens=chunk_tokens or CHUNK_TOKENS,
        accuracy=accuracy,
        smoothing=smoothed,
        softcap=softcap,
    )
    return head.run(_LinearCrossEntropy, hidden, weight, labels, lambda losses: head.mean(losses, labels)[0])


def _rows(tensor: Tensor, labels: Tensor, what: str) -> tuple[Tensor, Tensor]:
    """Return [n, columns] and [n, 1] of [..., columns] and labels [...]."""
    if tensor.shape[:-1] != labels.shape or not labels.size:
        raise ValueError(f"labels are {labels.shape} and {what} {tensor.shape}: each token needs one label")
    return tensor.reshape([-1, tensor.shape[-1]]), labels.reshape([-1, 1])


def _mean(
    token_losses: Sequence[Tensor], labels: Tensor, ignore_index: int, cp: ContextParallel | None
) -> tuple[Tensor, Tensor]:
    """Return (loss, factor of its gradient), the mean over the tokens of all ranks of cp.

    token_losses: [n, 1] of each chunk, 0 where a label does not count. The host does not wait for the count.
    """
    total = paddle.concat(token_losses).sum()
    count = (labels != ignore_index).astype("float32").sum()
    if cp is not None:
        sums = cp.all_reduce(paddle.stack([total.detach(), count]))
        total, count = total + (sums[0] - total.detach()), sums[1]
    factor = 1 / count.clip(min=1)
    return total * factor, factor


@dataclass(frozen=True)
class ChunkedHead:
    """Multiply hidden states with a head's weight and compute their losses, a chunk of tokens at a time.

    ops: the backend's. smoothing: None for none. The other fields are parameters of `linear_cross_entropy`.
    """

    ops: Ops
    transpose_y: bool
    ignore_index: int
    tp: TensorParallel | None
    cp: ContextParallel | None = None
    chunk_tokens: int = CHUNK_TOKENS
    accuracy: Accuracy | None = None
    smoothing: Smoothing | None = None
    softcap: float = 0.0

    def run(
        self,
        function: type[PyLayer],
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        reduce: Callable[[list[Tensor]], Tensor],
    ) -> Tensor:
        """Apply the function outside of autocast; without gradients to compute, `reduce` the losses of the chunks."""
        if paddle.is_autocast_enabled():  # what it would do for the head's product; the loss is none of its business
            hidden, weight = (tensor.astype(paddle.get_autocast_dtype()) for tensor in (hidden, weight))
        with paddle.amp.auto_cast(False):
            if paddle.is_grad_enabled() and not (hidden.stop_gradient and weight.stop_gradient):
                return function.apply(hidden, weight, labels, self)
            return reduce([self.loss(x, weight, y, train=False)[0] for x, y in self.chunks(hidden, labels)])

    def chunks(self, hidden: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield views of equally many rows, but for the last."""
        tokens = hidden.shape[0]
        size = -(-tokens // -(-tokens // self.chunk_tokens))
        for start in range(0, tokens, size):
            yield hidden[start : start + size], labels[start : start + size]

    def loss(self, x: Tensor, weight: Tensor, labels: Tensor, train: bool) -> tuple[Tensor, Tensor | None]:
        """Return (loss [n, 1] in float32, with `train` the gradient of the logits of the losses' sum) of x [n, h]."""
        logits = soft_cap(paddle.matmul(x, weight, transpose_y=self.transpose_y), self.softcap)
        # before the loss, which may overwrite logits
        slope = 1 - (logits / self.softcap).square() if self.softcap and train else None
        loss, dlogits = self._loss_of(logits, labels, train)
        return loss, dlogits if dlogits is None or slope is None else dlogits * slope

    def _loss_of(self, logits: Tensor, labels: Tensor, train: bool) -> tuple[Tensor, Tensor | None]:
        """Do what `loss` does with logits, which are lost."""
        if self.accuracy is not None:
            self.accuracy.add(logits, labels, self.tp)  # before the loss, which may overwrite them
        if self.smoothing is None:
            return self.ops.cross_entropy(logits, labels, self.ignore_index, tp=self.tp, train=train)
        columns, dtype, more = logits.shape[1], logits.dtype, self.smoothing.loss(logits, labels)
        loss, dlogits = self.ops.cross_entropy(logits, labels, self.ignore_index, tp=self.tp, train=train)
        if dlogits is not None:
            gradient = self.smoothing.gradient(paddle.ones_like(loss), labels, columns, "float32")
            dlogits = (dlogits.astype("float32") + gradient).astype(dtype)
        return loss + more, dlogits

    def mean(self, losses: Sequence[Tensor], labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return (the mean of the chunks' losses, the factor of its gradient)."""
        return _mean(losses, labels, self.ignore_index, self.cp)

    def dx(self, dlogits: Tensor, weight: Tensor) -> Tensor:
        return paddle.matmul(dlogits, weight, transpose_y=not self.transpose_y)

    def accumulate_wgrad(self, x: Tensor, dlogits: Tensor, dw: Tensor | None) -> Tensor:
        """dw, None at first, with this chunk's gradient of the weight added."""
        return self.ops.accumulate_wgrad(*((dlogits, x) if self.transpose_y else (x, dlogits)), dw)


class _LinearCrossEntropy(PyLayer):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, head: ChunkedHead) -> Tensor:
        losses, dx, dw = [], [], None
        for x, y in head.chunks(hidden, labels):
            loss, dlogits = head.loss(x, weight, y, train=True)
            losses.append(loss)
            assert dlogits is not None  # with train
            if not hidden.stop_gradient:
                dx.append(head.dx(dlogits, weight))
            if not weight.stop_gradient:
                dw = head.accumulate_wgrad(x, dlogits, dw)
            del dlogits
        mean, factor = head.mean(losses, labels)
        dw_dtype = paddle.float32 if hasattr(weight, "main_grad") else weight.dtype
        ctx.saved = paddle.concat(dx) if dx else None, hidden.dtype, dw, dw_dtype, factor
        weight.read_in_backward = False  # as te's GEMMs leave it (ops/te/program.py)
        return mean

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]  # Paddle takes None, too
        (dx, dx_dtype, dw, dw_dtype, factor), ctx.saved = ctx.saved, None
        factor = factor * dloss  # in float32: rounded to bfloat16 it would be off for all gradients alike
        if dx is not None:
            dx = (dx.astype("float32") * factor).astype(dx_dtype)
        if dw is not None:
            dw = dw.multiply_(factor).astype(dw_dtype)
        return dx, dw, None
