"""Read and write safetensors files, tensor by tensor: the header says where each one is.

The format: https://huggingface.co/docs/safetensors. The library's writer takes all tensors at once, and its
reader does not tell where they are; hence these few lines.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from paddle_te.weights.mxfp4 import BLOCKS, SCALES
from paddle_te.weights.tensors import (
    STORAGE,
    Array,
    CheckpointError,
    TensorRef,
    TensorSpec,
    opened,
    sync_file,
    write_array,
)

SUFFIX = ".safetensors"
# PaddleNLP saves bfloat16 as U16
_DTYPES = {
    "F32": "float32", "F16": "float16", "BF16": "bfloat16", "U16": "bfloat16", "I16": "int16", "I8": "int8",
    "F8_E4M3": "float8_e4m3",
}  # fmt: skip
_CODES = {
    "np": {"float32": "F32", "float16": "F16", "bfloat16": "U16", "int16": "I16", "int8": "I8"},
    "pt": {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int16": "I16", "int8": "I8"},
}


def read(path: str | Path) -> dict[str, TensorRef]:
    """Return {name: TensorRef} of a file. Raises CheckpointError for a damaged one, or one of other dtypes."""
    path = Path(path)
    check(path)
    with opened(path) as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(start - 8))
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        dtype = "uint8" if entry["dtype"] == "U8" and name.endswith((BLOCKS, SCALES)) else _DTYPES.get(entry["dtype"])
        if dtype is None:
            known = ", ".join(dict.fromkeys(_DTYPES.values()))
            raise CheckpointError(f"{path}: {name!r} has dtype {entry['dtype']}, not {known}")
        begin = start + entry["data_offsets"][0]
        tensors[name] = TensorRef(path, begin, dtype, tuple(entry["shape"]))
    return tensors


def check(path: str | Path) -> None:
    """Raise CheckpointError for a truncated or damaged file."""
    try:
        with opened(path), safe_open(path, framework="np"):
            pass  # the library checks the header and the file's length
    except SafetensorError as error:
        raise CheckpointError(f"{path}: truncated, or not a safetensors file ({error})") from None


class Writer:
    """Write a new file tensor by tensor.

    Args:
        specs: list of TensorSpec. Then `add` takes their data in the same order and `close` finishes the file.
        framework: "np" as PaddleNLP writes and expects it, "pt" for Hugging Face.
    """

    def __init__(self, path: str | Path, specs: Sequence[TensorSpec], framework: str = "np") -> None:
        # wide dtypes first keeps every tensor aligned, which the format's readers expect
        offsets, end = {}, 0
        for spec in sorted(specs, key=lambda spec: -STORAGE[spec.dtype].itemsize):
            offsets[spec.name] = end, end + spec.nbytes
            end += spec.nbytes
        dtypes = {spec.name: _CODES[framework][spec.dtype] for spec in specs}
        shapes = {spec.name: list(spec.shape) for spec in specs}
        header = {"__metadata__": {"format": framework}} | {
            name: {"dtype": dtypes[name], "shape": shapes[name], "data_offsets": offset}
            for name, offset in offsets.items()
        }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._starts = iter([8 + len(text) + offsets[spec.name][0] for spec in specs])
        self._file = open(path, "xb")
        self._file.write(struct.pack("<Q", len(text)) + text)

    def add(self, arrays: Iterable[Array]) -> None:
        """Write the next tensor, given as arrays whose bytes follow one another."""
        self._file.seek(next(self._starts))
        for array in arrays:
            write_array(self._file, array)

    def close(self) -> None:
        """Write everything through to the disk."""
        sync_file(self._file)
        self._file.close()
