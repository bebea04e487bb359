"""Models of PaddleNLP, ours or its own, that give the log-probabilities of labels instead of a loss.

Labels are int64 [2, n] then: places among a batch's tokens in a row, and the token that each is to be followed by. Only
at these places logits are computed, in chunks (`layers.log_probabilities`), with every backend.
"""

from collections.abc import Callable
from typing import Any

from paddle import Tensor
from paddle.distributed.fleet.meta_parallel import PipelineLayer
from paddlenlp.peft import LoRAModel

from paddle_te.host import HostClass, HostConfig, HostModel
from paddle_te.hosts.paddlenlp.modeling import TELMHead, ignore_index
from paddle_te.layers.log_probabilities import linear_log_probabilities
from paddle_te.models.backend import backend_of_ours, is_native
from paddle_te.models.switch import take_over

# What of a configuration drops numbers while it trains: two forwards would not compare
DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout", "hidden_dropout")


def configure(config: HostConfig) -> None:
    """Prepare the configuration of a model that `give_log_probabilities` will change."""
    config.use_fused_linear_cross_entropy = not is_native(config)  # the head takes the labels
    for name in DROPOUTS:
        if getattr(config, name, None):
            setattr(config, name, 0.0)


def give_log_probabilities(model: HostModel) -> None:
    """Let a model, or the one in a LoRAModel, return float32 [n] for labels [2, n]."""
    base = model.model if isinstance(model, LoRAModel) else model
    own = is_native(base.config)
    if isinstance(base, PipelineLayer):
        head = _head_of_stage(base)
        if head is not None:
            take_over(head, PassingHead if own else AnswersHead)
        base._loss_fn[0] = AnswersLoss(head)
    elif own:
        take_over(base.lm_head, PassingHead)
        take_over(base.criterion, HeadsCriterion).__dict__["head"] = base.lm_head  # not as a layer of its own
    else:
        take_over(base.lm_head, AnswersHead)


def _head_of_stage(model: HostModel) -> Any:
    """Return the head of a pipeline's last stage; None on the others."""
    return next((layer for layer in model.sublayers() if type(layer).__name__.endswith("LMHeadPipe")), None)


class AnswersLoss:
    """The loss function of a pipeline, whose last stage calls it for each micro-batch, in a row.

    head: None on other stages. take: makes the loss of a micro-batch's log-probabilities, float32 [n].
    """

    take: Callable[[Tensor], Tensor]

    def __init__(self, head: Any) -> None:
        self.head = head

    def __call__(self, hidden_states: Tensor, labels: Tensor) -> Tensor:
        return self.take(self.head(hidden_states, labels=labels))


class AnswersHead(HostClass):
    """A TELMHead whose labels are places and tokens."""

    def taken_over(self) -> None:
        """Make nothing: PaddleNLP's constructor makes all."""

    def _loss(self, hidden_states: Tensor, labels: Tensor) -> Tensor:
        config = self.config
        hidden_states, tp = self._with_ranks(hidden_states)
        if tp is not None:
            hidden_states = tp.enter(hidden_states)
        rows = hidden_states.reshape([-1, config.hidden_size]).index_select(labels[0])
        return linear_log_probabilities(
            rows.astype(self.weight.dtype),  # PaddleNLP's own Mistral takes what its head gives for logits
            self.weight,
            labels[1],
            transpose_y=self.transpose_y,
            ignore_index=ignore_index(config),
            tp=tp,
            backend=backend_of_ours(config),
            softcap=self.softcap,
        )


class PassingHead(AnswersHead, TELMHead):
    """The head of PaddleNLP's own model, which hands the hidden states on, to its criterion."""

    taken_over = TELMHead.taken_over

    def forward(self, hidden_states: Tensor, tensor_parallel_output: Any = None, labels: Any = None) -> Tensor:
        return hidden_states if labels is None else self._loss(hidden_states, labels)


class HeadsCriterion(HostClass):
    """A criterion that calls the head with the labels."""

    def taken_over(self) -> None:
        """Make nothing: PaddleNLP's constructor makes all."""

    def forward(self, hidden_states: Tensor, labels: Tensor) -> Tensor:
        logp: Tensor = self.head(hidden_states, labels=labels)
        return logp
