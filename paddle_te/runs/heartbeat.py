"""Send a rank's signs of life to its launcher: one small datagram wherever a step, save or evaluation begins or ends.

The launcher names a Unix socket in the environment. It is an abstract one (man 7 unix), so that no file is left behind,
and it hardly waits: a sign that finds the socket full for 5 ms, or gone, is lost, and training goes on.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

LAUNCHER = "PADDLE_TE_LAUNCHER"  # environment variable: the socket's name; set for every rank that a launcher starts
STACK_SIGNAL = signal.SIGUSR2  # the launcher's to the ranks of a job that hangs: each writes its threads' stacks

TRIES, LAST_TRIES = 5, 1000  # of a sign, a millisecond apart; of the last one

# What a rank may be doing. The order is that within a step, for who is behind whom.
STARTING, STEPPING, SAVING, EVALUATING, LOADING, ENDING, FAILED = PHASES = (
    "starting",
    "in a step",
    "saving",
    "evaluating",
    "loading data",
    "ending",
    "ending after an error",
)


@dataclass(frozen=True)
class Sign:
    """What a rank does from now on; step: the one it is in, or has just ended (0 before the first).

    pid: as the kernel tells it, in the launcher's own numbering. status: the exit status of a rank that has FAILED.
    """

    rank: int
    phase: str
    step: int
    pid: int
    status: int = 0


def has_launcher(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a launcher listens."""
    return bool(environ.get(LAUNCHER))


class Heartbeat:
    """Sends this rank's signs; does nothing where no launcher listens."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self.rank = int(environ.get("PADDLE_TRAINER_ID", "0"))
        self._address = f"\0{environ[LAUNCHER]}" if has_launcher(environ) else None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        weakref.finalize(self, self._socket.close)  # PaddleNLP takes a warning of an open one for a fault of weights

    def beat(self, phase: str, step: int = 0) -> None:
        """Tell what this rank does from now on."""
        self._send(TRIES, phase=phase, step=step)

    def fail(self, status: int) -> None:
        """Send the last sign: this rank ends with that status, and the launcher need not wait until it has."""
        self._send(LAST_TRIES, phase=FAILED, step=0, status=status)

    def _send(self, tries: int, **sign: object) -> None:
        if self._address is None:
            return
        data = json.dumps(dict(rank=self.rank, **sign)).encode()
        for _ in range(tries):
            try:
                self._socket.sendto(data, self._address)
                return
            except BlockingIOError:  # the launcher is about to read
                time.sleep(0.001)
            except OSError:  # it is gone
                return
