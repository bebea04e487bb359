"""Records of a data set, from the files that people have: JSON lines, a JSON array, Parquet and Arrow.

`find_files` says which files of a folder hold a split, by Hugging Face's names, and `read_records` yields their records
one after the other, so that the first few cost no more than that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from paddle_te.data.jsonl import parse_line

Record = tuple[str, dict[str, Any]]  # where it stands, for messages, and what it is

SUFFIXES = (".json", ".jsonl", ".parquet", ".arrow")
TRAIN, DEV = "train", "dev"
# How files and folders of a split are called, the first that is there.
NAMES = {TRAIN: ("train",), DEV: ("dev", "validation", "valid", "val", "eval", "test")}
STATE = "state.json"  # of a folder that datasets' save_to_disk has written
PART = re.compile(r"[-_.]\d+(-of-\d+)?$")  # the number of a file among those of a split
READ_CHARACTERS = 2**20
ROWS = 256  # of Parquet and Arrow at a time


def find_files(dataset: str | Path, split: str) -> list[Path]:
    """Return the files of a split, TRAIN or DEV: of a folder, or the only file of the data set, which is for training.

    Raises FileNotFoundError where there are none, and ValueError where it is not clear which they are.
    """
    path = Path(dataset).expanduser()
    if path.is_file() and split == TRAIN:
        return [path]
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    for name in NAMES[split]:
        if found := _named(path, name) or _saved(path / name):
            return found
    if split == TRAIN and (found := _saved(path)):
        return found
    names = ", ".join(f"{name}*" for name in NAMES[split])
    raise FileNotFoundError(
        f"{path}: has no data for {'training' if split == TRAIN else 'evaluation'}: files called {names} "
        f"({', '.join(SUFFIXES)}), or a folder that datasets' save_to_disk has written"
    )


def has_split(dataset: str | Path, split: str) -> bool:
    """Return whether there are files of a split."""
    try:
        return bool(find_files(dataset, split))
    except FileNotFoundError:
        return False


def _named(folder: Path, name: str) -> list[Path]:
    """Files that begin with the split's name, in the folder, in its data/, or in a folder of that name."""
    begins = (name, f"{name}-", f"{name}_", f"{name}.")
    fits = lambda path: path.stem == name or path.name.startswith(begins[1:])  # noqa: E731
    for place in (folder, folder / "data"):
        if found := [path for path in _data_files(place) if fits(path)]:
            return _of_one_split(found)
    return [] if (folder / name / STATE).is_file() else _data_files(folder / name)


def _of_one_split(files: list[Path]) -> list[Path]:
    """Raises ValueError for files that are not parts of one split, as train_sft* and train_gen*, or two forms of it."""
    splits = {PART.sub("", path.stem) + path.suffix for path in files}
    if len(splits) > 1:
        raise ValueError(
            f"{files[0].parent}: has {', '.join(sorted(splits))}, of which only one can be the split: put its files "
            "into a folder of their own"
        )
    return files


def _data_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES and path.is_file())


def _saved(folder: Path) -> list[Path]:
    """The Arrow files of a data set that save_to_disk has written, in its order."""
    state = folder / STATE
    if not state.is_file():
        return []
    try:
        files = [folder / each["filename"] for each in json.loads(state.read_bytes())["_data_files"]]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"{state}: is not what datasets' save_to_disk writes: {error}") from error
    return files


def read_records(paths: Iterable[Path], limit: int | None = None) -> Iterator[Record]:
    """Yield the records of files, no more than `limit`.

    Raises FileNotFoundError, and ValueError, with the file and the line, for a file that cannot be read, for a record
    that is no object, and where there are no records at all.
    """
    paths, count = list(paths), 0
    for record in islice((record for path in paths for record in _read(path)), limit):
        count += 1
        yield record
    if not count and limit != 0:
        raise ValueError(f"{', '.join(map(str, paths))}: has no records; it needs one JSON object a line, or an array")


def _read(path: Path) -> Iterator[Record]:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        if path.suffix in (".parquet", ".arrow"):
            yield from _rows(path)
        elif is_array(path):
            yield from _array(path)
        else:
            yield from _lines(path)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error


def _lines(path: Path) -> Iterator[Record]:
    with path.open("rb") as lines:  # json.loads decodes, so that a line in another encoding is named, too
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield f"{path}:{number}", parse_line(f"{path}:{number}", line)


