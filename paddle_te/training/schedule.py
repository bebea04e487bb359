"""The learning rate of each step in pretraining, from the first step on; the hosts' other schedules begin at 0."""


def annealing(kinds, args, least):
    """A schedule that falls to the learning rate `least`.

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
