"""What a host's Trainer calls while it trains."""

from __future__ import annotations

from typing import Any, Protocol

from paddle_te.host import HostArguments
from paddle_te.runs.lines import TrainerState


class State(TrainerState, Protocol):
    """The fields of a Trainer's state that callbacks read."""

    epoch: float | None
    consumed_samples: int
    is_world_process_zero: bool
    best_metric: float | None
    best_model_checkpoint: str | None
    log_history: list[dict[str, Any]]


class Control(Protocol):
    """What a Trainer does next; callbacks set it."""

    should_log: bool
    should_save: bool
    should_evaluate: bool
    should_training_stop: bool


class Callback:
    """Do nothing at each event of a Trainer. Needs no class of a host: their Trainers call the methods by name."""

    def _nothing(self, args: HostArguments, state: State, control: Control, **kwargs: Any) -> None:
        """args: the host's TrainingArguments. state, control: the Trainer's. kwargs: what belongs to the event."""

    on_init_end = on_train_begin = on_train_end = on_epoch_begin = on_epoch_end = _nothing
    on_step_begin = on_load_data_end = on_substep_end = on_step_end = on_optimizer_begin = on_optimizer_end = _nothing
    on_log = on_prediction_step = on_evaluate = on_save = on_save_hf = _nothing
