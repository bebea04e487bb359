"""The tokens of a rank in chunks, which an operation takes one after another, to need memory for one of them."""

from __future__ import annotations

import math

from paddle import Tensor

from paddle_te.ops.interface import Ranks


def chunk_rows(x: Tensor, chunk_tokens: int, tp: Ranks | None) -> int | None:
    """Say how many of a rank's tokens a chunk has, so that all ranks' GEMMs together have chunk_tokens.

    x: [..., hidden], the rank's tokens. tp: the TensorParallel or None: under sequence parallelism the GEMMs have the
    tokens of all its ranks. Returns None where all tokens are one chunk, and where chunk_tokens is 0. Raises ValueError
    where the ranks cannot share a chunk.
    """
    if not chunk_tokens:
        return None
    ranks = tp.size if tp is not None and tp.sequence_parallel else 1
    if math.prod(x.shape[:-1]) * ranks <= chunk_tokens:
        return None
    if chunk_tokens % ranks:
        raise ValueError(f"chunks of {chunk_tokens} tokens cannot be shared by {ranks} sequence-parallel ranks")
    return chunk_tokens // ranks


def ranges(rows: int, of_chunk: int) -> list[tuple[int, int]]:
    """Return [(first row, number of rows)] of the chunks.

    of_chunk: rows of each but the last, which may have fewer.
    """
    return [(first, min(of_chunk, rows - first)) for first in range(0, rows, of_chunk)]
