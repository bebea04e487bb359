"""PaddleFormers' loss, in te computed from 16-bit logits."""

import paddle
from paddleformers.nn.criterion.sft_loss import sft_postprocess_loss

from paddle_te.distributed import TensorParallel
from paddle_te.ops import get_ops


class OurCriterion:
    """PaddleFormers' criterion, without its float32 copy of the logits where that is not needed: in te."""

    def taken_over(self):
        """PaddleFormers' constructor makes all."""

    def forward(self, logits, labels, loss_mask=None, **kwargs):
        """The loss of logits [b, s, vocab], or [b, s, vocab / ranks], and labels [b, s], as PaddleFormers': the mean
        over all labels that are not ignored, or what loss_mask [b, s] says. A pipeline's labels may be a tuple of them
        and another mask, which PaddleFormers does not read there."""
        if isinstance(labels, tuple):
            labels, _ = labels
        if self._divides() or self.loss_type != "sft":
            return super().forward(logits, labels, loss_mask, **kwargs)
        ops, config = get_ops(self.config.transformer_engine_backend), self.config
        tp = TensorParallel.from_fleet(config.sequence_parallel) if self.enable_parallel_cross_entropy else None
        with paddle.amp.auto_cast(False):
            rows = logits.reshape([-1, logits.shape[-1]])
            losses = ops.parallel_cross_entropy(rows, labels.reshape([-1, 1]), self.ignored_index, tp=tp)
        return sft_postprocess_loss(self, losses, labels, loss_mask)

    def _divides(self):
        """Whether the configuration asks for the head and the loss in one, for parts of the tokens, or for a part."""
        return self.use_fused_head_and_loss_fn or self.use_subbatch or self.use_filtered_label_loss
