"""What a rank tells its launcher and the log of how it gets on: signs of life, stacks on demand, stragglers."""

import faulthandler
import logging
import socket
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import paddle
from paddle.nn import Layer

from paddle_te import device
from paddle_te.distributed import gather_objects
from paddle_te.host import HostArguments, HostModel
from paddle_te.runs.heartbeat import (
    ENDING,
    EVALUATING,
    LOADING,
    SAVING,
    STACK_SIGNAL,
    STARTING,
    STEPPING,
    Heartbeat,
    has_launcher,
)
from paddle_te.runs.lock import FolderLock
from paddle_te.training.callback import Callback, Control, State

logger = logging.getLogger(__name__)

_STDERR = 2  # of the process, whatever sys.stderr has become
STRAGGLER_STEPS = 100  # from one line about the slowest rank to the next
_locks: dict[Path, FolderLock] = {}  # {folder: FolderLock}, held until the process ends


def show_signs_of_life() -> None:
    """Tell the launcher that this rank is there; write all threads' stacks to stderr when it asks, and in a crash."""
    paddle.disable_signal_handler()  # Paddle's says nothing of Python's frames
    faulthandler.enable(_STDERR, all_threads=True)
    faulthandler.register(STACK_SIGNAL, _STDERR, all_threads=True)
    Heartbeat().beat(STARTING)


def keep_folder(args: HostArguments) -> None:
    """Keep other runs from `args.output_dir` until this process ends, where no launcher does.

    Raise FolderInUse, a ValueError, where another run has it.
    """
    folder = Path(args.output_dir).resolve()
    if args.process_index == 0 and not has_launcher() and folder not in _locks:
        _locks[folder] = FolderLock(folder)


class RankTime(NamedTuple):
    """How long a rank took for its data and forward."""

    seconds: float
    rank: int
    host: str


class HeartbeatCallback(Callback):
    """Tells the launcher where a step, a save or an evaluation begins. Comes last: it reads what the others decide."""

    def __init__(self) -> None:
        self._heartbeat = Heartbeat()

    def on_step_begin(self, args: HostArguments, state: State, control: Control, **kwargs: Any) -> None:
        self._heartbeat.beat(STEPPING, state.global_step + 1)

    def on_step_end(self, args: HostArguments, state: State, control: Control, **kwargs: Any) -> None:
        phase = EVALUATING if control.should_evaluate else SAVING if control.should_save else LOADING
        self._heartbeat.beat(phase, state.global_step)

    def on_evaluate(self, args: HostArguments, state: State, control: Control, **kwargs: Any) -> None:
        self._heartbeat.beat(SAVING if control.should_save else LOADING, state.global_step)

    def on_save(self, args: HostArguments, state: State, control: Control, **kwargs: Any) -> None:
        self._heartbeat.beat(LOADING, state.global_step)

    def on_train_end(self, args: HostArguments, state: State, control: Control, **kwargs: Any) -> None:
        self._heartbeat.beat(ENDING, state.global_step)


class StragglerCallback(Callback):
    """Every so many steps, the log compares the slowest rank with the median one, where there are several ranks.

    A step takes all ranks equally long, for they wait for the slowest in its collectives. So what is compared is what a
    rank does by itself: loading its data and, timed in one step of STRAGGLER_STEPS, with the device awaited before and
    after, the model's forward. Ranks that share layers (tensor parallelism) wait for each other in that, too: they are
    slow together. It costs the waits of that step and one all-gather.
    """

    def __init__(self) -> None:
        self._hooks: list[Any] = []  # what Paddle gives to remove them by
        self._sampling = False
        self._began = self._own = 0.0
        self._loading_since: float | None = None

    def on_train_begin(
        self, args: HostArguments, state: State, control: Control, model: HostModel = None, **kwargs: Any
    ) -> None:
        self._loading_since = None
        if args.world_size > 1:
            for layer in _called_layers(model):
                self._hooks += [
                    layer.register_forward_pre_hook(self._enter),
                    layer.register_forward_post_hook(self._leave),
                ]

    def _samples(self, step: int) -> bool:
        return bool(self._hooks) and step % STRAGGLER_STEPS == 0

    def on_step_begin(self, args: HostArguments, state: State, control: Control, **kwargs: Any) -> None:
        self._sampling = self._samples(state.global_step + 1)
        self._own = time.perf_counter() - self._loading_since if self._sampling and self._loading_since else 0.0

    def _enter(self, layer: Layer, inputs: Any) -> Any:
        if self._sampling:
            device.synchronize()
            self._began = time.perf_counter()

    def _leave(self, layer: Layer, inputs: Any, outputs: Any) -> Any:
        if self._sampling:
            device.synchronize()
            self._own += time.perf_counter() - self._began

    def on_step_end(self, args: HostArguments, state: State, control: Control, **kwargs: Any) -> None:
        if self._samples(state.global_step):
            everyone = gather_objects(RankTime(self._own, args.process_index, socket.gethostname()), args.world_size)
            if state.is_world_process_zero:
                logger.info(straggler_line(state.global_step, everyone))
        self._sampling = False
        self._loading_since = time.perf_counter()

    def _loading_anew(self, args: HostArguments, state: State, control: Control, **kwargs: Any) -> None:
        self._loading_since = None  # saving and evaluating are not loading

    on_save = on_evaluate = _loading_anew

    def on_train_end(self, args: HostArguments, state: State, control: Control, **kwargs: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def straggler_line(step: int, everyone: Sequence[RankTime]) -> str:
    """Return the line that compares the slowest rank with the median one."""
    seconds, rank, host = max(everyone)
    median = statistics.median(took for took, *_ in everyone)
    return (
        f"step {step}: the slowest rank, {rank} on {host}, takes {seconds:.4f} s for its data and forward, the median "
        f"rank {median:.4f} s ({seconds / max(median, 1e-9):.2f} times)"
    )


def _called_layers(model: HostModel) -> list[Layer]:
    """Return the layers that hooks see: a pipeline calls its stage's one by one, and never the model itself."""
    stage = getattr(model, "run_function", None)
    return [model] if stage is None else [each for each in stage if isinstance(each, Layer)]
