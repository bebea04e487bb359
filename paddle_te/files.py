"""Files as runs read them: regular ones only. A pipe or a device in a file's place is an error, not a wait."""

from __future__ import annotations

import errno
import os
import stat
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
