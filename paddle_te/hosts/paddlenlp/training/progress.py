"""What a person sees of a training while it runs: lines of its first process, and on a terminal a progress bar."""

import logging

from paddlenlp.trainer import TrainerCallback
from paddlenlp.trainer.trainer_callback import ProgressCallback
from tqdm import tqdm

from paddle_te.runs import screen
from paddle_te.runs.lines import step_values, training_begins

logger = logging.getLogger(__name__)


class ProgressBarCallback(ProgressCallback):
    """The Trainer's progress bar, of the job's first process on a terminal alone, with loss and speed."""

    def on_train_begin(self, args, state, control, **kwargs):
        seen = state.is_world_process_zero and screen.is_terminal()
        self.training_bar = tqdm(total=state.max_steps, initial=state.global_step, desc="training", disable=not seen)
        self.current_step = state.global_step

    def on_prediction_step(self, args, state, control, **kwargs):
        if screen.is_terminal():
            super().on_prediction_step(args, state, control, **kwargs)

    def on_log(self, args, state, control, logs=None, **kwargs):
        super().on_log(args, state, control, logs=logs, **kwargs)
        if self.training_bar is not None and "loss" in logs:
            tokens = f"{logs['tokens_per_second']:.0f}" if "tokens_per_second" in logs else "?"
            self.training_bar.set_postfix_str(f"loss {logs['loss']:.4f}, {tokens} tokens/s")


class LinesCallback(TrainerCallback):
    """A line where training begins, one for each logging interval and each evaluation, and one where it ends.

    Args:
        backend: the layers' name for people.
        seq_length: tokens of a sequence.
    """

    def __init__(self, backend, seq_length):
        self._backend, self._seq_length = backend, seq_length

    def on_train_begin(self, args, state, control, **kwargs):
        if not state.is_world_process_zero:
            return
        logger.info(training_begins(state, args, self._seq_length, f" with backend {self._backend}"))

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero:
            return
        if "loss" in logs:
            logger.info(f"step {state.global_step}/{state.max_steps}: {step_values(logs)}")
        elif "eval_loss" in logs:
            accuracy = f", accuracy {logs['eval_accuracy']:.2%}" if "eval_accuracy" in logs else ""
            logger.info(f"evaluation after step {state.global_step}: loss {logs['eval_loss']:.5f}{accuracy}")

    def on_train_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            logger.info(f"training ended after step {state.global_step}; its files are in {args.output_dir}")
