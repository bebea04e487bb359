"""What a person reads of a training while it runs."""

import logging
from collections.abc import Mapping
from typing import Any, Self

from paddle_te.host import HostArguments, HostConfig
from paddle_te.runs.lines import evaluation_values, step_values, training_begins
from paddle_te.training.callback import Callback, Control, State
from paddle_te.training.throughput import run_name

logger = logging.getLogger(__name__)


class LinesCallback(Callback):
    """Log a line where training begins, one for each logging interval and each evaluation, and one where it ends.

    Args:
        backend: the layers' name for people.
        seq_length: tokens of a sequence.
    """

    def __init__(self, backend: str, seq_length: int) -> None:
        self._backend, self._seq_length = backend, seq_length

    @classmethod
    def of(cls, config: HostConfig) -> Self:
        """Return the callback for a model of PaddleNLP's configuration; its seq_length says how long a sequence is."""
        return cls(run_name(config), config.seq_length)

    def on_train_begin(self, args: HostArguments, state: State, control: Control, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        logger.info(training_begins(state, args, self._seq_length, f" with backend {self._backend}"))

    def on_log(
        self,
        args: HostArguments,
        state: State,
        control: Control,
        logs: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if not state.is_world_process_zero:
            return
        logs = logs or {}
        if "loss" in logs:
            logger.info(f"step {state.global_step}/{state.max_steps}: {step_values(logs)}")
        elif "eval_loss" in logs:
            logger.info(f"evaluation after step {state.global_step}: {evaluation_values(logs)}")

    def on_train_end(self, args: HostArguments, state: State, control: Control, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            logger.info(f"training ended after step {state.global_step}; its files are in {args.output_dir}")
