"""safetensors files, tensor by tensor: the header says where each one is, so neither way needs them all in memory.

The format: https://huggingface.co/docs/safetensors. The library's writer takes all tensors at once, and its
reader does not tell where they are; hence these few lines.
"""

import json
import os
import struct
from pathlib import Path

from safetensors import SafetensorError, safe_open

from paddle_te.checkpoint.tensors import STORAGE, CheckpointError, TensorRef, sync_file, write_array

SUFFIX = ".safetensors"
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "U16": "bfloat16"}  # PaddleNLP saves bfloat16 as U16
_CODES = {
    "np": {"float32": "F32", "float16": "F16", "bfloat16": "U16"},
    "pt": {"float32": "F32", "float16": "F16", "bfloat16": "BF16"},
}


def read(path):
    """{name: TensorRef} of a file. Raises CheckpointError for a truncated or damaged one, or one of other dtypes."""
    path = Path(path)
    try:
        with safe_open(path, framework="np"):
            pass  # the library checks the header and the file's length
    except SafetensorError as error:
        raise CheckpointError(f"{path}: truncated, or not a safetensors file ({error})") from None
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(start - 8))
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] not in _DTYPES:
            raise CheckpointError(f"{path}: {name!r} has dtype {entry['dtype']}, not float32, float16 or bfloat16")
        begin = start + entry["data_offsets"][0]
        tensors[name] = TensorRef(path, begin, _DTYPES[entry["dtype"]], tuple(entry["shape"]))
    return tensors


def write(path, specs, arrays, framework="np"):
    """Writes tensors one after the other.

    Args:
        specs: list of TensorSpec.
        arrays: iterable of numpy arrays in the same order; each may be freed before the next is made.
        framework: "np" as PaddleNLP writes and expects it, "pt" for Hugging Face.
    """
    # wide dtypes first keeps every tensor aligned, which the format's readers expect
    offsets, end = {}, 0
    for spec in sorted(specs, key=lambda spec: -STORAGE[spec.dtype].itemsize):
        offsets[spec.name] = end
        end += spec.nbytes
    header = {"__metadata__": {"format": framework}}
    for spec in sorted(specs, key=lambda spec: offsets[spec.name]):
        begin = offsets[spec.name]
        code = _CODES[framework][spec.dtype]
        header[spec.name] = {"dtype": code, "shape": list(spec.shape), "data_offsets": [begin, begin + spec.nbytes]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for spec, array in zip(specs, arrays, strict=True):
            file.seek(8 + len(text) + offsets[spec.name], os.SEEK_SET)
            write_array(file, array)
        sync_file(file)
