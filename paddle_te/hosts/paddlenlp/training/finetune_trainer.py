"""Supervised fine-tuning, of all weights or of a LoRA adapter: arguments and trainer."""

import copy
import math
from dataclasses import dataclass
from typing import Any

from paddlenlp.trainer import Trainer
from paddlenlp.transformers.configuration_utils import llmmetaclass

from paddle_te.data.course import Order, shuffled
from paddle_te.data.fillers import WithFillers
from paddle_te.distributed import gather_objects
from paddle_te.host import HostArguments, HostConfig, HostTrainer
from paddle_te.hosts.paddlenlp.modeling import counting_accuracy
from paddle_te.hosts.paddlenlp.training.arguments import (
    PreTrainingArguments,
    check_weights_folder,
    data_seed,
)
from paddle_te.hosts.paddlenlp.training.finetune_datasets import Samples
from paddle_te.hosts.paddlenlp.training.step_sampler import StepSampler
from paddle_te.hosts.paddlenlp.training.trainer import PretrainingTrainer
from paddle_te.job import FINETUNE
from paddle_te.options import check_values
from paddle_te.options.tuning import FinetuneModel
from paddle_te.records import Record, record
from paddle_te.training.throughput import ThroughputCallback, model_flops_per_token


@record
class FinetuneModelArguments(Record, FinetuneModel):
    """Which model, and what of it is trained."""

    def __post_init__(self) -> None:
        check_values(self)
        check_weights_folder(self)

    @property
    def tokenizer(self) -> str:
        """The tokenizer's name or folder, by default the model's."""
        return self.tokenizer_name_or_path or self.model_name_or_path


@dataclass
@llmmetaclass
class FinetuningArguments(PreTrainingArguments):
    """PreTrainingArguments without what belongs to pretraining only."""

    SCRIPT = FINETUNE

    def __post_init__(self) -> None:
        if (
            self.do_eval and getattr(self, "evaluation_strategy", "no") == "no"
        ):  # where the Trainer's own choice is each logging step
            self.evaluation_strategy = "steps" if self.eval_steps else "epoch"
        super().__post_init__()


def check_whole_step(samples: int, args: HostArguments) -> None:
    """Raise ValueError where the run would leave out its only step, which so many samples do not fill."""
    sizes = args.per_device_train_batch_size, args.gradient_accumulation_steps, args.dataset_world_size
    if args.dataloader_drop_last and samples < math.prod(sizes):
        raise ValueError(
            f"--dataloader_drop_last true leaves no step: a step takes {math.prod(sizes)} samples "
            f"({' × '.join(map(str, sizes))}: batch, micro-batches, ranks), and there are {samples}; leave it out"
        )


class FinetuningTrainer(PretrainingTrainer):
    """Shuffles, fills up each epoch's last step, and evaluates on the whole of dev.json."""

    evaluate = Trainer.evaluate

    def __init__(
        self, *args: Any, train_dataset: Samples | None = None, eval_dataset: Samples | None = None, **kwargs: Any
    ) -> None:
        kwargs["train_dataset"] = None if train_dataset is None else WithFillers(train_dataset)
        kwargs["eval_dataset"] = None if eval_dataset is None else WithFillers(eval_dataset)
        super().__init__(*args, labels_vary=True, **kwargs)

    def _order(self) -> Order:
        """Return another order in each pass: the same in every layout of ranks, and after a resume."""
        return shuffled(self.course.samples, data_seed(self.args))

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """Add the accuracy: the share of all labels, of all batches and ranks, that the model finds likeliest."""
        with counting_accuracy(self.model) as accuracy:
            output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        everyone = gather_objects((accuracy.right.item(), accuracy.count.item()), self.args.world_size)
        right, count = map(sum, zip(*everyone, strict=True))  # ranks with the same labels count them as often
        if count:  # none is seen where backend none has PaddleNLP's fused loss
            output.metrics[f"{metric_key_prefix}_accuracy"] = right / count
        return output

    def final_metrics(self) -> dict[str, Any]:
        """Return what evaluating the finished model gives.

        Where the last step was evaluated, and its weights stay, that is known.
        """
        known = [entry for entry in self.state.log_history or () if entry["step"] == self.state.global_step]
        return known[-1] if known and not self.args.load_best_model_at_end else self.evaluate()

    def _get_eval_sampler(self, eval_dataset: WithFillers) -> StepSampler:
        args = self.args
        ranks = dict(ranks=args.dataset_world_size, rank=args.dataset_rank)
        return StepSampler(eval_dataset, args.per_device_eval_batch_size, **ranks)


def count_real_tokens(trainer: HostTrainer, config: HostConfig, tokens: float, lora: bool, forwards: int = 0) -> None:
    """Let ThroughputCallback count the tokens of a mean sample instead of max_length.

    And LoRA's smaller backward, and so many further forwards.
    """
    config = copy.deepcopy(config)
    config.seq_length = tokens
    flops = model_flops_per_token(config, lora) + model_flops_per_token(config) * forwards / 3
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, ThroughputCallback):
            callback.seq_length, callback.flops_per_token = tokens, flops
