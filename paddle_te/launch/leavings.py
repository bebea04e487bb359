"""What killed processes leave in /dev/shm: the batches that Paddle's data loaders were handing over.

A worker of a data loader passes each batch through a file /dev/shm/paddle_PID_…, which its reader removes. PID is the
worker's, so that the launcher, which knows all processes below it, can tell which files are its job's. Staging folders
of checkpoints have an owner of their own (`paddle_te.runs.background`); nvgpu's host runtime shares memory without a
name.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")
LOOK_SECONDS = 2


class Leavings:
    """Remembers the processes below this one, and removes what those that have ended have left."""

    def __init__(self, folder: Path = SHARED_MEMORY):
        self.folder = folder
        self.pids: set[int] = set()
        self._next_look = 0.0

    def look(self, now: bool = False) -> None:
        """Remember who is there; at most every `LOOK_SECONDS`, unless `now`."""
        if now or time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_SECONDS
            self.pids |= {process.pid for process in psutil.Process().children(recursive=True)}

    def remove(self) -> list[str]:
        """Return the names of the files that were removed."""
        removed = []
        for path in self.folder.glob("paddle_*"):
            owner = re.match(r"paddle_(\d+)_", path.name)
            if owner and int(owner[1]) in self.pids and not psutil.pid_exists(int(owner[1])):
                path.unlink(missing_ok=True)
                removed.append(path.name)
        return removed
