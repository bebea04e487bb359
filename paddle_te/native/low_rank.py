"""Pack the factors of low-rank products into two matrices, and unpack their gradients (kernels/low_rank.cu).

Addresses are ints; all tensors have one DType and are contiguous.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from paddle_te.native.interface import Shim, Stream
from paddle_te.native.kernels import ELEMENTS, kernel

PARTS = 3  # the most that there may be
_BLOCK, _MULTIPLE = 256, 8


class Sizes(NamedTuple):
    """The sizes of the packed matrices.

    inputs, outputs: columns of x and of the output. r: columns of each part's A. width: of all A side by side, rounded
    up so that GEMMs read whole vectors.
    """

    inputs: int
    outputs: int
    r: int
    width: int

    @classmethod
    def of(cls, inputs: int, outputs: int, r: int, parts: int) -> Sizes:
        """Return the Sizes of so many parts."""
        return cls(inputs, outputs, r, -(-parts * r // _MULTIPLE) * _MULTIPLE)


class Part(NamedTuple):
    """The addresses of A [inputs, r] and B [r, size], and the first column of the part in the output.

    In `unpack` a and b are their gradients', 0 for one that is not wanted.
    """

    a: int
    b: int
    start: int
    size: int


def pack(
    te: Shim, stream: Stream, parts: Sequence[Part], a: int, b: int, sizes: Sizes, factor: float, dtype: int
) -> None:
    """Write a [inputs, width], the A of up to PARTS parts side by side, and b [width, outputs], factor · their B.

    Each B is in rows and columns of its own; the rest is zeros.
    """
    _launch("pack", te, stream, parts, a, b, sizes, factor, dtype)


def unpack(
    te: Shim, stream: Stream, parts: Sequence[Part], a: int, b: int, sizes: Sizes, factor: float, dtype: int
) -> None:
    """Write the parts' gradients from those of `pack`'s a and b."""
    _launch("unpack", te, stream, parts, a, b, sizes, factor, dtype)


def _launch(
    name: str,
    te: Shim,
    stream: Stream,
    parts: Sequence[Part],
    a: int,
    b: int,
    sizes: Sizes,
    factor: float,
    dtype: int,
) -> None:
    function = kernel(f"{name}_{ELEMENTS[dtype][0]}", "low_rank.cu", stream.capability)
    parts = [*parts, *[Part(0, 0, 0, 0)] * (PARTS - len(parts))]
    (bits,) = struct.unpack("<I", struct.pack("<f", factor))
    grid = -(-sizes.width * (sizes.inputs + sizes.outputs) // _BLOCK)
    te.launch(
        function, grid, _BLOCK, 0, stream, *[n for field in zip(*parts, strict=True) for n in field], a, b, *sizes, bits
    )
