"""What one start of a job writes to its logs. Earlier starts may have written to the same files."""

from __future__ import annotations

import sys
from pathlib import Path

LAUNCHER_LOG = "launcher.log"


def size_of(log: Path) -> int:
    """Return the bytes of a log; 0 where there is none."""
    return log.stat().st_size if log.exists() else 0


class Logs:
    """The logs in a folder, from where they end now."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._starts = {path.name: path.stat().st_size for path in folder.glob("*")}

    @property
    def launcher(self) -> Path:
        """paddle.distributed.launch's own messages."""
        return self.folder / LAUNCHER_LOG

    def of(self, rank: int) -> Path:
        """Return the log of a rank, by its number on this node."""
        return self.folder / f"workerlog.{rank}"

    def copy(self, rank: int) -> Copy:
        """Return what shows a rank's log on stdout."""
        log = self.of(rank)
        return Copy(log, self._start(log))

    def lines(self, log: Path, start: int | None = None) -> list[str]:
        """Return what was written to a log; start: since it had so many bytes."""
        try:
            with open(log, "rb") as file:
                file.seek(self._start(log) if start is None else start)
                return file.read().decode(errors="replace").splitlines()
        except OSError:
            return []

    def _start(self, log: Path) -> int:
        return self._starts.get(log.name, 0)


class Copy:
    """Shows on stdout what a file gets from a position on."""

    def __init__(self, path: Path, position: int) -> None:
        self._path, self._position = path, position

    def catch_up(self) -> None:
        """Show what was written since the last time, progress bars as they are."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._position)
                new = file.read()
        except FileNotFoundError:  # there is no process yet, or one that writes no such log
            return
        if new:
            self._position += len(new)
            sys.stdout.buffer.write(new)
            sys.stdout.flush()
