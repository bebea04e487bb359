"""What a person reads of a training, in the same words in each host."""


def samples_of_step(args):
    """How many samples a step of a host's TrainingArguments has, over all ranks."""
    return args.per_device_train_batch_size * args.gradient_accumulation_steps * args.dataset_world_size


def training_begins(state, args, seq_length, how=""):
    """Where a training begins. state, args: the host's. how: with which layers."""
    devices = f"{args.world_size} x {args.device.partition(':')[0]}"
    return (
        f"training steps {state.global_step + 1} to {state.max_steps}, each of {samples_of_step(args)} sequences of "
        f"{seq_length} tokens,{how} on {devices}"
    )


def step_values(logs):
    """A logging interval's values for people, those that are there."""
    shown = [
        ("loss", "loss {:.5f}", 1),
        ("learning_rate", "learning rate {:.3g}", 1),
        ("tokens_per_second", "{:,.0f} tokens/s", 1),
        ("step_time", "{:.3g} s a step", 1),
        ("mfu", "MFU {:.1%}", 1),
        ("peak_memory_bytes", "at most {:.2f} GiB", 2**-30),
        ("skipped_steps", "{:.0f} steps left out", 1),
    ]
    return ", ".join(form.format(logs[name] * unit) for name, form, unit in shown if name in logs)
