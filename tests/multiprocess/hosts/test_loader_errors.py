"""Errors in the data end a run with one line, whether worker processes read or none, and nobody waits for ever."""

import gc
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from paddle_te import upstream
from paddle_te.hosts.paddlenlp.training.datasets import MockDataset
from paddle_te.runs.rollback import RunEnded
from paddle_te.training.loader_errors import tell_errors
from tests import processes
from tests.end_to_end.training.test_health import COMMON, train

__all__ = ["train"]  # a fixture


@pytest.fixture(autouse=True)
def _repaired():
    """As in the commands, whichever test came before."""
    upstream.apply("loader_thread")
    yield
    upstream.undo("loader_thread")


class Breaking(paddle.io.Dataset):
    """Eight samples, of which the sixth cannot be read."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 5:
            raise IndexError("index 5 is out of bounds\nfor a corpus of 5 documents")
        return np.full([2], index)


def read(loader, trainer):
    """What iterating over the loader gives and raises, within some minutes."""
    batches, errors = [], []

    def iterate():
        try:
            for batch in loader:
                batches.append(batch)
                trainer.has_trained = True
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=iterate, daemon=True)
    thread.start()
    thread.join(200)
    assert not thread.is_alive(), "it waits for ever"
    return batches, errors


@pytest.mark.parametrize("batch_size, status", [(8, 2), (2, 1)])
def test_an_error_is_told_in_one_line(batch_size, status):
    trainer = SimpleNamespace(state=SimpleNamespace(global_step=4), has_trained=False)
    loader = paddle.io.DataLoader(Breaking(), batch_size=batch_size)
    batches, (error,) = read(tell_errors(loader, trainer, "training"), trainer)
    assert isinstance(error, RunEnded) and error.status == status
    line = str(error)
    assert line.startswith("the training data could not be read after step 4: IndexError: ") and "\n" not in line
    assert "index 5 is out of bounds for a corpus of 5 documents" in line
    assert len(batches) == (0 if batch_size == 8 else 2)


WITH_A_WORKER = """
import multiprocessing
import subprocess
import sys
from paddle_te.hosts.paddlenlp.training import pretrain
from paddle_te.hosts.paddlenlp.training.datasets import MockDataset

read_sample = MockDataset.__getitem__

def until_the_tenth(self, index):
    if index > 9:
        raise IndexError("beyond the end")
    return read_sample(self, index)

MockDataset.__getitem__ = until_the_tenth
pretrain.main()
"""


def test_a_worker_processs_error_ends_the_run(tmp_path):
    flags = COMMON | dict(output_dir=tmp_path, dataloader_num_workers=1)
    words = [str(word) for key, value in flags.items() for word in (f"--{key}", value)]
    ended = processes.run([sys.executable, "-c", WITH_A_WORKER, *words], timeout=200)
    assert ended.returncode == 1
    output = ended.stdout + ended.stderr
    assert "could not be read after step 2: IndexError: beyond the end" in output and "Traceback" not in output


def test_paddle_alone_waits_for_ever():
    """Else the repair can go."""
    upstream.undo("loader_thread")
    trainer = SimpleNamespace(has_trained=False)
    with pytest.raises(AssertionError, match="waits for ever"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda arguments: None)
        patch.setattr(threading.Thread, "join", lambda self, timeout, join=threading.Thread.join: join(self, 3))
        read(paddle.io.DataLoader(Breaking(), batch_size=2), trainer)


def test_a_run_ends_with_the_line(train, monkeypatch, caplog):
    read_sample = MockDataset.__getitem__

    def until_the_tenth(self, index):
        if index > 9:
            raise OSError(5, "Input/output error", "data/corpus.bin")
        return read_sample(self, index)

    monkeypatch.setattr(MockDataset, "__getitem__", until_the_tenth)
    assert train() == 1
    assert "the training data could not be read after step 2: OSError: [Errno 5] Input/output error" in caplog.text


class Slow(paddle.io.Dataset):
    """Twenty samples."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        time.sleep(0.05)
        return np.full([2], index)


class Collecting(Slow):
    """Whose reader has Python look for garbage, as it does by itself sooner or later."""

    def __getitem__(self, index):
        gc.collect()
        return super().__getitem__(index)


class OfOneProcess:
    """Garbage whose end waits, in another process, for what is not there: a thread, say."""

    def __init__(self):
        self.pid, self.itself = os.getpid(), self

    def __del__(self):
        if os.getpid() != self.pid:
            time.sleep(600)


@pytest.mark.timeout(200)  # else it waits for ever
def test_a_worker_leaves_its_parents_garbage_alone():
    trainer = SimpleNamespace(state=SimpleNamespace(global_step=4), has_trained=True)
    loader = tell_errors(paddle.io.DataLoader(Collecting(), batch_size=2, num_workers=1), trainer, "evaluation")
    gc.disable()  # what is garbage here is still there in the worker
    try:
        OfOneProcess()
        assert len(list(loader)) == 10
    finally:
        gc.enable()


def test_a_workers_sigterm_is_its_parents_affair():
    """Slurm's reaches the workers too: they read on, for a last checkpoint; their parent's still ends them."""
    trainer = SimpleNamespace(state=SimpleNamespace(global_step=4), has_trained=True)
    loader = tell_errors(paddle.io.DataLoader(Slow(), batch_size=2, num_workers=1), trainer, "training")

    def begin():
        before, batches = set(multiprocessing.active_children()), iter(loader)
        next(batches)
        (worker,) = set(multiprocessing.active_children()) - before
        return batches, worker

    batches, worker = begin()
    subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)
    assert len(list(batches)) == 9
    batches, worker = begin()
    worker.terminate()
    worker.join(120)
    assert worker.exitcode == 0


@pytest.mark.parametrize("workers, persistent", [(0, False), (1, False), (1, True)])
def test_a_loader_that_is_left_before_its_end_leaves_nothing_behind(workers, persistent):
    """Else the thread warns, where a process takes its time to end, that Python has ended the worker."""
    trainer = SimpleNamespace(state=SimpleNamespace(global_step=4), has_trained=True)
    how = dict(num_workers=workers, persistent_workers=persistent, timeout=1)  # so often the thread looks
    loader = tell_errors(paddle.io.DataLoader(Slow(), batch_size=2, **how), trainer, "training")
    children, threads = set(multiprocessing.active_children()), set(threading.enumerate())
    for _ in range(2):  # once, and once again
        for _ in loader:
            break
        assert set(multiprocessing.active_children()) == children
        deadline = time.monotonic() + 20
        while set(threading.enumerate()) - threads and time.monotonic() < deadline:
            time.sleep(0.05)
        assert set(threading.enumerate()) <= threads
