"""Run the training command so that nothing of it outlives it, and say which rank failed or hung first and why.

paddle.distributed.launch ends its ranks when one fails, but breaks progress bars into lines, prints the log of the
lowest failed rank (often a victim: "connection reset"), kills no process a rank has started (data loaders), and leaves
everything behind when it is killed itself. So this process stands above it: as Linux's "child subreaper" it inherits
every orphan, watches the ranks through /proc, and ends all of them. One Supervisor is one start of the job; `restart`
starts it anew.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from paddle_te.launch.leavings import Leavings
from paddle_te.launch.logs import Logs, size_of
from paddle_te.launch.peers import Peers
from paddle_te.launch.proc import process_state
from paddle_te.launch.ranks import LAUNCHER, Rank, Ranks
from paddle_te.launch.watchdog import STOPPED, Watchdog
from paddle_te.runs.heartbeat import LAUNCHER as LAUNCHER_VARIABLE
from paddle_te.runs.heartbeat import STACK_SIGNAL
from paddle_te.runs.screen import TERMINAL

POLL_SECONDS = 0.1
END_SECONDS = 15  # for a job to end by itself, after it was told to stop; then SIGKILL
FAILED_SECONDS = 5  # likewise after a rank has failed, since the others wait for it
TAIL_LINES = 40
STACK_LINES = 60  # of a rank
LOOK_SECONDS = 1  # between two looks at the ranks' signs
VERDICT_SECONDS = 5  # for the node whose rank all wait for to say so, before the others say that they hang
STACK_SECONDS = 2  # for the ranks to write their stacks
KILL_SECONDS = 3  # of the grace after SIGTERM that are kept for ending what has not ended by itself
HUNG = 124  # exit status of a job that hung, as timeout(1)'s
GONE = "Z", "X", ""  # states of a process that has ended
# Exit status when another node failed, or died: then it is worth another try.
OTHER_NODE_FAILED, OTHER_NODE_DIED = os.EX_UNAVAILABLE, os.EX_TEMPFAIL

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _prepare_child() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # should this process be killed
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Slurm sends it to all processes; only ranks have a use for it


def say(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)


def ending(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    hint = "; often out of memory: see dmesg" if status == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-status).name}{hint}"


@dataclass(frozen=True)
class Outcome:
    """The end of one start of the job.

    status: 0, n, or -n if signal n was the end. step: the furthest step that it had begun. stopped: by a signal to the
    launcher. node_died: another one.
    """

    status: int
    step: int
    stopped: bool = False
    node_died: bool = False

    @property
    def exit_status(self) -> int:
        return self.status if self.status >= 0 else 128 - self.status


class Supervisor:
    """One start of a command with all that it starts.

    Args:
        command: starts `processes` processes that run `python -u script`, or is that process itself.
        env: the whole environment.
        logs: where paddle.distributed.launch writes workerlog.N, of which 0 is shown on stdout, and where its own
            messages become launcher.log; used when it is what runs.
        peers: the other nodes, None on a single one.
        watchdog: None watches for no hangs.
        grace: seconds from SIGTERM until everything must have ended.
    """

    def __init__(
        self,
        command: list[str],
        env: Mapping[str, str],
        script: str,
        processes: int,
        logs: Path,
        peers: Peers | None = None,
        watchdog: Watchdog | None = None,
        grace: float = 30,
    ):
        self.peers, self.watchdog, self.grace = peers, watchdog or Watchdog(), grace
        self.launched = processes > 1 or peers is not None  # by paddle.distributed.launch
        self.logs = Logs(Path(logs))
        self.screen = self.logs.copy(0)
        self.failed: Rank | None = None  # the first one
        self.hung: str | None = None  # why
        self._hang_since: float | None = None
        self.first_to_fail = False  # among the nodes
        self.stopped_by: int | None = None
        self.deadline: float | None = None
        self.watchdog.begin()
        self.leavings = Leavings()
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self.child = self._spawn(command, env)
        self.ranks = Ranks(self.child.pid, self.launched, script, processes, peers.rank if peers else 0)
        self.old_handlers = self._take_signals()

    def _spawn(self, command: list[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        terminal = {TERMINAL: "1"} if self.launched and sys.stdout.isatty() else {}
        with open(self.logs.launcher, "ab") if self.launched else contextlib.nullcontext() as messages:
            return subprocess.Popen(
                command,
                env=dict(env) | {LAUNCHER_VARIABLE: self.watchdog.name} | terminal,
                stdin=subprocess.DEVNULL,
                stdout=messages,
                stderr=messages,
                start_new_session=True,
                preexec_fn=_prepare_child,
            )

    def _take_signals(self) -> dict[int, Any]:
        """Handle the signals that stop, save or are passed on. Return {signal: its handler before}."""
        handlers: dict[int, Callable[[int, FrameType | None], Any]] = {
            signal.SIGINT: self._stop,
            signal.SIGTERM: self._save,
            signal.SIGUSR1: self._forward,
        }
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup leaves it
            handlers[signal.SIGHUP] = self._stop
        return {signum: signal.signal(signum, handler) for signum, handler in handlers.items()}

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        """End all of it, with what has not been saved."""
        if self.stopped_by is None:
            self.stopped_by = signum
            self.deadline = time.monotonic() + END_SECONDS
            say(f"{signal.Signals(signum).name}: stopping, at most {END_SECONDS} s")
            self._terminate()
        else:
            self.deadline = 0.0  # told twice: at once

    def _save(self, signum: int, frame: FrameType | None) -> None:
        """Let the ranks save a checkpoint and end, on SIGTERM, of Slurm, Kubernetes or a user."""
        if self.stopped_by is not None:
            self.deadline = 0.0
            return
        self.stopped_by = signum
        if self.failed:  # what still runs waits for that rank, and has seconds left
            return
        seconds = max(self.grace - KILL_SECONDS, 0)
        self.deadline = time.monotonic() + seconds
        say(f"SIGTERM: the ranks are asked to save a checkpoint and to end within {seconds:g} s (TERM_GRACE)")
        if not self._forward(signal.SIGUSR1):  # none of them would save
            self._terminate()

    def _terminate(self) -> None:
        """End what runs at once.

        SIGTERM lets a profiler around it write its report. The ranks get SIGKILL: their own handler of SIGTERM would
        save and train on.
        """
        self.ranks.find()
        for rank in self.ranks.alive():
            os.kill(rank.pid, signal.SIGKILL)
        self.child.terminate()

    def _forward(self, signum: int, frame: FrameType | None = None) -> bool:
        """Send a signal only to the ranks: it would end paddle.distributed.launch, and ranks without a handler for it.

        Returns whether some rank has one.
        """
        self.ranks.find()
        ending = self.watchdog.ending()
        handled, deaf = self.ranks.send(signum)
        for rank in deaf:
            if rank.number not in ending:
                say(f"rank {rank.number} does not handle {signal.Signals(signum).name}; not sent")
        return handled

    def _watch_ranks(self) -> None:
        self.ranks.find()
        for sign in self.watchdog.failures():
            for rank in self.ranks:
                if rank.number == sign.rank:
                    rank.told = sign.status
                    self._fail(rank)
        for rank in self.ranks.failed() if self.launched else ():
            self._fail(rank)

    def _fail(self, rank: Rank) -> None:
        """End the job because of this rank, unless it is ending already."""
        if self.deadline is None:
            self.failed = rank
            self.deadline = time.monotonic() + FAILED_SECONDS
            self._tell_peers(f"rank {rank.number} {ending(rank.exit_status)}")

    def _watch_signs(self) -> None:
        """Look whether ranks still go on; end the job where they do not."""
        alive = {rank.number for rank in self.ranks.alive()}
        for seen in self.watchdog.newly_stopped(alive):
            say(f"rank {seen.sign.rank} is stopped by a signal (process {seen.sign.pid}); the others will wait for it")
        reason = self.watchdog.overdue(alive)
        if reason is None or self.deadline is not None:
            self._hang_since = None
            return
        awaited = self.watchdog.awaited(alive)
        self._hang_since = self._hang_since or time.monotonic()
        if self.peers and not awaited and time.monotonic() < self._hang_since + VERDICT_SECONDS:
            return  # the rank that all wait for may be another node's, which will say so
        self._explain_hang(reason, awaited, alive)
        causes = "; ".join(f"rank {rank}: {why}" for rank, why in awaited.items())
        self.hung = f"{reason}. {causes or 'All ranks of this node are in the same place'}"
        self.deadline = time.monotonic()
        self._tell_peers(self.hung)

    def _explain_hang(self, reason: str, awaited: Mapping[int, str], alive: set[int]) -> None:
        """Print where each rank is, which of them the others wait for, and all stacks."""
        say(reason)
        for line in self.watchdog.table(alive):
            say(line)
        others = sorted(alive - awaited.keys())
        for number, why in awaited.items():
            say(f"rank {', '.join(map(str, others)) or 'none'} wait for rank {number}: {why}")
        if not awaited:
            say("all ranks of this node are in the same place: a collective that hangs, or another node's rank")
        ends = {rank.local: size_of(self.logs.of(rank.local)) for rank in self.ranks}
        self.ranks.send(STACK_SIGNAL)
        time.sleep(STACK_SECONDS)
        for rank in self.ranks.alive() if self.launched else []:  # a single one has written to this screen
            lines = self.logs.lines(self.logs.of(rank.local), ends[rank.local])
            why = "it is stopped" if process_state(rank.pid) in STOPPED else "it has written none"
            say(f"stacks of rank {rank.number}:" if lines else f"no stacks of rank {rank.number}: {why}")
            for line in lines[:STACK_LINES]:
                print(f"[rank {rank.number}] {line}", file=sys.stderr)

    def run(self) -> Outcome:
        """Wait for the end.

        Returns:
            Outcome: with the first failed rank's exit status, else the command's; -n where signal n was the end.
        """
        try:
            next_look = 0.0
            while self.child.poll() is None and (self.deadline is None or time.monotonic() < self.deadline):
                self._watch_ranks()
                self._show_screen()
                self.leavings.look()
                if time.monotonic() >= next_look:
                    next_look = time.monotonic() + LOOK_SECONDS
                    self._watch_signs()
                if self.peers and self.peers.failure and self.deadline is None:
                    say(f"{self.peers.failure}: stopping, at most {END_SECONDS} s")
                    self.deadline = time.monotonic() + END_SECONDS
                    self._terminate()
                self.ranks.wait(POLL_SECONDS)
            self._tell_of_stuck()
        finally:
            self._end_all()
            self._show_screen()
            for signum, handler in self.old_handlers.items():
                signal.signal(signum, handler)
        status = self._status()
        if self.peers and status and not self.peers.failure:
            self._tell_peers("was stopped" if self.stopped_by else ending(status))
        if status:
            self._explain(status)
        died = bool(self.peers and self.peers.died)
        return Outcome(status, self.watchdog.step, stopped=self.stopped_by is not None, node_died=died)

    def _show_screen(self) -> None:
        """Show what rank 0 writes; but not how it suffers from another rank's end, whose own words are shown."""
        if self.failed is None or self.failed.local == 0:
            self.screen.catch_up()

    def _tell_of_stuck(self) -> None:
        """Name a rank that ended after an error and is still there."""
        if self.failed and self.failed.told and process_state(self.failed.pid) not in GONE:
            say(f"rank {self.failed.number} failed {FAILED_SECONDS} s ago and its process does not end: it is killed")

    def _status(self) -> int:
        """Return 0, n, or -n if signal n was the end."""
        if self.stopped_by is not None:
            return -self.stopped_by
        if self.peers and self.peers.failure and not self.first_to_fail:
            return OTHER_NODE_DIED if self.peers.died else OTHER_NODE_FAILED
        if self.hung:
            return HUNG
        return self.failed.exit_status if self.failed else self.child.returncode

    def _tell_peers(self, failure: str) -> None:
        self.first_to_fail = self.peers is not None and self.peers.report(failure)

    def _end_all(self) -> None:
        """SIGKILL what is left below this process, again until nothing is: it has had its time to end by itself."""
        deadline = time.monotonic() + END_SECONDS
        self.leavings.look(now=True)
        while (left := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
            for process in left:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    pass
            self.child.wait()
            psutil.wait_procs(left, timeout=1)
        self.left = [process.pid for process in left]  # in the kernel, on a dead file system for instance
        self.leavings.remove()
        self.ranks.close()

    def _explain(self, status: int) -> None:
        if self.failed and self.launched:
            log, rank = self.logs.of(self.failed.local), f"rank {self.failed.number}"
            self._show_end(log, f"{rank} {ending(self.failed.exit_status)}; the end of its log, {log}:", rank)
        elif self.launched and self._status() == self.child.returncode:
            log = self.logs.launcher
            self._show_end(log, f"{LAUNCHER} {ending(status)}; the end of its log, {log}:", "launcher")
        if self.peers and self.peers.failure and not self.first_to_fail:
            say(self.peers.failure)
        left = f"processes left that cannot be killed: {self.left}" if self.left else "no process is left"
        where = f"; logs: {self.logs.folder}" if self.launched else ""
        end = "was stopped" if self.stopped_by else "hung" if self.hung else ending(status)
        say(f"the job {end}; {left}{where}")

    def _show_end(self, log: Path, title: str, source: str) -> None:
        """Show what this start has last written to a log."""
        say(title)
        for line in self.logs.lines(log)[-TAIL_LINES:]:
            print(f"[{source}] {line}", file=sys.stderr)
