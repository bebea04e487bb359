"""The loss of a step, and of an evaluation, is the mean over all labels that count, wherever these are.

A criterion gives the mean over the labels of one micro-batch. Paddle and the hosts' Trainers take the mean of these
over a step's micro-batches and over the ranks, so that a label of a short answer would weigh more than one of a long
answer. Therefore each micro-batch's loss is multiplied by its share of the step's labels before backward:

    weight = labels of the micro-batch · micro-batches · ranks / labels of the step

The collator counts the labels, on the host (`CountingCollator`). `weighed` reads a step's micro-batches ahead; the only
numbers that ranks exchange are their counts, in one all-reduce a step that the host does not wait for. Where all labels
count, as in pretraining, the collator is left as it is, and nothing here does anything. `WeighedTrainer` is mixed into
the Trainer of each host.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import Tensor

from paddle_te.distributed import gather_objects
from paddle_te.host import HostClass, HostModel
from paddle_te.models.switch import take_over

COUNTS = "labels_that_count"  # a list in a batch: how many in each row, or a list of how many of each kind
WEIGHT = "loss_weight"  # a Weight in a batch, or a tuple of one for each kind
Weight = float | Tensor  # of shape []
Batch = dict[str, Any]


@dataclass(frozen=True)
class CountingCollator:
    """Make batches as `collate` does, with COUNTS. ignore_index: the label that does not count."""

    collate: Callable[[Sequence[Any]], Batch]
    ignore_index: int = -100

    def __call__(self, samples: Sequence[Any]) -> Batch:
        batch = self.collate(samples)
        counts = (batch["labels"] != self.ignore_index).sum(axis=1)
        return {**batch, COUNTS: counts.tolist()}


def weighed(batches: Iterator[Batch], micro_batches: int, ranks: int = 1, processes: int = 1) -> Iterator[Batch]:
    """Yield batches that have COUNTS, with their WEIGHT instead.

    A step's are read before its first one is yielded, and then one for each that is yielded.

    batches: an iterator. ranks: how many read batches of their own, among all processes.
    """
    ahead = list(islice(batches, micro_batches))
    while ahead:
        step, ahead = ahead, []
        counts = [np.sum(batch.pop(COUNTS), axis=0).tolist() for batch in step]
        for batch, weight in zip(step, shares(counts, ranks, processes), strict=True):
            ahead += islice(batches, 1)
            yield {**batch, WEIGHT: weight}


def shares(counts: Sequence[Any], ranks: int = 1, processes: int = 1) -> list[Any]:
    """Return the weights of a step's micro-batches, of their numbers of labels on this rank; see `weighed`.

    Of several kinds of labels each has a weight of its own.
    """
    if isinstance(counts[0], list):
        return list(zip(*(shares(kind, ranks, processes) for kind in zip(*counts, strict=True)), strict=True))
    if ranks == 1:
        return [count * len(counts) / max(sum(counts), 1) for count in counts]
    total = paddle.to_tensor(sum(counts), dtype="float32")
    dist.all_reduce(total)  # over all processes: as often as ranks read the same
    total = total.clip(min=1)
    return [count * len(counts) * processes / total for count in counts]


class WeighedLoader(HostClass):
    """A DataLoader that takes its batches through `weighed`. take_over makes one; `steps` are weighed's arguments."""

    steps: Mapping[str, int] = {}

    def taken_over(self) -> None:
        """Paddle's constructor makes all."""

    def __iter__(self) -> Iterator[Batch]:
        return weighed(iter(super().__iter__()), **self.steps)


