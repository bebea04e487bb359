"""The learning rate of each step."""

import logging
from collections.abc import Callable, Mapping

from paddle.optimizer.lr import LRScheduler

from paddle_te.host import HostArguments

logger = logging.getLogger(__name__)


def annealing(kinds: Mapping[str, Callable[..., LRScheduler]], args: HostArguments, least: float) -> LRScheduler:
    """Return pretraining's schedule, which falls to the learning rate `least`. The hosts' other schedules begin at 0.

    kinds: {lr_scheduler_type: the host's class for it}. args: the host's TrainingArguments, which know their max_steps.
    Raises ValueError for another lr_scheduler_type.
    """
    name = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    if name not in kinds:
        raise ValueError(f"lr_scheduler_type {name}: with min_learning_rate it may be {', '.join(kinds)}")
    return kinds[name](
        max_lr=args.learning_rate,
        min_lr=least,
        warmup_step=args.warmup_steps or args.warmup_ratio * args.max_steps,
        decay_step=args.decay_steps or args.max_steps,
        last_epoch=0,
    )


def tell_long_warm_up(args: HostArguments, steps: int) -> None:
    """Warn, in the job's first process, of a warm-up that such a number of steps ends before its end."""
    if args.warmup_steps > steps and args.process_index == 0:
        logger.warning(
            f"warmup_steps {args.warmup_steps} is more than the {steps} steps of this run: the learning rate rises "
            f"until its end, and does not reach {args.learning_rate:g}"
        )
