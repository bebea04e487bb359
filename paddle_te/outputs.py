"""Files that programs write at their end: tried before the work, and kept elsewhere where writing fails after it."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from pathlib import Path

DISK_FAULTS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}


class NotWritten(OSError):
    """A file could not be written; in one line, which says where its content is instead."""


def check_file(name: str, path: str | Path) -> None:
    """Raise ValueError, in one line with what the user calls it, for a file that cannot be written. Changes nothing."""
    if fault := _fault_of_file(path):
        raise ValueError(f"{name}: {fault}")


def check_folder(name: str, path: str | Path) -> None:
    """Raise ValueError, as `check_file`, for a folder that can neither be written nor made. Changes nothing."""
    if fault := _fault_of_folder(path):
        raise ValueError(f"{name}: {fault}")


def file_argument(text: str) -> Path:
    """`check_file` as argparse wants a type, whose error it shows."""
    return _argument(text, _fault_of_file(text))


def folder_argument(text: str) -> Path:
    """`check_folder` as argparse wants a type."""
    return _argument(text, _fault_of_folder(text))


def write_file(name: str, path: str | Path, content: str | bytes) -> None:
    """Write a file, whose folder is made. A new one is there whole or not at all.

    name: what the user calls it. Raises NotWritten after the content has been written elsewhere.
    """
    path, content = Path(path), content.encode(errors="backslashreplace") if isinstance(content, str) else content
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():  # a device or a pipe, too, and a file that is mounted by itself
            path.write_bytes(content)
        else:
            _write_new(path.resolve(), content)
    except OSError as error:
        raise NotWritten(f"{name}: {path} could not be written: {_reason(error)}; {_keep(path, content)}") from error


def _argument(text: str, fault: str | None) -> Path:
    if fault:
        raise argparse.ArgumentTypeError(fault)
    return Path(text)


def _fault_of_file(path: str | Path) -> str | None:
    if str(path) in ("", "."):
        return f"{str(path)!r} is no name of a file"
    try:
        _try_file(Path(path))
    except _FAULTS as error:
        return f"{path} cannot be written: {_reason(error)}"
    return None


def _fault_of_folder(path: str | Path) -> str | None:
    if not str(path):
        return "'' is no name of a folder"
    try:
        _try_folder(Path(path).absolute())
    except _FAULTS as error:
        return f"{path} cannot be made or written: {_reason(error)}"
    return None


_FAULTS = (OSError, RuntimeError, ValueError)  # RuntimeError: a loop of links; ValueError: ours, and a zero byte


def _try_file(path: Path) -> None:
    if path.is_dir():
        raise ValueError("it is a folder")
    if path.is_file():
        path.open("ab").close()
    elif path.exists():
        if not os.access(path, os.W_OK):  # opening a pipe would wait for its reader
            raise ValueError("it may not be written")
    else:
        _try_folder(path.resolve())


def _try_folder(path: Path) -> None:
    """Make a file without a name in the nearest folder that is there."""
    there = path
    while not _is_there(there):
        there = there.parent
    if not there.is_dir():
        raise ValueError(f"{there} is no folder")
    from tempfile import TemporaryFile  # here, as it imports random numbers and compressions

    with TemporaryFile(dir=there):
        pass


def _is_there(path: Path) -> bool:
    try:
        path.lstat()  # unlike exists it tells a name that is too long
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _write_new(path: Path, content: bytes) -> None:
    partial = path.with_name(f".{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _keep(path: Path, content: bytes) -> str:
    """Write what was to become `path` to the folder for temporary files, or to standard output; say where it is."""
    from tempfile import mkstemp  # as above

    try:
        descriptor, name = mkstemp(path.suffix[:20], f"{path.stem[:50]}-")
    except OSError:
        return _print(content)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
    except OSError:
        os.unlink(name)
        return _print(content)
    return f"its content is in {name}"


def _print(content: bytes) -> str:
    sys.stdout.flush()
    sys.stdout.buffer.write(content)
    return "its content is on standard output"
