"""A corpus of token ids, PREFIX.bin and PREFIX.idx, as pretraining reads it: where it lies, and whether it is whole.

The launcher asks before it starts anything, each process before it builds an index of samples. PREFIX.idx is
Megatron-LM's: a header, the documents' sizes in tokens, their places in PREFIX.bin in bytes, and the document index.
"""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paddle_te.files import open_file, read_file

HOW = "make one with paddle-te prepare-data, or use random tokens (--mock_data true, of the launcher MOCK_DATA=1)"
MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, code of the token ids' type, entries of sizes and of documents
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16", 9: "uint32", 10: "uint64"}
CHUNK = 1 << 16  # entries that are compared at a time, within the processor's cache
SCANNED_TOKENS = 1 << 24  # of a corpus that does not say its largest token id


class CorpusError(ValueError):
    """A corpus that is not there or damaged; the message says which file, what is wrong, and what to do."""


@dataclass(frozen=True)
class Index:
    """What PREFIX.idx says, mapped from the file.

    sizes: tokens of each entry; pointers: where it begins in PREFIX.bin, in bytes; documents: the first entry of
    each document, and the end.
    """

    dtype: np.dtype[Any]
    sizes: npt.NDArray[Any]
    pointers: npt.NDArray[Any]
    documents: npt.NDArray[Any]

    @property
    def bytes(self) -> int:
        """Bytes that PREFIX.bin must have, by the end of the last entry."""
        return int(self.pointers[-1]) + int(self.sizes[-1]) * self.dtype.itemsize if len(self.sizes) else 0


def find_data(input_dir: str | None) -> list[str | float]:
    """Return what PaddleNLP takes as data_prefix: [prefix], or weights and prefixes in turn.

    Raises:
        CorpusError: no input_dir, or no complete .bin/.idx pair there.
    """
    if not input_dir:
        raise CorpusError(f"input_dir is missing: give the folder of a .bin/.idx pair with --input_dir ({HOW})")
    if os.path.isdir(input_dir):
        # Sorted, where PaddleNLP takes the file system's order: the blend must not depend on the machine.
        prefixes = sorted(str(path.with_suffix("")) for path in Path(input_dir).glob("*.idx"))
        if not prefixes:
            raise CorpusError(f"no .idx file in the folder {input_dir}: {HOW}")
        data: list[str | float] = [*prefixes]
        if len(prefixes) > 1:
            data = [item for prefix in prefixes for item in (1.0, prefix)]
    elif len(parts := input_dir.split()) > 1:
        data, prefixes = _weights_and_prefixes(parts), parts[1::2]
    else:
        raise CorpusError(f"input_dir {input_dir} is no folder: {HOW}")
    for prefix in prefixes:
        check_files(prefix)
    return data


def prefixes_of(data: list[str | float]) -> list[str]:
    """Return the prefixes of what `find_data` returns."""
    return [str(each) for each in data[1::2] or data]


def check_files(prefix: str) -> None:
    """Refuse a prefix without one of its two files, or with others that a host would read. Raises CorpusError."""
    for suffix in (".bin", ".idx"):
        if not os.path.isfile(prefix + suffix):
            raise CorpusError(f"{prefix}{suffix} is missing: {HOW}")
    if os.path.isfile(f"{prefix}_ids.npy"):
        raise CorpusError(f"{prefix}_ids.npy is data of an older form, which PaddleNLP would take instead: remove it")
    if os.path.exists(f"{prefix}.lsm"):
        raise CorpusError(f"{prefix}.lsm is a mask of the loss, which pretraining here does not apply: remove it")


def _weights_and_prefixes(parts: list[str]) -> list[str | float]:
    try:
        weights = [float(part) for part in parts[::2]]
    except ValueError:
        weights = []
    if len(parts) % 2 or not weights or not all(0 < weight < math.inf for weight in weights):
        raise CorpusError(f"input_dir {' '.join(parts)!r}: neither a folder nor positive weights and prefixes in turn")
    return [item for pair in zip(weights, parts[1::2], strict=True) for item in pair]


def read_index(prefix: str | os.PathLike[str]) -> Index:
    """PREFIX.idx, compared in full with itself and with the length of PREFIX.bin.

    A process does so once for each state of the files.

    Raises CorpusError where one of them is damaged.
    """
    stats = (os.stat(f"{prefix}{suffix}") for suffix in (".idx", ".bin"))
    (index_bytes, _), (bin_bytes, _) = states = [(stat.st_size, stat.st_mtime_ns) for stat in stats]
    if (known := _checked.get(str(prefix))) and known[0] == states:
        return known[1]
    index = _map(f"{prefix}.idx", index_bytes)
    if index.bytes != bin_bytes:
        raise CorpusError(
            f"{prefix}.bin has {bin_bytes} bytes where its .idx says {index.bytes}: prepare the data again"
        )
    if found := next(filter(None, (_wrong_entries(index), _wrong_documents(index))), None):
        raise CorpusError(f"{prefix}.idx is damaged: {found}; prepare the data again")
    _checked[str(prefix)] = states, index
    return index


