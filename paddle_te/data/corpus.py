"""A corpus of token ids, PREFIX.bin and PREFIX.idx, as pretraining reads it: where it lies, and whether it is whole.

The launcher asks before it starts anything, each process before it builds an index of samples. PREFIX.idx is
Megatron-LM's: a header, the documents' sizes in tokens, their places in PREFIX.bin in bytes, and the document index.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HOW = "make one with paddle-te prepare-data, or use random tokens (--mock_data true, of the launcher MOCK_DATA=1)"
MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, code of the token ids' type, entries of sizes and of documents
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16", 9: "uint32", 10: "uint64"}
SCANNED_TOKENS = 1 << 24  # of a corpus that does not say its largest token id


@dataclass(frozen=True)
class Index:
    """What PREFIX.idx says, mapped from the file. sizes: tokens of each entry; pointers: where it begins in PREFIX.bin,
    in bytes; documents: the first entry of each document, and the end."""

    dtype: np.dtype
    sizes: np.ndarray
    pointers: np.ndarray
    documents: np.ndarray

    @property
    def bytes(self) -> int:
        """Of PREFIX.bin, as the last entry ends."""
        return int(self.pointers[-1]) + int(self.sizes[-1]) * self.dtype.itemsize if len(self.sizes) else 0


def find_data(input_dir: str | None) -> list:
    """What PaddleNLP takes as data_prefix: [prefix], or weights and prefixes in turn.

    Raises:
        ValueError: no input_dir, or no complete .bin/.idx pair there.
    """
    if not input_dir:
        raise ValueError(f"input_dir is missing: give the folder of a .bin/.idx pair with --input_dir ({HOW})")
    if os.path.isdir(input_dir):
        # Sorted, where PaddleNLP takes the file system's order: the blend must not depend on the machine.
        prefixes = sorted(str(path.with_suffix("")) for path in Path(input_dir).glob("*.idx"))
        if not prefixes:
            raise ValueError(f"no .idx file in the folder {input_dir}: {HOW}")
        data = prefixes if len(prefixes) == 1 else [item for prefix in prefixes for item in (1.0, prefix)]
    elif len(parts := input_dir.split()) > 1:
        data, prefixes = _weights_and_prefixes(parts), parts[1::2]
    else:
        raise ValueError(f"input_dir {input_dir} is no folder: {HOW}")
    for prefix in prefixes:
        _check_files(prefix)
    return data


def _check_files(prefix: str) -> None:
    for suffix in (".bin", ".idx"):
        if not os.path.isfile(prefix + suffix):
            raise ValueError(f"{prefix}{suffix} is missing: {HOW}")
    if os.path.isfile(f"{prefix}_ids.npy"):
        raise ValueError(f"{prefix}_ids.npy is data of an older form, which PaddleNLP would take instead: remove it")


def _weights_and_prefixes(parts: list[str]) -> list:
    try:
        weights = [float(part) for part in parts[::2]]
    except ValueError:
        weights = []
    if len(parts) % 2 or not weights or min(weights) <= 0:
        raise ValueError(f"input_dir {' '.join(parts)!r}: neither a folder nor positive weights and prefixes in turn")
    return [item for pair in zip(weights, parts[1::2], strict=True) for item in pair]


def read_index(prefix: str) -> Index:
    """PREFIX.idx, whose header agrees with its length, and with the length of PREFIX.bin.

    Raises ValueError where one of them is damaged.
    """
    path = f"{prefix}.idx"
    wrong = f"{path} is no index of token ids, or damaged"
    with open(path, "rb") as file:
        header = file.read(HEADER.size)
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        raise ValueError(f"{wrong}: it does not begin as one")
    _, version, code, entries, documents = HEADER.unpack(header)
    if version != 1 or code not in DTYPES:
        raise ValueError(f"{wrong}: version {version}, type of token ids {code}")
    size, expected = os.path.getsize(path), HEADER.size + 12 * entries + 8 * documents
    if size != expected:
        raise ValueError(f"{wrong}: it has {size} bytes, and {expected} by its header")
    parts, offset = [], HEADER.size
    for dtype, count in (("<i4", entries), ("<i8", entries), ("<i8", documents)):
        whole = np.memmap(path, dtype, "r", offset, (count,)) if count else np.zeros(0, dtype)
        parts.append(whole)
        offset += count * np.dtype(dtype).itemsize
    index = Index(np.dtype(DTYPES[code]), *parts)
    if (size := os.path.getsize(f"{prefix}.bin")) != index.bytes:
        raise ValueError(f"{prefix}.bin has {size} bytes where its .idx says {index.bytes}: prepare the data again")
    return index


def check_index(prefix: str, index: Index) -> None:
    """Refuses an index whose entries do not follow each other in PREFIX.bin. Raises ValueError."""
    sizes = index.sizes.astype(np.int64)
    places = (np.cumsum(sizes) - sizes) * index.dtype.itemsize
    rising = index.documents[0] == 0 and index.documents[-1] == len(sizes) if len(index.documents) else not len(sizes)
    wrong = [
        ("a size below 0", bool((sizes < 0).any())),
        ("entries that do not follow each other", bool((index.pointers != places).any())),
        ("documents out of order", not rising or bool((np.diff(index.documents) < 0).any())),
    ]
    if found := [what for what, is_there in wrong if is_there]:
        raise ValueError(f"{prefix}.idx is damaged: it has {', '.join(found)}; prepare the data again")


def check_vocabulary(prefix: str, index: Index, vocab_size: int) -> None:
    """Refuses token ids that a model does not have. Raises ValueError."""
    largest = _max_token_id(prefix, index)
    if largest >= vocab_size:
        raise ValueError(
            f"{prefix}.bin has token id {largest}, but the model's vocab_size is {vocab_size}: the data was prepared "
            "with another tokenizer"
        )


def _max_token_id(prefix: str, index: Index) -> int:
    """The largest token id: from PREFIX.json where that tells of this corpus, else of the corpus's beginning."""
    try:
        summary = json.loads(Path(f"{prefix}.json").read_text())
        if summary["tokens"] == index.bytes // index.dtype.itemsize:
            return int(summary["max_token_id"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        pass  # a corpus that something else than paddle-te prepare-data made
    return int(np.memmap(f"{prefix}.bin", index.dtype, "r")[:SCANNED_TOKENS].max()) if index.bytes else -1
