"""Write files and folders: a new folder comes into being whole or not at all, and goes through to the disk."""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paddle_te.files import open_file, read_file, real_path
from paddle_te.manifest import sync
from paddle_te.outputs import check_folder
from paddle_te.weights.tensors import CheckpointError, sync_file

CHECKSUMS = "checksums.json"  # {file name: SHA-256}


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """Make a folder that appears under `path`, complete, when the block ends without an error; otherwise nothing does.

    Yields the folder to write into, `path`.incomplete beside it; what a killed run left there is removed first. A
    `path` that is a link is followed. Raises as `check_new`, and CheckpointError when another process is writing it.
    """
    check_new(path)
    path = real_path(path)  # a link cannot be replaced by a folder
    work = path.with_name(path.name + ".incomplete")
    work.mkdir(parents=True, exist_ok=True)
    with _locked_folder(work):
        try:
            for left in work.iterdir():
                left.unlink()
            yield work
            sync(work)
            os.rename(work, path)  # replaces an empty folder, refuses one that was filled meanwhile
            sync(path.parent)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise


@contextmanager
def _locked_folder(path: Path) -> Iterator[None]:
    """Hold a folder's lock, which ends with the process however it dies."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not path.exists() or not os.path.samestat(os.fstat(descriptor), path.stat()):
            raise BlockingIOError  # the other process has just finished
        yield
    except BlockingIOError:
        raise CheckpointError(f"{path}: another process is writing it") from None
    finally:
        os.close(descriptor)


def check_new(path: str | Path) -> None:
    """Raise CheckpointError unless `path` is free to become a new folder: not there, or empty and replaceable."""
    path = Path(path)
    if path.is_dir() and any(path.iterdir()):
        raise CheckpointError(f"{path}: not empty; the output must be a new or an empty folder")
    check_place(path)


def check_place(path: str | Path) -> None:
    """Raise CheckpointError unless `path` can become a new folder, once what a folder there holds is gone."""
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path}: is a file; the output must be a new folder")
    if os.path.ismount(path):
        raise CheckpointError(f"{path}: a mount point cannot be replaced by a complete folder; give a folder in it")
    try:
        check_folder("the output", real_path(path).parent)  # it is written beside its place
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def read_json(path: str | Path) -> Any:
    """Return the content of a JSON file. Raises CheckpointError for one that cannot be read, or is damaged."""
    try:
        return json.loads(read_file(path).decode("utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from None


def write_json(path: str | Path, value: object) -> None:
    """Write a JSON file through to the disk."""
    with open(path, "x", encoding="utf-8") as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")
        sync_file(file)


def copy_file(source: str | Path, target: str | Path) -> None:
    """Copy a file through to the disk."""
    with open_file(source) as read, open(target, "xb") as written:
        shutil.copyfileobj(read, written)
        sync_file(written)


def write_checksums(folder: Path, workers: int = 1) -> None:
    """Write checksums.json for all files of a folder."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    names = sorted(str(path) for path in paths if path.name != CHECKSUMS)
    with ThreadPoolExecutor(workers) as pool:
        write_json(
            folder / CHECKSUMS, dict(zip(names, pool.map(lambda name: _sha256(folder / name), names), strict=True))
        )


def verify_checksums(folder: Path, workers: int = 1) -> None:
    """Compare a folder's files with its checksums.json.

    Raises CheckpointError where there is none, or for a file that is missing or different.
    """
    path = folder / CHECKSUMS
    if not path.is_file():
        raise CheckpointError(f"{path}: missing; --verify needs the checksums that --checksums writes")
    checksums = read_json(path)
    if not isinstance(checksums, dict):
        raise CheckpointError(f"{path}: not a list of checksums by file name")

    def verify(name: str) -> None:
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name}: missing; {CHECKSUMS} names it")
        if _sha256(folder / name) != checksums[name]:
            raise CheckpointError(f"{folder / name}: differs from its checksum in {CHECKSUMS}: damaged or changed")

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(verify, checksums))


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open_file(path) as file:
        while block := file.read(2**22):
            digest.update(block)
    return digest.hexdigest()
