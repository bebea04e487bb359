"""Preference tuning of all weights or of a LoRA adapter: arguments and trainer."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import Tensor
from paddle.distributed import fleet
from paddlenlp.transformers.configuration_utils import llmmetaclass

from paddle_te import fp8
from paddle_te.distributed import gather_objects, gather_weights, row_groups
from paddle_te.host import HostArguments, HostModel
from paddle_te.hosts.paddlenlp.training.finetune_trainer import FinetuningArguments, FinetuningTrainer
from paddle_te.hosts.paddlenlp.training.preference_datasets import GOOD, LENGTHS, PRESENT
from paddle_te.hosts.paddlenlp.training.preference_pipeline import take_losses
from paddle_te.hosts.paddlenlp.training.preference_reference import (
    Inputs,
    Reference,
    SecondModel,
    log_probabilities,
    of_answers,
    of_the_model,
    score,
)
from paddle_te.job import DPO, KTO
from paddle_te.models.context_parallel import context_parallel
from paddle_te.options import check_values
from paddle_te.options.tuning import PairPreference, SinglePreference
from paddle_te.records import Record, record
from paddle_te.training.loss_weights import COUNTS
from paddle_te.training.preference_loss import Answer, Answers, KTOLoss, PairLoss


@dataclass
@llmmetaclass
class DPOArguments(FinetuningArguments):
    """FinetuningArguments of run_dpo.py."""

    SCRIPT = DPO


@dataclass
@llmmetaclass
class KTOArguments(FinetuningArguments):
    """FinetuningArguments of run_kto.py."""

    SCRIPT = KTO


def settings_of(kind: type[Any], said: Any) -> dict[str, Any]:
    """Return the options in `said` that the fields of the dataclass `kind` are called by."""
    names = {field.name for field in fields(kind)} & {field.name for field in fields(said)}
    return {name: getattr(said, name) for name in names}


@record
class DPOConfig(Record, PairPreference):
    """How pairs are compared. Names and defaults are PaddleNLP's."""

    def __post_init__(self) -> None:
        check_values(self)

    def loss(self) -> PairLoss:
        """Return the loss that is asked for."""
        return PairLoss(**settings_of(PairLoss, self), total=over_all_ranks)


@record
class KTOConfig(Record, SinglePreference):
    """How single answers are judged. Names and defaults are PaddleNLP's."""

    def __post_init__(self) -> None:
        check_values(self)

    def loss(self) -> KTOLoss:
        """Return the loss that is asked for."""
        return KTOLoss(**settings_of(KTOLoss, self), total=over_all_ranks)


def over_all_ranks(tensor: Tensor) -> Tensor:
    """Return the sum over all processes, in which the ranks that read the same count as often as each other.

    In a pipeline only those of the last stage call it.
    """
    ranks = fleet.get_hybrid_communicate_group() if dist.get_world_size() > 1 else None
    if ranks is not None and ranks.get_pipe_parallel_world_size() > 1:
        for group in row_groups() or ():
            dist.all_reduce(tensor, group=group)
    elif dist.get_world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def place_in_sequences(args: HostArguments) -> tuple[int, int]:
    """Return (this rank's place, how many) of the ranks that share sequences."""
    shared = context_parallel(args)
    return (shared.rank, shared.size) if shared else (0, 1)


