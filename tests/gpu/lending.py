"""GPUs that jobs of several processes share: most of a job is starting Python."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from paddle_te.native import library

JOBS_PER_GPU = int(os.environ.get("PADDLE_TE_JOBS_PER_GPU", 2))
TIMEOUT = 400  # seconds for one job, before pytest's own


class Gpus:
    """Lends GPUs to jobs: the least busy first, each to JOBS_PER_GPU at once."""

    def __init__(self) -> None:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        ids = shown.split(",") if shown else [str(number) for number in range(len(library.gpus()))]
        self.load, self.changed = dict.fromkeys(ids, 0), threading.Condition()

    @contextmanager
    def lend(self, count: int, port: int) -> Iterator[dict[str, str]]:
        """The environment of a job that has `count` GPUs, and 100 ports from `port` on for its launcher."""
        with self.changed:
            self.changed.wait_for(lambda: sum(load < JOBS_PER_GPU for load in self.load.values()) >= count)
            chosen = sorted(self.load, key=lambda number: self.load[number])[:count]
            self._add(chosen, 1)
        try:
            yield dict(CUDA_VISIBLE_DEVICES=",".join(chosen), PORT_RANGE=f"{port}:{port + 99}")
        finally:
            with self.changed:
                self._add(chosen, -1)
                self.changed.notify_all()

    def _add(self, chosen: list[str], change: int) -> None:
        for number in chosen:
            self.load[number] += change
