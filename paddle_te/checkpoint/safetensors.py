"""safetensors files, tensor by tensor: the header says where each one is, so neither way needs them all in memory.

The format: https://huggingface.co/docs/safetensors. The library's writer takes all tensors at once, and its reader has
no bfloat16 for numpy; hence these few lines.
"""

import json
import os
import struct
from pathlib import Path

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
    size = path.stat().st_size
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        if size < 8 or start > size:
            raise CheckpointError(f"{path}: truncated (or not a safetensors file)")
        try:
            header = json.loads(file.read(start - 8))
            header.pop("__metadata__", None)
            entries = {name: (e["dtype"], tuple(e["shape"]), *e["data_offsets"]) for name, e in header.items()}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{path}: not a safetensors file (bad header: {error})") from None
    tensors = {}
    for name, (code, shape, begin, end) in entries.items():
        if code not in _DTYPES:
            raise CheckpointError(f"{path}: {name!r} has dtype {code}, not float32, float16 or bfloat16")
        tensors[name] = TensorRef(path, start + begin, _DTYPES[code], shape)
        if end - begin != tensors[name].nbytes:
            raise CheckpointError(f"{path}: {name!r} of shape {list(shape)} has {end - begin} bytes: a damaged header")
        if start + end > size:
            raise CheckpointError(f"{path}: truncated: {name!r} ends after the file's {size} bytes")
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
