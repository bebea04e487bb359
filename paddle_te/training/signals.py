"""The stop on a signal."""

import atexit
import logging
import os
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

import paddle
import paddle.distributed as dist

from paddle_te.host import HostArguments
from paddle_te.runs.checkpoints import STOPPED_MARK
from paddle_te.training.callback import Callback, Control, State

logger = logging.getLogger(__name__)

SAME_MOMENT = 2  # seconds within which SIGTERMs are one


class ExitSignalCallback(Callback):
    """On SIGUSR1 or SIGTERM, to any one rank: every rank ends its step, saves a checkpoint and stops training.

    The process then ends with status 0, and `output_dir`/stopped holds the step, if steps are left to train: who sent
    the signal (Slurm before a time limit: llama_multi_node.sub) resumes from there. The ranks agree by an all-reduce
    of one flag a step, as Megatron-LM's --exit-signal-handler; the Trainer waits for the device in each step anyway.
    A second SIGTERM ends the process at once, unless it comes in the moment of the first: Slurm sends one to every
    process, and paddle.distributed.launch, which gets it too, passes it on.

    Make it after Paddle is imported and before what takes long: until then the signal ends the process.
    """

    def __init__(self) -> None:
        self.received = False  # by this rank
        self.stopping = False  # all ranks
        self._terminated: float | None = None  # time.monotonic of the first SIGTERM
        self._pid = os.getpid()
        for signum, handler in ((signal.SIGUSR1, self._receive), (signal.SIGTERM, self._terminate)):
            signal.signal(signum, handler)  # stays: the sender may repeat itself while the last files are written
            # Python ends before its libraries do, and leaves them the signal's default, which kills
            atexit.register(signal.signal, signum, signal.SIG_IGN)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        self.received = True

    def _terminate(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        first = self._terminated is None or now - self._terminated < SAME_MOMENT
        if os.getpid() != self._pid or not first:  # a process that was forked off, whose end its parent wants
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        self._terminated = self._terminated or now
        self.received = True

    def _agreed(self, world_size: int) -> bool:
        received = self.received  # a signal that comes during the all-reduce is for the next step
        if world_size > 1:
            flag = paddle.to_tensor([float(received)])
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            received = bool(flag.item())
        return received

    def on_train_begin(self, args: HostArguments, state: State, control: Control, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            (Path(args.output_dir) / STOPPED_MARK).unlink(missing_ok=True)

    def on_step_end(self, args: HostArguments, state: State, control: Control, **kwargs: Any) -> None:
        self.stopping = self._agreed(args.world_size)
        if self.stopping:
            logger.info(f"asked to stop by a signal: saving a checkpoint of step {state.global_step}")
            control.should_log = control.should_save = control.should_training_stop = True

    def on_train_end(self, args: HostArguments, state: State, control: Control, **kwargs: Any) -> None:
        if self.stopping and state.global_step < state.max_steps and state.is_world_process_zero:
            (Path(args.output_dir) / STOPPED_MARK).write_text(f"{state.global_step}\n")
