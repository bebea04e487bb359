"""Read JSON lines, plain or compressed, in chunks that one task of a worker takes."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")  # taken from a folder; a file given by name may have any
READ_BYTES = 1 << 18
CHUNK_BYTES = 1 << 18  # of text for one task of a worker: large against its cost, small against the corpus


class PrepareError(ValueError):
    """What is wrong with the input or the arguments, and what to do."""


@dataclass
class Chunk:
    """Consecutive lines of one file, the number of the first, and the bytes of the file read for them."""

    path: Path
    first_line: int
    lines: list[bytes]
    bytes_read: int


def find_inputs(paths: Iterable[str | Path]) -> list[Path]:
    """Return the files named by `paths` (files or folders, searched recursively), sorted within a folder."""
    found = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = [file for file in _files_in(path) if file.name.endswith(SUFFIXES)]
            if not inside:
                raise PrepareError(f"no {', '.join(SUFFIXES)} file in the folder {path}; name files that end otherwise")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise PrepareError(f"input {path} does not exist: give files or folders of JSON lines to --input_path")
    return found


def find_others(paths: Iterable[str | Path]) -> list[Path]:
    """Return the files that `find_inputs` leaves in folders for their names, hidden ones and corpora aside."""
    known = (*SUFFIXES, ".bin", ".idx")
    return [
        file
        for folder in map(Path, paths)
        for file in _files_in(folder)
        if not (file.name.endswith(known) or any(part.startswith(".") for part in file.relative_to(folder).parts))
    ]


def _files_in(folder: Path) -> list[Path]:
    """Return a folder's files, searched recursively, sorted; none where it is no folder."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def import_zstandard(path: Path) -> ModuleType:
    """Import zstandard, which is optional, unlike all else that is imported here: only .zst files need it."""
    try:
        import zstandard
    except ImportError as error:
        raise PrepareError(f"{path} needs the package zstandard: pip install zstandard") from error
    return zstandard


class Decompressor:
    """Decompress a file, which may hold several compressed streams, one after another.

    open_stream: begins one. damage: what a stream raises for bytes that are none of it.
    """

    def __init__(self, path: Path, open_stream: Callable[[], Any], damage: type[Exception]) -> None:
        self._path, self._open_stream, self._damage = path, open_stream, damage
        self._stream: Any = None

    @classmethod
    def of(cls, path: Path) -> Decompressor | None:
        """Return the one for a file of that name; None for a plain one."""
        if path.suffix == ".gz":
            return cls(path, partial(zlib.decompressobj, wbits=31), zlib.error)
        if path.suffix == ".zst":
            zstandard = import_zstandard(path)
            return cls(path, zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj, zstandard.ZstdError)
        return None

    def decompress(self, data: bytes) -> bytes:
        """Return what the file's next bytes stand for. Raises PrepareError."""
        out = []
        try:
            while data:
                stream = self._stream or self._open_stream()
                out.append(stream.decompress(data))
                data, self._stream = (stream.unused_data, None) if stream.eof else (b"", stream)
        except self._damage as error:
            raise PrepareError(f"{self._path} is damaged or not a {self._path.suffix} file: {error}") from error
        return b"".join(out)

    def check_end(self) -> None:
        """Raise PrepareError where the file ends within a stream."""
        if self._stream is not None:
            raise PrepareError(f"{self._path} is cut short: its last compressed stream does not end")


def read_blocks(path: Path) -> Iterator[tuple[bytes, int]]:
    """Yield (uncompressed block, bytes of the file read for it); an incomplete or damaged file is an error."""
    decompressor = Decompressor.of(path)
    with open(path, "rb") as file:
        while data := file.read(READ_BYTES):
            yield decompressor.decompress(data) if decompressor else data, len(data)
    if decompressor:
        decompressor.check_end()


def read_chunks(path: Path) -> Iterator[Chunk]:
    """Yield `Chunk`s of the file's lines, in order. Lines end at a line feed only, as JSON lines do."""
    pending, line_number, bytes_read = [], 1, 0
    for block, size in read_blocks(path):
        bytes_read += size
        pending.append(block)
        if b"\n" not in block or sum(map(len, pending)) < CHUNK_BYTES:
            continue
        *lines, rest = b"".join(pending).split(b"\n")
        pending = [rest]
        for part in _split_by_bytes(lines):
            yield Chunk(path, line_number, part, bytes_read)
            line_number, bytes_read = line_number + len(part), 0
    yield Chunk(path, line_number, b"".join(pending).split(b"\n"), bytes_read)


def _split_by_bytes(lines: Iterable[bytes]) -> Iterator[list[bytes]]:
    part, size = [], 0
    for line in lines:
        part.append(line)
        size += len(line)
        if size >= CHUNK_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part
