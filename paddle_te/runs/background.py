"""Save checkpoints in the background: write them to memory, then copy them to the disk while training goes on.

Each rank writes its files as ever, but into a staging folder of its own (in /dev/shm), which takes as long as a copy
from the device. A thread then copies them into the checkpoint's folder, writes them through to the disk, and leaves a
mark of the rank there, which says what it has copied; the checksums are computed on the way. When all ranks' marks are
there, rank 0's thread removes them, writes the manifest and marks the checkpoint complete: `checkpoints` says what that
promises. The ranks meet only in the folder, since collectives belong to the main thread; so all must see the same
folder. At most one checkpoint is on its way.

A staging folder is locked while its process lives (flock on the folder), so that any later process can tell, and
remove, what a killed one has left. Knows neither Paddle nor PaddleNLP.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paddle_te.manifest import FileRecord, Manifest, mark_complete, record, sync
from paddle_te.runs.checkpoints import CheckpointNotSaved, flush_names, not_saved

PREFIX = "paddle_te-staging-"
RANK_MARK = ".saved."  # and the rank: its files are on the disk
POLL_SECONDS = 0.2
NICENESS = 10  # of the thread: training comes first


def _lock(folder: str | Path, wait: bool) -> int | None:
    """Return a descriptor that holds the folder's lock; None where another process holds it, or the folder is gone."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # gone, or another user's
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        os.stat(folder)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def remove_leftovers(staging_dir: str | Path) -> None:
    """Remove the staging folders of processes that have ended."""
    for folder in Path(staging_dir).glob(f"{PREFIX}*"):
        if (descriptor := _lock(folder, wait=False)) is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)


class BackgroundSaver:
    """One rank's staging folder, and the thread that copies what is in it.

    Args:
        staging_dir: where the folder is made, on a file system of this node.
        rank, ranks: this process, and the number of all that save the same checkpoints.
    """

    def __init__(self, staging_dir: str | Path, rank: int = 0, ranks: int = 1) -> None:
        self.rank, self.ranks = rank, ranks
        self._error: CheckpointNotSaved | None = None
        self._thread: threading.Thread | None = None
        descriptor = None
        while descriptor is None:  # until it is locked before another process takes it for a leftover
            self.folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=staging_dir))
            descriptor = _lock(self.folder, wait=True)
        self._descriptor = descriptor

    def start(
        self,
        staged: str | Path,
        folder: str | Path,
        finish: Callable[[], None] = lambda: None,
        run: dict[str, Any] | None = None,
    ) -> None:
        """Copy `staged`, in this rank's staging folder, into the checkpoint's folder, and free it.

        finish: called by rank 0's thread when the checkpoint is complete. run: what its manifest says of the run.
        """
        self.wait()
        arguments = Path(staged), Path(folder), finish, run or {}
        self._thread = threading.Thread(target=self._run, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self, staged: Path, folder: Path, finish: Callable[[], None], run: dict[str, Any]) -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)  # Linux: of this thread alone
            self._mark(folder, _move(staged, folder))
            if self.rank == 0:
                mark_complete(folder, Manifest(self._collect(folder), run))
                finish()
        except Exception as error:  # told by `check`, in the main thread
            self._error = not_saved(folder, error)
            self._error.__cause__ = error
        finally:
            shutil.rmtree(staged, ignore_errors=True)

    def _mark(self, folder: Path, files: Mapping[str, FileRecord]) -> None:
        mark = folder / f"{RANK_MARK}{self.rank}"
        partial = mark.with_name(f"{mark.name}.partial")
        partial.write_text(json.dumps({name: asdict(entry) for name, entry in files.items()}))
        partial.replace(mark)

    def _collect(self, folder: Path) -> dict[str, FileRecord]:
        """Wait for all ranks' marks, remove them, and return {name: FileRecord} of all ranks' files."""
        marks = {f"{RANK_MARK}{rank}" for rank in range(self.ranks)}
        while not marks <= set(os.listdir(folder)):  # NFS asks the server for a listing, not always for one file
            time.sleep(POLL_SECONDS)
        files: dict[str, FileRecord] = {}
        for mark in sorted(marks):
            for name, entry in json.loads((folder / mark).read_text()).items():
                mine = FileRecord(**entry)
                several = files.setdefault(name, mine) != mine  # ranks wrote different files of one name: which is it?
                files[name] = record(folder / name) if several else mine
            (folder / mark).unlink()
        return files

    def check(self) -> None:
        """Raise CheckpointNotSaved, once, if the latest checkpoint could not be saved."""
        error, self._error = self._error, None
        if error:
            raise error

    def in_flight(self) -> bool:
        """Return whether a checkpoint is on its way."""
        return self._thread is not None and self._thread.is_alive()

    def join(self) -> None:
        """Wait until this rank's files of the latest checkpoint, on rank 0 all files, are on the disk, or failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        """`join` and `check`."""
        self.join()
        self.check()

    def close(self) -> None:
        """Remove the staging folder; a checkpoint that is still on its way is lost."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._descriptor)


def _move(staged: Path, folder: Path) -> dict[str, FileRecord]:
    """Copy a folder's files and write them through to the disk; free each as soon as it is there.

    Returns {name: FileRecord} of what was copied, computed on the way.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for path in sorted(staged.rglob("*")):  # a folder comes before what is in it
        name = path.relative_to(staged)
        if path.is_dir():
            (folder / name).mkdir(exist_ok=True)
            continue
        files[name.as_posix()] = _copy(path, folder / name)
        sync(folder / name)
        path.unlink()
    flush_names(folder)
    return files


def _copy(path: Path, copy: Path) -> FileRecord:
    with open(copy, "wb") as file:
        return record(path, file)
