"""--early_stopping_patience: training ends when evaluation no longer improves.

PaddleNLP's EarlyStoppingCallback forgets on a resume how often nothing has improved, and compares with the best
checkpoint instead of the best evaluation. Here all evaluations stand in the Trainer's state (`evaluation_in`), which is
saved with each checkpoint.
"""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paddlenlp.trainer import IntervalStrategy, TrainerCallback

from paddle_te.host import HostArguments
from paddle_te.job.rules.trainer import METRICS
from paddle_te.training.callback import Control, State
from paddle_te.weights.contents import read_state

logger = logging.getLogger(__name__)


def without_improvement(values: Iterable[float], greater: bool) -> int:
    """Return how many values, from the last one backwards, are not better than the best before them.

    greater: whether the greater one is the better one.
    """
    best, count = None, 0
    for value in values if greater else (-value for value in values):
        better = best is None or value > best
        best, count = (value, 0) if better else (best, count + 1)
    return count


def evaluation_in(logs: Mapping[str, Any], step: int) -> list[dict[str, Any]]:
    """Return [what a log line of an evaluation measured] for a Trainer's log_history; [] of another line."""
    known = dict.fromkeys(f"eval_{metric}" for metrics in METRICS.values() for metric in metrics)
    measured = {name: logs[name] for name in known if name in logs}
    return [{"step": step, **measured}] if measured else []


def _metric(args: HostArguments) -> str:
    return (args.metric_for_best_model or "loss").removeprefix("eval_")


def _is_over(args: HostArguments, history: Iterable[Mapping[str, Any]] | None) -> bool:
    """Return whether the evaluations in a Trainer's log_history end the run."""
    metric = _metric(args)
    values = [entry[f"eval_{metric}"] for entry in history or () if f"eval_{metric}" in entry]
    greater = METRICS[args.SCRIPT][metric] == "greater"
    return without_improvement(values, greater) >= args.early_stopping_patience


def has_stopped(checkpoint: str | Path, args: HostArguments) -> bool:
    """Return whether the run that saved a checkpoint ended with it, early, with these TrainingArguments too."""
    if args.early_stopping_patience is None or not _is_over(args, read_state(checkpoint).log_history):
        return False
    logger.info(f"{checkpoint}: {_in_words(args)}: the run has ended; nothing is trained or saved")
    return True


def _in_words(args: HostArguments) -> str:
    count = args.early_stopping_patience
    return f"early stopping, as the {_metric(args)} of {count} evaluation{'s' * (count > 1)} in a row was no better"


class EarlyStoppingCallback(TrainerCallback):
    """Ends the run, with a checkpoint where it saves any. All ranks know the same evaluations."""

    def on_evaluate(self, args: HostArguments, state: State, control: Control, **kwargs: Any) -> None:
        if not control.should_training_stop and state.global_step and _is_over(args, state.log_history):
            logger.info(f"{_in_words(args)}: training ends after step {state.global_step}")
            control.should_training_stop = True
            control.should_save = control.should_save or args.save_strategy != IntervalStrategy.NO
