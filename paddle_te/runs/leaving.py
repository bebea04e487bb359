"""End a process that has failed: at once.

Python's own end and its libraries' would take down what other ranks wait in: Paddle destroys its communicators there,
and NCCL waits in that for operations that a rank which has failed never joins. So the process tells its launcher,
writes what it has to say, and is gone, whatever threads, exit handlers and collectives there are. Knows no Paddle.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from typing import NoReturn

from paddle_te.runs.heartbeat import Heartbeat

INTERRUPTED = 128 + signal.SIGINT


@contextlib.contextmanager
def leaving_at_once() -> Iterator[None]:
    """End the process where the block raises, or ends it with another status than 0. Use it around a whole program.

    What it raises is shown as Python shows it. Ctrl-C is not: who presses it knows.
    """
    try:
        yield
    except SystemExit as end:
        if status := _status(end):
            leave(status)
        raise
    except KeyboardInterrupt:
        leave(INTERRUPTED)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        leave(1)


def _status(end: SystemExit) -> int:
    """Return the exit status that Python would end with, after it has printed what is no number."""
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


def leave(status: int) -> NoReturn:
    """End this process with the status, and the data loaders' workers with it."""
    try:
        Heartbeat().fail(status)  # first: what follows writes to files, which may be slow
        for worker in multiprocessing.active_children():
            worker.terminate()
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(status)
