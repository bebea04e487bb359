"""Files as runs read them, and the room for others.

Only regular files are read: a pipe or a device in a file's place is an error, not a wait.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import sys
from pathlib import Path
from typing import BinaryIO


class NotRegular(OSError):
    """A folder, a pipe or a device in a file's place."""


def open_file(path: str | Path) -> BinaryIO:
    """Open a file for reading.

    Raises OSError, with its name, where it is not there, and NotRegular where it is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe opens, though nobody writes
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotRegular(errno.EINVAL, "is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


def real_path(path: str | Path) -> Path:
    """Return where a path's links lead. One that leads to itself stays, where `Path.resolve` raises RuntimeError."""
    return Path(os.path.realpath(path))


def read_file(path: str | Path) -> bytes:
    """Return a file's content. Raises OSError as `open_file`."""
    with open_file(path) as file:
        return file.read()


def free_bytes(folder: str | Path) -> int:
    """Return how many bytes can still be written there; in a tmpfs no more than the memory that is available.

    For a file system that does not tell its size it is sys.maxsize. Raises OSError for a folder that is not there.
    """
    usage = shutil.disk_usage(folder)
    free = usage.free if usage.total else sys.maxsize
    if not _in_memory(folder):
        return free
    lines = Path("/proc/meminfo").read_text().splitlines()
    return min(free, next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) * 1024)


def _in_memory(folder: str | Path) -> bool:
    """Return whether the folder's file system is a tmpfs (man 5 proc: mountinfo)."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return any(mount[2] == number and mount[mount.index("-") + 1] == "tmpfs" for mount in mounts)
