"""The samples of a rank's micro-batches for Paddle's DataLoader, and how many a run has read when it resumes."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from paddlenlp.utils.batch_sampler import DistributedBatchSampler

from paddle_te import manifest
from paddle_te.data.course import Course, Order, Share, in_order, micro_batches
from paddle_te.host import HostArguments
from paddle_te.weights.contents import read_state


def share_of(args: HostArguments) -> Share:
    """Return this rank's Share of a training step, of PaddleNLP's TrainingArguments."""
    return Share(
        args.per_device_train_batch_size,
        args.gradient_accumulation_steps,
        args.dataset_world_size,
        getattr(args, "dataset_rank", 0),
    )


class Beginning(NamedTuple):
    """first: step. consumed: samples used up until then."""

    first: int = 0
    consumed: int = 0


def beginning(checkpoint: str | Path | None, args: HostArguments) -> Beginning:
    """Return where a run begins that starts from `checkpoint` (None: anew)."""
    if not checkpoint or args.ignore_load_lr_and_optim:
        return Beginning()
    state = read_state(checkpoint)
    consumed = state.consumed_samples
    if consumed is None:
        consumed = state.global_step * share_of(args).batch
    return Beginning(state.global_step, 0 if args.ignore_data_skip else consumed)


class StepSampler(DistributedBatchSampler):
    """Goes on where the Course says, pass after pass.

    PaddleNLP's Trainer sets its own sampler by the steps done and today's batch size. This class is one of that kind,
    so that the Trainer leaves skipping to it, and leaves what the Trainer sets alone.
    """

    def __init__(self, course: Course, share: Share, order: Order | None = None) -> None:
        super().__init__(range(course.samples), share.size, share.ranks, share.rank)
        self.course, self.share, self.order = course, share, order or in_order(course.samples)
        self.done, self.start = course.place(course.first)

    def __len__(self) -> int:
        return self.course.steps_a_pass * self.share.accumulation

    def __iter__(self) -> Iterator[list[int]]:
        yield from micro_batches(self.course, self.order, self.done, self.start, self.share)
        self.done, self.start = self.done + 1, 0

    def set_epoch(self, epoch: int = 0, consumed_samples: int = 0) -> None:
        """Do nothing: see the class."""


def make_course(samples: int, checkpoint: str | Path | None, args: HostArguments) -> Course:
    """Return the Course of a run that goes through a dataset of so many samples, pass after pass."""
    begin = beginning(checkpoint, args)
    return Course(samples, share_of(args).batch, *begin, drop_last=args.dataloader_drop_last)


def make_single_course(checkpoint: str | Path | None, args: HostArguments) -> Course:
    """Return the Course of a run of --max_steps steps that reads each sample of its dataset once.

    A dataset's order may depend on its length (`datasets.passes`), so a run that resumes keeps the length that it began
    with where that is enough.
    """
    begin, batch = beginning(checkpoint, args), share_of(args).batch
    needed = begin.consumed + max(args.max_steps - begin.first, 0) * batch
    saved = manifest.read(checkpoint) if checkpoint and not args.ignore_data_skip else None
    return Course(max(needed, saved and saved.run.get("samples") or 1), batch, *begin)
