"""The factors of low-rank products, packed into two matrices, and their gradients (kernels/low_rank.cu).

Addresses are ints; all tensors have one DType and are contiguous.
"""

import struct
from typing import NamedTuple

from paddle_te.native.kernels import ELEMENTS, kernel

PARTS = 3  # the most that there may be
_BLOCK, _MULTIPLE = 256, 8


class Sizes(NamedTuple):
    """inputs, outputs: columns of x and of the output. r: columns of each part's A. width: of all A side by side,
    rounded up so that GEMMs read whole vectors."""

    inputs: int
    outputs: int
    r: int
    width: int

    @classmethod
    def of(cls, inputs, outputs, r, parts):
        return cls(inputs, outputs, r, -(-parts * r // _MULTIPLE) * _MULTIPLE)


class Part(NamedTuple):
    """a, b: addresses of A [inputs, r] and B [r, size]. start: its first column in the output. In `unpack` these are
    their gradients', 0 for one that is not wanted."""

    a: int
    b: int
    start: int
    size: int


def pack(te, stream, parts, a, b, sizes, factor, dtype):
    """a [inputs, width] = the A of up to PARTS parts side by side, b [width, outputs] = factor · their B, each in rows
    and columns of its own; the rest is zeros."""
    _launch("pack", te, stream, parts, a, b, sizes, factor, dtype)


def unpack(te, stream, parts, a, b, sizes, factor, dtype):
    """The parts' gradients from those of `pack`'s a and b."""
    _launch("unpack", te, stream, parts, a, b, sizes, factor, dtype)


def _launch(name, te, stream, parts, a, b, sizes, factor, dtype):
    function = kernel(f"{name}_{ELEMENTS[dtype][0]}", "low_rank.cu", stream.capability)
    parts = [*parts, *[Part(0, 0, 0, 0)] * (PARTS - len(parts))]
    (bits,) = struct.unpack("<I", struct.pack("<f", factor))
    grid = -(-sizes.width * (sizes.inputs + sizes.outputs) // _BLOCK)
    te.launch(
        function, grid, _BLOCK, 0, stream, *[n for field in zip(*parts, strict=True) for n in field], a, b, *sizes, bits
    )
