"""What a person sees of a training while it runs on a terminal: a progress bar."""

from typing import Any

from paddlenlp.trainer.trainer_callback import ProgressCallback
from tqdm import tqdm

from paddle_te.host import HostArguments
from paddle_te.runs import screen
from paddle_te.training.callback import Control, State


class ProgressBarCallback(ProgressCallback):
    """The Trainer's progress bar, of the job's first process on a terminal alone, with loss and speed."""

    def on_train_begin(self, args: HostArguments, state: State, control: Control, **kwargs: Any) -> None:
        seen = state.is_world_process_zero and screen.is_terminal()
        self.training_bar = tqdm(total=state.max_steps, initial=state.global_step, desc="training", disable=not seen)
        self.current_step = state.global_step

    def on_prediction_step(self, args: HostArguments, state: State, control: Control, **kwargs: Any) -> None:
        if screen.is_terminal():
            super().on_prediction_step(args, state, control, **kwargs)

    def on_log(self, args: HostArguments, state: State, control: Control, logs: dict[str, Any], **kwargs: Any) -> None:
        super().on_log(args, state, control, logs=logs, **kwargs)
        if self.training_bar is not None and "loss" in logs:
            tokens = f"{logs['tokens_per_second']:.0f}" if "tokens_per_second" in logs else "?"
            self.training_bar.set_postfix_str(f"loss {logs['loss']:.4f}, {tokens} tokens/s")