class Sums:
    """Hold what the micro-batches since the last log line add up to, on this rank, without waiting for the device."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._values: Tensor | None = None

    def add(self, sums: Mapping[str, Tensor]) -> None:
        """Add {name: float32 []}."""
        values = paddle.stack(list(sums.values()))
        self._names, self._values = tuple(sums), values if self._values is None else self._values + values

    def take(self, args: HostArguments) -> dict[str, float]:
        """Return {name: the sum over all ranks with other data}, {} where there was no micro-batch. Begins anew.

        In a pipeline the last stage's ranks have sums.
        """
        mine = None if self._values is None else (self._names, self._values.tolist())
        everyone = [each for each in gather_objects(mine, args.world_size) if each is not None]
        alike = args.world_size // max(args.dataset_world_size, 1)  # ranks that read the same
        alike //= max(args.pipeline_parallel_degree, 1)
        self._values = None
        totals = [sum(each) / alike for each in zip(*(values for _, values in everyone), strict=True)]
        return dict(zip(everyone[0][0], totals, strict=True)) if everyone else {}


class PreferenceTrainer(FinetuningTrainer):
    """Compare the answers of a batch with the reference's.

    loss: of `training.preference_loss`. reference: of `preference_reference`. update_steps: of SecondModel, after how
    many steps it takes the trained weights; 0: never.
    """

    def __init__(
        self, *args: Any, loss: PairLoss | KTOLoss, reference: Reference, update_steps: int = 0, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.loss, self.reference, self.update_steps = loss, reference, update_steps
        self._renewals = 0  # of the reference that are due, as this process has made them
        self._sums = Sums()
        self._held: list[tuple[Inputs, Any]] = []  # a pipeline's micro-batches of the running step, with their weights

    def _weigh_losses(self) -> None:
        self.weigh_losses(ignore_index=None)

    def _own_tokens(self, batch: Inputs) -> Inputs:
        """Leave the labels as they are, places among this rank's tokens."""
        labels = {"labels": batch["labels"]}
        return super()._own_tokens({name: value for name, value in batch.items() if name != "labels"}) | labels

    def training_step(self, model: HostModel, inputs: dict[str, Any], step_control: int = 0) -> Tensor:
        """Do one micro-batch; before the first one of a step renew the reference, and end the step before."""
        if step_control == 0:
            self._share_scales()
            self._renew_reference()
        return super().training_step(model, inputs, step_control)

    def _renew_reference(self) -> None:
        """Give the reference the trained weights where that is due: also behind steps whose batches are left out."""
        due = self.state.global_step // self.update_steps if self.update_steps else 0
        if due > self._renewals:
            assert isinstance(self.reference, SecondModel)  # a rule of job.rules
            gather_weights(self.optimizer)
            self.reference.take_weights(self.model)
            self._renewals = due

    @staticmethod
    def _share_scales() -> None:
        """Update fp8's scales before the reference computes, not after it, when the policy's first forward would.

        Where both compute with the same weights, their roundings then cancel out; otherwise noise drowns the rewards.
        """
        fp8.new_step()

    def compute_loss(self, model: HostModel, inputs: dict[str, Any], return_outputs: bool = False) -> Any:
        """Return the micro-batch's share of the step's loss, a mean over all pairs of all ranks."""
        reference = self.reference.log_probabilities(model, [inputs])[0]
        loss = self._compare(inputs, log_probabilities(model, inputs), reference, self._loss_weight)
        return (loss, (loss,)) if return_outputs else loss

    def _compare(self, inputs: Inputs, policy: tuple[Tensor, Tensor], reference: Tensor, weights: Any) -> Tensor:
        """Return the loss of a micro-batch's answers; keep what the log wants of them.

        policy: log-probabilities [m] of the first and the second answers. weights: of the loss's parts, or None.
        """
        tokens = inputs[LENGTHS].unbind(0)
        first, second = (Answer(*each) for each in zip(policy, reference.unbind(0), tokens, strict=True))
        with paddle.amp.auto_cast(False):
            outcome = self.loss(Answers(first, second, inputs[PRESENT], inputs[GOOD]))
            self._sums.add(outcome.sums)
            return sum(part * weight for part, weight in zip(outcome.parts, weights or (1, 1), strict=True))

    def training_pipeline_step(self, model: HostModel, inputs: Inputs) -> Tensor:
        """Hold a micro-batch; do the step when its last one is there. The last stage computes the losses in a row."""
        self._held.append((inputs, self._loss_weight))
        if len(self._held) == self.args.gradient_accumulation_steps:
            held, self._held = self._held, []
            self._share_scales()
            with self.autocast_smart_context_manager():
                references = self.reference.log_probabilities(model, [inputs for inputs, _ in held])
            left = iter(zip(held, references, strict=False))

            def take(tokens: Tensor) -> Tensor:
                (batch, weights), reference = next(left)
                return self._compare(batch, of_answers(batch, tokens), reference, weights)

            take_losses(model, take)
        return super().training_pipeline_step(model, of_the_model(inputs))

    def prediction_pipeline_step(
        self, model: HostModel, inputs: Inputs, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None, None]:
        """Return the loss of a batch, on the last stage; 0 on others."""
        loss = paddle.zeros([])
        with paddle.no_grad(), self.autocast_smart_context_manager():
            references = self.reference.log_probabilities(model, [inputs])
            for policy, reference in zip(score(model, [inputs]), references, strict=False):
                loss = self._compare(inputs, (policy[0], policy[1]), reference, None)
        return loss, None, None

    def prediction_step(self, model: HostModel, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        """Return the loss of a batch; that of the evaluation is made of `_sums`."""
        inputs.pop(COUNTS, None)
        return super().prediction_step(model, inputs, *args, **kwargs)

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """Add the loss and the rewards over all pairs of all ranks."""
        training, self._sums = self._sums, Sums()
        try:
            output = super(FinetuningTrainer, self).evaluation_loop(
                *args, metric_key_prefix=metric_key_prefix, **kwargs
            )
            found = self._metrics()
        finally:
            self._sums = training
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in found.items()})
        return output

    def log(self, logs: dict[str, Any], **kwargs: Any) -> None:
        """Add the rewards since the last line."""
        if "loss" in logs:
            logs |= {name: value for name, value in self._metrics().items() if name != "loss"}
        super().log(logs, **kwargs)

    def _metrics(self) -> dict[str, float]:
        sums = self._sums.take(self.args)
        return self.loss.metrics(sums) if sums else {}