def is_array(path: Path) -> bool:
    """Return whether a file begins with a bracket."""
    with path.open("rb") as file:
        while block := file.read(READ_CHARACTERS):
            if text := block.removeprefix(b"\xef\xbb\xbf").strip():
                return text.startswith(b"[")
    return False


def _array(path: Path) -> Iterator[Record]:
    """The objects of a JSON array, with the lines that they begin in; the file is read as far as they are asked for."""
    with path.open(encoding="utf-8-sig") as file:
        text = _Text(path, file)
        text.take("[")
        while text.next_is_not("]"):
            where = f"{path}:{text.line}"
            value = text.value()
            if not isinstance(value, dict):
                raise ValueError(f"{where}: is not a JSON object")
            yield where, value
            if text.next_is_not("]"):
                text.take(",")
        text.take("]")
        if text.next() is not None:
            raise ValueError(f"{path}:{text.line}: something follows the array's end")


class _Text:
    """A file of JSON that is read piece by piece. Raises ValueError, with file and line."""

    def __init__(self, path: Path, file: Any):
        self.path, self.file, self.line = path, file, 1
        self.text, self.at, self.ended = "", 0, False
        self.decoder = json.JSONDecoder()

    def next(self) -> str | None:
        """Return the next character that is no blank, at which the text then stands; None at the end."""
        while True:
            blank = len(self.text) - self.at - len(self.text[self.at :].lstrip(" \t\r\n"))
            self._advance(self.at + blank)
            if self.at < len(self.text):
                return self.text[self.at]
            if not self._more():
                return None

    def next_is_not(self, character: str) -> bool:
        return self.next() != character

    def take(self, character: str) -> None:
        if self.next() != character:
            found = "the file ends" if self.next() is None else f"{self.text[self.at]!r} stands"
            raise ValueError(f"{self.path}:{self.line}: is not JSON: {found} where {character!r} is expected")
        self._advance(self.at + 1)

    def value(self) -> Any:
        self.next()
        while True:
            try:
                value, end = self.decoder.raw_decode(self.text, self.at)
            except (ValueError, RecursionError) as error:
                if isinstance(error, RecursionError) or not self._more():
                    line = self.line + self.text.count("\n", self.at, getattr(error, "pos", self.at))
                    what = getattr(error, "msg", error)
                    raise ValueError(f"{self.path}:{line}: is not JSON: {what}") from error
                continue
            if end < len(self.text) or not self._more():  # a number may go on
                self._advance(end)
                return value

    def _advance(self, to: int) -> None:
        self.line += self.text.count("\n", self.at, to)
        self.at = to

    def _more(self) -> bool:
        """Read as much as waits already, at least: a long value is not looked through again and again."""
        if self.ended:
            return False
        self.text, self.at = self.text[self.at :], 0
        try:
            more = self.file.read(max(READ_CHARACTERS, len(self.text)))
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path}: is not JSON: {error}") from error
        self.ended = not more
        self.text += more
        return bool(more)


def _rows(path: Path) -> Iterator[Record]:
    """The rows of a Parquet or an Arrow file, without what is null: a table has each key in all of its rows."""
    import pyarrow

    number = 0
    try:
        for batch in _batches(path):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}: row {number}", _without_nulls(row)
    except pyarrow.ArrowException as error:
        what = " ".join(str(error).split())
        raise ValueError(f"{path}: row {number + 1}: cannot be read: {what}") from error


def _batches(path: Path) -> Iterator[Any]:
    if path.suffix == ".parquet":
        from pyarrow import parquet

        with parquet.ParquetFile(path) as file:
            yield from file.iter_batches(ROWS)
        return
    from pyarrow import ipc, memory_map

    with memory_map(str(path)) as source:
        try:
            stream = ipc.open_stream(source)  # what datasets writes
        except ValueError:
            source.seek(0)
            file = ipc.open_file(source)
            stream = (file.get_batch(number) for number in range(file.num_record_batches))
        for batch in stream:
            for begin in range(0, len(batch), ROWS):
                yield batch.slice(begin, ROWS)


def _without_nulls(value: Any) -> Any:
    """content stays: null is what it is beside tool calls."""
    if isinstance(value, dict):
        kept = ((name, each) for name, each in value.items() if each is not None or name == "content")
        return {name: _without_nulls(each) for name, each in kept}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
