"""Lock a run's folder: one run a folder, as long as its process lives.

flock: the kernel drops the lock when the process ends, however it does. On NFS Linux asks the server for a lock of the
whole file, so that nodes exclude each other, unless the folder is mounted with `nolock` or `local_lock`: then only the
processes of one node do. Knows neither Paddle nor PaddleNLP.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path

NAME = ".lock"


class FolderInUse(ValueError):
    """Another run has the folder; one line that names its host and process."""


class FolderLock:
    """Holds `folder`, which is made if it is not there, until `release` or the process's end.

    works: False where the file system knows no locks: the folder is used without.

    Raises:
        FolderInUse: another process holds it.
    """

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder) / NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a+")  # not truncated: it may name another process
        self.works = True
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                self.works = False  # ENOLCK, EOPNOTSUPP
                return
            self._file.seek(0)
            owner = _owner(self._file.read())
            self._file.close()
            raise FolderInUse(
                f"{folder} is in use by another run, {owner}; wait for its end, stop it, or choose another folder"
            ) from error
        self._file.seek(0)
        self._file.truncate()
        mine = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        self._file.write(json.dumps(mine) + "\n")
        try:
            self._file.flush()
        except OSError as error:  # which names no file
            raise OSError(error.errno, error.strerror, str(path)) from error

    def release(self) -> None:
        self._file.close()


def _owner(text: str) -> str:
    try:
        owner = json.loads(text)
        return f"process {owner['pid']} on {owner['host']} since {owner['since']}"
    except (ValueError, KeyError, TypeError):  # it has just begun
        return "which has just begun"