_checked: dict[str, tuple[list[tuple[int, int]], Index]] = {}


def _map(path: str, size: int) -> Index:
    """The arrays of a file of `size` bytes, whose header agrees with that."""
    wrong = f"{path} is no index of token ids, or damaged"
    with open_file(path) as file:
        header = file.read(HEADER.size)
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        raise CorpusError(f"{wrong}: it does not begin as one")
    _, version, code, entries, documents = HEADER.unpack(header)
    if version != 1 or code not in DTYPES:
        raise CorpusError(f"{wrong}: version {version}, type of token ids {code}")
    if size != (expected := HEADER.size + 12 * entries + 8 * documents):
        raise CorpusError(f"{wrong}: it has {size} bytes, and {expected} by its header")
    parts, offset = [], HEADER.size
    for dtype, count in (("<i4", entries), ("<i8", entries), ("<i8", documents)):
        parts.append(np.memmap(path, dtype, "r", offset, (count,)) if count else np.zeros(0, dtype))
        offset += count * np.dtype(dtype).itemsize
    return Index(np.dtype(DTYPES[code]), *parts)


def _wrong_entries(index: Index) -> str | None:
    """What is wrong with the entries' sizes, or with their places: each begins where the one before it ends."""
    for begin in range(0, len(index.sizes), CHUNK):
        sizes, pointers = index.sizes[begin : begin + CHUNK], index.pointers[begin : begin + CHUNK + 1]
        if (wrong := _first(sizes < 0)) is not None:
            return f"entry {begin + wrong} has {sizes[wrong]} tokens"
        lengths = sizes[: len(pointers) - 1].astype(np.int64) * index.dtype.itemsize
        if (wrong := _first(np.diff(pointers) != lengths)) is not None:
            ends, next_begins = int(pointers[wrong]) + int(lengths[wrong]), pointers[wrong + 1]
            return f"entry {begin + wrong} ends at byte {ends}, and the next one begins at {next_begins}"
    return None if not len(index.pointers) or index.pointers[0] == 0 else f"entry 0 begins at byte {index.pointers[0]}"


def _wrong_documents(index: Index) -> str | None:
    """What is wrong with the document index, which rises from the first entry to the last one's end."""
    ends = [int(index.documents[place]) for place in (0, -1)] if len(index.documents) else [0, 0]
    if ends != [0, len(index.sizes)]:
        return f"its documents lie from entry {ends[0]} to {ends[1]}, and there are {len(index.sizes)} entries"
    for begin in range(0, len(index.documents), CHUNK):
        documents = index.documents[begin : begin + CHUNK + 1]
        if (wrong := _first(documents[1:] < documents[:-1])) is not None:
            at, after = documents[wrong], documents[wrong + 1]
            return f"document {begin + wrong} begins at entry {at}, and the next one at {after}"
    return None


def _first(wrong: npt.NDArray[Any]) -> int | None:
    """The place of the first that is true."""
    return int(wrong.argmax()) if wrong.any() else None


def tokens(prefix: str, index: Index) -> npt.NDArray[Any]:
    """Return all token ids of a corpus, mapped from PREFIX.bin: its documents one after another."""
    return np.memmap(f"{prefix}.bin", index.dtype, "r") if index.bytes else np.zeros(0, index.dtype)


def check_vocabulary(prefix: str, index: Index, vocab_size: int) -> None:
    """Refuse token ids that a model does not have. Raises CorpusError."""
    if not index.bytes:
        return
    beginning = tokens(prefix, index)[:SCANNED_TOKENS]
    largest = _max_token_id(prefix, index)
    _check_ids(f"{prefix}.bin", beginning if largest is None else np.array([beginning[0], largest]), vocab_size)


def check_sequences(sequences: npt.NDArray[Any], vocab_size: int) -> None:
    """Refuse token ids that a model does not have, in what was read of a corpus. Raises CorpusError."""
    _check_ids("the corpus", sequences, vocab_size)


def _check_ids(where: str, ids: npt.NDArray[Any], vocab_size: int) -> None:
    ends = (ids.max(), ids.min()) if ids.size else ()
    wrong = next((int(end) for end in ends if not 0 <= end < vocab_size), None)
    if wrong is not None:
        raise CorpusError(
            f"{where} has token id {wrong}, but the model's vocab_size is {vocab_size}: the data was prepared with "
            "another tokenizer, or is damaged"
        )


def _max_token_id(prefix: str, index: Index) -> int | None:
    """The largest token id that PREFIX.json tells, where it is of this corpus."""
    try:
        summary = json.loads(read_file(f"{prefix}.json"))
        if summary["tokens"] == index.bytes // index.dtype.itemsize and type(summary["max_token_id"]) is int:
            return summary["max_token_id"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        pass  # a corpus that something else than paddle-te prepare-data made
    return None
