"""Word what a person reads of a training, the same in each host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol


class TrainingArguments(Protocol):
    """The fields of a host's TrainingArguments that these lines name."""

    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    dataset_world_size: int
    world_size: int
    device: str


class TrainerState(Protocol):
    """The fields of a host's TrainerState that these lines name."""

    global_step: int
    max_steps: int


def samples_of_step(args: TrainingArguments) -> int:
    """Return how many samples a step has, over all ranks."""
    return args.per_device_train_batch_size * args.gradient_accumulation_steps * args.dataset_world_size


def training_begins(state: TrainerState, args: TrainingArguments, seq_length: int, how: str = "") -> str:
    """Say where a training begins. how: with which layers."""
    devices = f"{args.world_size} x {args.device.partition(':')[0]}"
    return (
        f"training steps {state.global_step + 1} to {state.max_steps}, each of {samples_of_step(args)} sequences of "
        f"{seq_length} tokens,{how} on {devices}"
    )


def of_preferences(logs: Mapping[str, float]) -> dict[str, float]:
    """Return what preference tuning alone logs: rewards, log-probabilities, and the parts of its loss."""
    own = lambda name: "/" in name or name == "kl" or name.endswith("_loss")  # noqa: E731
    return {name: value for name, value in logs.items() if own(name)}


_REWARDS = [
    ("rewards/chosen", "rewards chosen {:.4g}", 1),
    ("rewards/rejected", "rejected {:.4g}", 1),
    ("rewards/margins", "margin {:.4g}", 1),
    ("rewards/accuracies", "accuracy {:.1%}", 1),
]


def evaluation_values(logs: Mapping[str, float]) -> str:
    """Say an evaluation's values for people, those that are there."""
    shown = [("loss", "loss {:.5f}", 1), ("accuracy", "accuracy {:.2%}", 1), *_REWARDS]
    return _said({name.removeprefix("eval_"): value for name, value in logs.items()}, shown)


def step_values(logs: Mapping[str, float]) -> str:
    """Say a logging interval's values for people, those that are there."""
    shown = [
        ("loss", "loss {:.5f}", 1),
        *_REWARDS,
        ("learning_rate", "learning rate {:.3g}", 1),
        ("grad_norm", "gradient norm {:.3g}", 1),
        ("tokens_per_second", "{:,.0f} tokens/s", 1),
        ("step_time", "{:.3g} s a step", 1),
        ("mfu", "MFU {:.1%}", 1),
        ("peak_memory_bytes", "at most {:.2f} GiB", 2**-30),
        ("skipped_steps", "{:.0f} steps left out", 1),
    ]
    return _said(logs, shown)


def _said(logs: Mapping[str, float], shown: Iterable[tuple[str, str, float]]) -> str:
    return ", ".join(form.format(logs[name] * unit) for name, form, unit in shown if name in logs)
