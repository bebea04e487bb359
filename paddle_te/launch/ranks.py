"""The training processes of this node, as the launcher sees them from outside."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from paddle_te.launch.proc import catches, zombie_status

LAUNCHER = "paddle.distributed.launch"


@dataclass
class Rank:
    """One training process."""

    pid: int
    number: int  # in the whole job
    local: int  # on this node, and of its log
    pidfd: int | None  # readable once the process has ended; None where Linux (before 5.3) has none
    status: int | None = None  # exit status once it has ended, -n if signal n ended it
    told: int = 0  # the exit status that it has said it ends with after an error

    @property
    def exit_status(self) -> int:
        return self.told or self.status or 0


class Ranks:
    """Those of one start of a job, found as they come.

    Args:
        command: the process that starts them; or, unless `launched`, that becomes the only one.
        launched: by paddle.distributed.launch.
        script: that they run, by `python -u script`.
        count: how many there will be.
        node: this node's rank; each has as many.
    """

    def __init__(self, command: int, launched: bool, script: str, count: int, node: int) -> None:
        self._command, self._launched, self._script = command, launched, script
        self._count, self._first = count, count * node
        self._found: list[Rank] = []

    def __iter__(self) -> Iterator[Rank]:
        return iter(self._found)

    def find(self) -> None:
        """Look for those that have come since the last time."""
        if len(self._found) == self._count:
            return
        try:
            started = self._started()
        except (psutil.Error, IndexError):  # one has just gone, or the launcher is not there yet: next time
            return
        for process in started:
            if process.pid not in {rank.pid for rank in self}:
                local = len(self._found)
                self._found.append(Rank(process.pid, self._first + local, local, _pidfd(process.pid)))

    def _started(self) -> list[psutil.Process]:
        """Return the training processes, in the order of their ranks, also those that have ended unwaited.

        paddle.distributed.launch starts them one after the other, each in a session of its own, and nothing else so.
        By their parent, since one that ended at once shows neither arguments nor environment any more.
        """
        processes = [psutil.Process(self._command), *psutil.Process(self._command).children(recursive=True)]
        if not self._launched:
            processes = [process for process in processes if _arguments(process)[1:3] == ["-u", self._script]]
        else:
            launchers = [process for process in processes if _arguments(process)[2:4] == ["-m", LAUNCHER]]
            processes = sorted(launchers[0].children(), key=lambda child: (child.create_time(), child.pid))
        return [process for process in processes if _leads_session(process)]

    def alive(self) -> list[Rank]:
        """Return those found that have not ended."""
        return [rank for rank in self if rank.status is None and psutil.pid_exists(rank.pid)]

    def failed(self) -> Iterator[Rank]:
        """Look which have ended since the last time; yield those that failed."""
        for rank in self:
            if rank.status is not None:
                continue
            rank.status = zombie_status(rank.pid)
            if rank.status is None and not psutil.pid_exists(rank.pid):
                rank.status = 0  # its launcher was quicker than this process and tells the status by its own
            if rank.status:
                yield rank

    def send(self, signum: int) -> tuple[bool, list[Rank]]:
        """Send a signal to those alive that handle it; the others it would end.

        Returns (whether some handle it, those that do not).
        """
        handled, deaf = False, []
        for rank in self.alive():
            if catches(rank.pid, signum):
                os.kill(rank.pid, signum)
                handled = True
            else:
                deaf.append(rank)
        return handled, deaf

    def wait(self, seconds: float) -> None:
        """Wait until one ends, or so long.

        paddle.distributed.launch, which looks each second, takes its status away.
        """
        running = [rank.pidfd for rank in self if rank.status is None and rank.pidfd is not None]
        select.select(running if self._launched else [], [], [], seconds)

    def close(self) -> None:
        """Give back what it takes to wait for them."""
        for rank in self:
            if rank.pidfd is not None:
                os.close(rank.pidfd)


def _arguments(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # gone, or a zombie
        return []


def _leads_session(process: psutil.Process) -> bool:
    try:
        return os.getsid(process.pid) == process.pid
    except ProcessLookupError:
        return False


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError:  # gone, or an old kernel
        return None
