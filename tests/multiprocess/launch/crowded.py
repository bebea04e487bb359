"""run_pretrain.py on nvgpu's host runtime, whose device is full for some ranks from a step on.

    CROWDED="RANK,… STEP" [HANGS=exit|thread] crowded.py flags of run_pretrain …

te computes with tests/emulated_te.py. HANGS: how those ranks' ends hang, too: as Python's own does where a communicator
waits for the other ranks, or a thread goes on.
"""

import atexit
import contextlib
import os
import threading
import time

import paddle
from paddlenlp.trainer import TrainerCallback

from paddle_te.hosts.paddlenlp.training import pretrain
from paddle_te.scripts import run
from tests import emulated_te


class Crowded(TrainerCallback):
    """Fills the device before a step: what Paddle's allocator keeps, too."""

    def __init__(self, step):
        self.step = step
        self.held = []

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.step:
            os.environ["NVGPU_HOST_MEMORY"] = "0"
            for size in (2**24, 2**20, 2**14, 256):
                self.held += tensors(size)


def tensors(size):
    with contextlib.suppress(MemoryError):
        while True:
            yield paddle.empty([size], "uint8")


def hang():
    time.sleep(600)


HANGS = {"exit": lambda: atexit.register(hang), "thread": threading.Thread(target=hang).start, "": lambda: None}


def install(step):
    install_callbacks = pretrain.install_callbacks

    def install_with(trainer, exit_signal):
        install_callbacks(trainer, exit_signal)
        trainer.add_callback(Crowded(step))
        HANGS[os.environ.get("HANGS", "")]()

    pretrain.install_callbacks = install_with


if __name__ == "__main__":
    emulated_te.install()
    ranks, step = os.environ["CROWDED"].split()
    if os.environ.get("PADDLE_TRAINER_ID", "0") in ranks.split(","):
        install(int(step))
    run("paddle_te.hosts.paddlenlp.training.pretrain")