class PipelineLoss:
    """The loss function of a pipeline's last stage, which takes its micro-batches in a row.

    Of each it gives the loss with the next one of the weights that were given; without any, as it is.
    """

    def __init__(self, criterion: Callable[..., Tensor]) -> None:
        self.criterion = criterion
        self._weights: deque[Weight] = deque()

    def begin(self, weights: Iterable[Weight]) -> None:
        """Take the weights of a step's first micro-batches. Forget those left: other stages compute no loss."""
        self._weights = deque(weights)

    def add(self, weight: Weight) -> None:
        """Take the weight of a further micro-batch."""
        self._weights.append(weight)

    def __call__(self, *arguments: Any) -> Tensor:
        loss = self.criterion(*arguments)
        return loss * self._weights.popleft() if self._weights else loss


def micro_counts(counts: Sequence[int], micro_batches: int) -> list[int]:
    """Return the numbers of labels of a batch's micro-batches, equally many rows each, from its COUNTS."""
    rows = len(counts) // micro_batches
    return [sum(counts[first : first + rows]) for first in range(0, len(counts), rows)]


@dataclass
class Evaluated:
    """The losses of an evaluation's batches on this rank, tensors [], and how many labels each is the mean of."""

    losses: list[Tensor] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def add(self, loss: Tensor, count: int) -> None:
        self.losses.append(loss)
        self.counts.append(count)

    def mean(self, processes: int) -> float:
        """Return the mean over all labels of all processes, as often as these have the same. Collective."""
        losses: Any = paddle.stack(self.losses).tolist() if self.losses else []
        mine = sum(loss * count for loss, count in zip(losses, self.counts, strict=True)), sum(self.counts)
        sums, counts = zip(*gather_objects(mine, processes), strict=True)
        return sum(sums) / max(sum(counts), 1)


class WeighedTrainer(HostClass):
    """A host's Trainer whose losses are means over all labels, once `weigh_losses` is called. Mixed into its class.

    A subclass hands each micro-batch to `take_weight` before it is trained on, and adds what it evaluates to
    `evaluated`.
    """

    pipeline_loss: PipelineLoss | None = None  # of a pipeline whose losses are weighed
    evaluated: Evaluated | None = None  # of the running or the last evaluation
    _labels_vary = False
    data_collator: Callable[[Sequence[Any]], Batch]
    _loss_weight: Weight | None = None  # of the running micro-batch

    def weigh_losses(self, ignore_index: int | None = -100, pipeline: HostModel = None) -> None:
        """Weigh losses from now on.

        ignore_index: the label that does not count; None where the collator counts. pipeline: the model where it is
        one, whose last stage computes the loss.
        """
        self._labels_vary = True
        if ignore_index is not None:
            self.data_collator = CountingCollator(self.data_collator, ignore_index)
        if pipeline is not None:
            self.pipeline_loss = pipeline._loss_fn[0] = PipelineLoss(pipeline._loss_fn[0])

    def get_train_dataloader(self) -> Iterable[Batch]:
        loader, args = super().get_train_dataloader(), self.args
        if self._labels_vary:
            take_over(loader, WeighedLoader)
            loader.steps = dict(
                micro_batches=args.gradient_accumulation_steps,
                ranks=args.dataset_world_size,
                processes=args.world_size,
            )
        return loader

    def take_weight(self, inputs: Batch, first: bool) -> None:
        """Take a micro-batch's weight out of it, to where its loss will be computed; first: of a step."""
        weight = inputs.pop(WEIGHT, None)
        if self.pipeline_loss is None:
            self._loss_weight = weight
        elif first:
            self.pipeline_loss.begin([weight])
        else:
            self.pipeline_loss.add(weight)

    def compute_loss(self, model: HostModel, inputs: Batch, return_outputs: bool = False) -> Tensor:
        """Return the host's loss, weighed in training."""
        loss = super().compute_loss(model, inputs, return_outputs)
        return loss if self._loss_weight is None else loss * self._loss_weight

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self._loss_weight = None
        return loss

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """Return the host's result, with the mean over all labels that count: its own is one over batches."""
        self.evaluated = evaluated = Evaluated()
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        if self._labels_vary:
            output.metrics[f"{metric_key_prefix}_loss"] = evaluated.mean(self.args.world_size)
        return output
