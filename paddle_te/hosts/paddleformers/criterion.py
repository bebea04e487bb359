"""PaddleFormers' loss, in te computed from 16-bit logits."""

from typing import Any

import paddle
from paddle import Tensor

from paddle_te.distributed import TensorParallel
from paddle_te.host import HostClass
from paddle_te.models.backend import ops_of


class OurCriterion(HostClass):
    """PaddleFormers' criterion, without its float32 copy of the logits where that is not needed: in te."""

    def taken_over(self) -> None:
        """PaddleFormers' constructor makes all."""

    def forward(self, logits: Tensor, labels: Any, loss_mask: Tensor | None = None, **kwargs: Any) -> Any:
        """Return PaddleFormers' loss of logits [b, s, vocab], or [b, s, vocab / ranks], and labels [b, s].

        It is the mean over all labels that are not ignored, or over what loss_mask [b, s] says. A pipeline's
        labels may be a tuple of them and another mask, which PaddleFormers does not read there.
        """
        if isinstance(labels, tuple):
            labels, _ = labels
        if self._divides() or self.loss_type != "sft":
            return super().forward(logits, labels, loss_mask, **kwargs)
        ops, config = ops_of(self.config), self.config
        tp = TensorParallel.from_fleet(config.sequence_parallel) if self.enable_parallel_cross_entropy else None
        with paddle.amp.auto_cast(False):
            rows = logits.reshape([-1, logits.shape[-1]])
            losses = ops.parallel_cross_entropy(rows, labels.reshape([-1, 1]), self.ignored_index, tp=tp)
        return mean_of_counted(self, losses, labels, loss_mask)

    def _divides(self) -> bool:
        """Return whether the configuration asks for head and loss in one, or for a part of the tokens at a time."""
        return self.use_fused_head_and_loss_fn or self.use_subbatch or self.use_filtered_label_loss


def mean_of_counted(
    criterion: Any, losses: Tensor, labels: Tensor, loss_mask: Tensor | None = None, **kwargs: Any
) -> Any:
    """Do PaddleFormers' sft_postprocess_loss, which is NaN where no label counts; this is 0."""
    chosen = loss_mask is None or criterion.use_filtered_label_loss
    mask: Any = labels != criterion.ignored_index if chosen else loss_mask
    mask = mask.reshape([-1]).astype("float32")
    total = (losses.astype("float32").reshape([-1]) * mask).sum()
    loss = total / mask.sum().clip(min=1)
    return (loss, total.detach()) if criterion.return_tuple else loss
