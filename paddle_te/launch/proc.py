"""What Linux tells of a process in /proc (man 5 proc)."""

from __future__ import annotations

import os
from pathlib import Path

# Places in what stat_fields returns. The manual counts from 1; the first two fields, pid and name, are left out.
STATE, USER_TIME, SYSTEM_TIME, EXIT_CODE = (number - 3 for number in (3, 14, 15, 52))


def stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the process's name, which may hold spaces; [] for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def process_state(pid: int) -> str:
    """Return the letter: R running, S sleeping, D waiting for a device, T stopped, t traced, Z ended; "" if gone."""
    fields = stat_fields(pid)
    return fields[STATE] if fields else ""


def cpu_seconds(pid: int) -> float:
    """Return what the process has computed so far, all threads together; 0 if it is gone."""
    fields = stat_fields(pid)
    ticks = int(fields[USER_TIME]) + int(fields[SYSTEM_TIME]) if fields else 0
    return ticks / os.sysconf("SC_CLK_TCK")


def zombie_status(pid: int) -> int | None:
    """Exit status of a process that has ended and is not yet waited for; None while it runs or when it is gone."""
    fields = stat_fields(pid)
    if not fields or fields[STATE] not in "ZX":
        return None
    return os.waitstatus_to_exitcode(int(fields[EXIT_CODE]))


def catches(pid: int, signum: int) -> bool:
    """Return whether the process has a handler for the signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(mask, 16) >> (signum - 1) & 1)
