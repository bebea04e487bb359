"""Make data loaders whose errors end the run with one line, and which leave no worker behind.

Their workers read on while the run is told to end.
"""

import gc
import os
import signal
import threading
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from paddle import Tensor
from paddle.io import DataLoader

from paddle_te.host import HostClass, HostTrainer
from paddle_te.runs.rollback import RunEnded

LONGEST_END = 10  # seconds that a worker may take for what it is reading; later it ends with the process


def tell_errors(loader: Iterable[Any], trainer: HostTrainer, what: str) -> Iterable[Any]:
    """Let a Paddle DataLoader raise RunEnded for what goes wrong in its data set, workers or collation; return it.

    The status is 2 before the first step, as for all that is wrong with a run's input, and 1 afterwards. trainer: knows
    the step, and whether it `has_trained`. what: "training", "evaluation" or "test". Other loaders stay as they are.
    """
    if type(loader) is DataLoader:
        telling = cast(_TellingLoader, loader)
        telling.__class__ = _TellingLoader
        telling.trainer, telling.what = trainer, what
        loader.worker_init_fn = _begin_worker
        loader._persistent_workers = False  # which would live until the process ends, see `_end`
    return loader


class TellingTrainer(HostClass):
    """A host's Trainer whose loaders tell their errors. Mixed into its class."""

    has_trained = False  # a micro-batch at least

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        self.has_trained = True
        return super().training_step(*args, **kwargs)

    def get_train_dataloader(self) -> Iterable[Any]:
        return tell_errors(super().get_train_dataloader(), self, "training")

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Iterable[Any]:
        return tell_errors(super().get_eval_dataloader(*args, **kwargs), self, "evaluation")

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> Iterable[Any]:
        return tell_errors(super().get_test_dataloader(*args, **kwargs), self, "test")


def _begin_worker(worker: int) -> None:
    """Keep the parent's garbage in a worker process, and end by the parent's SIGTERM only. worker: its number.

    A worker was seen to hang in Python's garbage collector, and the run with it. The likely cause is an object of the
    parent, such as a reader of Paddle's, that waits at its end for threads, which a fork does not have.

    Slurm sends SIGTERM to all processes of a job. Paddle's workers would die of it, and each death raises SystemError
    in the rank, which is about to save its last checkpoint.
    """
    gc.freeze()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_with_parent, args=[os.getppid()], daemon=True).start()


def _end_with_parent(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


class _TellingLoader(DataLoader):
    trainer: HostTrainer
    what: str

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # Paddle names its own iterator
        batches = super().__iter__()
        try:
            while True:
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                except Exception as error:
                    message = _line(error, self.what, self.trainer.state.global_step)
                    raise RunEnded(message, 1 if self.trainer.has_trained else 2) from error
                yield batch
        finally:
            _end(batches)


def _end(batches: Any) -> None:
    """End the thread and the workers of one of Paddle's iterators, which a Trainer often leaves before its data end.

    They keep it alive. At the end of the process Python would end the workers first, and the thread would warn of that.
    """
    if batches._num_workers:
        batches._try_shutdown_all(LONGEST_END)
    else:
        batches._exit_thread_expectedly()  # the other one waits a second for the thread


def _line(error: Exception, what: str, step: int) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    # a worker's error brings its traceback in the message; the last line is what it said
    message = str(error).strip().splitlines()[-1] if "Traceback" in str(error) else " ".join(str(error).split())
    told = message if message.startswith(type(error).__name__) else f"{type(error).__name__}: {message}"
    return (
        f"the {what} data could not be read after step {step}: {told} ({Path(place.filename).name}:{place.lineno}); if "
        "the files have changed while they were used, start again"
    )
