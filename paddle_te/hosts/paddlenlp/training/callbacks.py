"""Callbacks for PaddleNLP's Trainer beside those that all hosts have."""

from typing import Any

from paddlenlp.trainer import IntervalStrategy, TrainerCallback
from paddlenlp.trainer.trainer_callback import ProgressCallback

from paddle_te.configs.spec import spec_of
from paddle_te.host import HostArguments, HostTrainer
from paddle_te.hosts.paddlenlp.training.early_stopping import EarlyStoppingCallback
from paddle_te.hosts.paddlenlp.training.health import HealthCallback
from paddle_te.hosts.paddlenlp.training.profiling import KernelsCallback, ProfilerCallback
from paddle_te.hosts.paddlenlp.training.progress import ProgressBarCallback
from paddle_te.job import PRETRAIN
from paddle_te.options.fp8 import Fallback
from paddle_te.runs import screen
from paddle_te.runs.transfers import Transfer
from paddle_te.training.callback import Control, State
from paddle_te.training.experts import ExpertsCallback
from paddle_te.training.fp8_statistics import FP8StatisticsCallback
from paddle_te.training.lines import LinesCallback
from paddle_te.training.liveness import HeartbeatCallback, StragglerCallback
from paddle_te.training.signals import ExitSignalCallback
from paddle_te.training.throughput import ThroughputCallback
from paddle_te.training.trackers import tracker_callbacks


class TransfersCallback(TrainerCallback):
    """Adds to the Trainer's logs, and so to VisualDL's curves, what saves and loads since the last one took.

    transfers: the Trainer's list of `runs.transfers.Transfer`, of which this takes them away.
    """

    def __init__(self, transfers: list[Transfer]) -> None:
        self._transfers = transfers

    def on_log(self, args: HostArguments, state: State, control: Control, logs: dict[str, Any], **kwargs: Any) -> None:
        while self._transfers:
            logs.update(self._transfers.pop(0).values())


class LastStepCallback(TrainerCallback):
    """Log the steps behind the last log line, and in pretraining save those behind the last checkpoint.

    PaddleNLP's Trainer loses them where --max_steps is no multiple. Fine-tuning saves its model in the end.
    """

    def on_step_end(self, args: HostArguments, state: State, control: Control, **kwargs: Any) -> None:
        if state.global_step < state.max_steps:
            return
        control.should_log = control.should_log or args.logging_strategy == IntervalStrategy.STEPS
        if getattr(args, "SCRIPT", None) != PRETRAIN or args.save_strategy != IntervalStrategy.STEPS:
            return
        control.should_save = True
        if args.metric_for_best_model and args.evaluation_strategy == IntervalStrategy.STEPS:
            control.should_evaluate = True  # else the last checkpoint could not be the best


def install_callbacks(trainer: HostTrainer, exit_signal: ExitSignalCallback | None = None) -> None:
    """Give a PaddleNLP Trainer this module's callbacks and those of `training` and `profiling`.

    In front of all others, so that VisualDL's passes on what they add to the logs (those of the Trainer's own argument
    `callbacks` come behind it), and with a progress bar in place of the Trainer's. exit_signal: an ExitSignalCallback
    made earlier; None: no signal is handled.
    """
    callbacks = trainer.callback_handler.callbacks
    trainer.args.disable_tqdm |= not screen.is_terminal()  # the bar of the samples that a resumed run skips
    callbacks[:] = [ProgressBarCallback() if type(callback) is ProgressCallback else callback for callback in callbacks]
    config = trainer.model.config
    lines = LinesCallback.of(config)
    transfers = TransfersCallback(getattr(trainer, "transfers", []))  # PaddleNLP's own Trainer has none
    callbacks[:0] = [ThroughputCallback.of(config), transfers, lines, ProfilerCallback(), KernelsCallback(config)]
    # asked of the whole model: every stage of a pipeline takes part in the callback's collectives
    if spec_of(config).experts:
        callbacks.insert(0, ExpertsCallback())
    if every := getattr(trainer.args, "fp8_statistics", 0):
        fallback = Fallback.of(trainer.args.fp8_fallback)
        callbacks.insert(0, FP8StatisticsCallback(every, fallback, trainer.in_16_bits))
    callbacks += tracker_callbacks(getattr(trainer.args, "trackers", []))
    callbacks.append(LastStepCallback())
    callbacks.sort(key=lambda callback: not isinstance(callback, HealthCallback))  # first: see there
    if getattr(trainer.args, "early_stopping_patience", None):
        callbacks.append(EarlyStoppingCallback())
    if exit_signal is not None:
        callbacks.append(exit_signal)  # behind the Trainer's own, which decides by the step's number alone
    callbacks += [StragglerCallback(), HeartbeatCallback()]
