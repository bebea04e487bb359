"""A .bin/.idx pair written by hand, as Megatron-LM describes it: tests of readers compare with it."""

import struct

import numpy as np

CODES = {"uint16": 8, "int32": 4}


def write_corpus(prefix, documents=((5, 6, 7),) * 2000, dtype="uint16"):
    """documents: their token ids."""
    sizes = np.array([len(document) for document in documents], "<i4")
    pointers = (np.cumsum(sizes, dtype="<i8") - sizes) * np.dtype(dtype).itemsize
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, CODES[dtype], len(sizes), len(sizes) + 1)
    ends = np.arange(len(sizes) + 1, dtype="<i8")
    prefix.with_suffix(".idx").write_bytes(header + b"".join(part.tobytes() for part in (sizes, pointers, ends)))
    prefix.with_suffix(".bin").write_bytes(np.array([token for each in documents for token in each], dtype).tobytes())
    return prefix
