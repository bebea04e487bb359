"""Notice that a job hangs, and tell which rank the others wait for.

The ranks send signs of life (`paddle_te.runs.heartbeat`). In a collective all wait for the slowest, so that a job that
hangs is silent on all ranks: who is behind is seen from the last signs, and a stopped process from its state in /proc.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass, replace

from paddle_te.launch.proc import cpu_seconds, process_state
from paddle_te.runs.heartbeat import ENDING, FAILED, LOADING, PHASES, STEPPING, Sign

MEDIANS = 10  # a step may take so many times the median step's time
STOPPED_SECONDS = 10  # a process that is stopped for so long is named, long before the job counts as hung
STOPPED = "T", "t"  # by a signal, by a debugger
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


@dataclass
class Seen:
    """A sign, and when it came (time.monotonic)."""

    sign: Sign
    at: float

    def place(self) -> tuple[int, int]:
        return self.sign.step, PHASES.index(self.sign.phase)


class Watchdog:
    """Reads the signs of this node's ranks.

    Args:
        step_timeout: seconds that a step may take at least, 0 for as long as it likes; `MEDIANS` median steps if those
            are longer.
        start_timeout: likewise for what is no step: the start with the first step, saving, evaluating, ending.
    """

    def __init__(self, step_timeout: float = 0, start_timeout: float = 0) -> None:
        self.step_timeout, self.start_timeout = step_timeout, start_timeout
        self.name = f"paddle_te-{os.urandom(8).hex()}"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.socket.bind(f"\0{self.name}")
        self._lock = threading.RLock()
        self.begin()
        threading.Thread(target=self._receive, daemon=True).start()

    def begin(self) -> None:
        """Forget what earlier processes have sent."""
        self.seen: dict[int, Seen] = {}  # by rank
        self.first_steps: dict[int, int] = {}  # rank -> the first step that it has done
        self._times: deque[float] = deque(maxlen=101)  # seconds of the latest steps
        self._looked = time.monotonic()
        self._stopped_since: dict[int, float] = {}

    def signs(self) -> dict[int, Seen]:
        """Return the latest sign of each rank."""
        with self._lock:
            return dict(self.seen)

    @property
    def step(self) -> int:
        """The furthest step that a rank has begun; 0 before."""
        return max((seen.sign.step for seen in self.signs().values()), default=0)

    def failures(self) -> list[Sign]:
        """Return the signs of ranks that have said that they end after an error, the first one first."""
        failed = [seen for seen in self.signs().values() if seen.sign.phase == FAILED]
        return [seen.sign for seen in sorted(failed, key=lambda seen: seen.at)]

    def ending(self) -> set[int]:
        """Return the ranks that are at their end, good or bad."""
        return {rank for rank, seen in self.signs().items() if seen.sign.phase in (ENDING, FAILED)}

    def _receive(self) -> None:
        """Receive signs, in a thread of its own: the kernel keeps no more than ten that are not read."""
        while True:
            data, extra, _, _ = self.socket.recvmsg(4096, socket.CMSG_SPACE(CREDENTIALS.size))
            pid, user, _ = CREDENTIALS.unpack(extra[0][2])
            if user != os.getuid():  # any user of the machine may write to the socket
                continue
            try:
                sign = Sign(**json.loads(data), pid=pid)
                PHASES.index(sign.phase)
            except (ValueError, TypeError):
                continue
            with self._lock:
                self._take(sign, time.monotonic())

    def _take(self, sign: Sign, now: float) -> None:
        before = self.seen.get(sign.rank)
        if before and sign.phase == FAILED:
            sign = replace(sign, step=before.sign.step)  # who fails does not know
        elif before and before.sign.phase == STEPPING and sign.phase != STEPPING:
            if sign.rank in self.first_steps:
                self._times.append(now - before.at)
            self.first_steps.setdefault(sign.rank, sign.step)
        self.seen[sign.rank] = Seen(sign, now)

    def _limit(self, seen: Seen) -> float:
        """Return the seconds that may pass until the rank's next sign; 0: any number."""
        in_a_step = seen.sign.phase in (STEPPING, LOADING) and seen.sign.rank in self.first_steps
        if in_a_step or process_state(seen.sign.pid) in STOPPED:  # who is stopped is not slow
            median = statistics.median(self._times) if self._times else 0.0
            return self.step_timeout and max(self.step_timeout, MEDIANS * median)
        return self.start_timeout

    def overdue(self, alive: set[int]) -> str | None:
        """Say why the job counts as hung, by the rank that has been silent for longest; None while it does not.

        alive: numbers of the ranks that have not ended.
        """
        now = time.monotonic()
        if (pause := now - self._looked) > STOPPED_SECONDS:  # this process was stopped, the ranks perhaps too
            for seen in self.signs().values():
                seen.at += pause
        self._looked = now
        late = [seen for rank, seen in self.signs().items() if rank in alive and 0 < self._limit(seen) < now - seen.at]
        if not late:
            return None
        oldest = min(late, key=lambda seen: seen.at)
        sign, limit = oldest.sign, self._limit(oldest)
        variable = "START_TIMEOUT" if limit == self.start_timeout else "STEP_TIMEOUT"
        return (
            f"the job hangs: no sign of rank {sign.rank} for {now - oldest.at:.0f} s, {sign.phase} (step {sign.step}), "
            f"which may take {limit:.0f} s ({variable})"
        )

    def awaited(self, alive: set[int]) -> dict[int, str]:
        """Return {rank: why} of those that the others wait for: stopped, or else behind the others; {} if none is.

        A rank that a debugger has stopped counts too.
        """
        seen = {rank: each for rank, each in self.signs().items() if rank in alive}
        stopped = [rank for rank in seen if process_state(seen[rank].sign.pid) in STOPPED]
        if stopped:
            return {rank: f"its process {seen[rank].sign.pid} is stopped (SIGSTOP, or a debugger)" for rank in stopped}
        if not seen:
            return {}
        last, first = (f(each.place() for each in seen.values()) for f in (min, max))
        behind = [rank for rank, each in seen.items() if each.place() == last] if last != first else []
        return {rank: f"it is behind the others: step {last[0]}, {PHASES[last[1]]}" for rank in behind}

    def newly_stopped(self, alive: set[int]) -> list[Seen]:
        """Return the signs of ranks whose process has been stopped for `STOPPED_SECONDS`, once each."""
        now, found = time.monotonic(), []
        for rank, seen in self.signs().items():
            if rank not in alive or process_state(seen.sign.pid) != "T":
                self._stopped_since.pop(rank, None)
            elif now - self._stopped_since.setdefault(rank, now) > STOPPED_SECONDS:
                self._stopped_since[rank] = float("inf")
                found.append(seen)
        return found

    def table(self, alive: set[int]) -> list[str]:
        """Return a line a rank: where it was last, for how long, and what its process has done meanwhile."""
        signs = self.signs()
        before = {rank: cpu_seconds(seen.sign.pid) for rank, seen in signs.items()}
        time.sleep(1)
        now, lines = time.monotonic(), []
        names = {
            "R": "runs",
            "S": "sleeps",
            "D": "waits for a device or disk",
            "T": "stopped",
            "t": "traced",
            "": "gone",
        }
        for rank, seen in sorted(signs.items()):
            sign, state = seen.sign, process_state(seen.sign.pid)
            busy = cpu_seconds(sign.pid) - before[rank]
            doing = f"process {sign.pid} {names.get(state, state)}, {busy:.1f} CPU seconds in the last one"
            doing = doing if rank in alive else "has ended"
            lines.append(f"rank {rank}: step {sign.step}, {sign.phase} for {now - seen.at:.0f} s; {doing}")
        return lines
