"""Pack the factors of low-rank products into two matrices, and unpack their gradients (kernels/low_rank.cu).

Addresses are ints; all tensors have one DType and are contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from paddle_te.native.interface import Shim, Stream
from paddle_te.native.kernels import ELEMENTS, float32_bits, kernel

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
    numbers = sizes.width * (sizes.inputs + sizes.outputs)
    if numbers >= 2**31:
        raise ValueError(f"low rank: A and B have {numbers} numbers side by side; the kernel counts to {2**31 - 1}")
    element, run = _element_and_run(parts, sizes, dtype)
    function = kernel(f"{name}_{element}", "low_rank.cu", stream.capability, RUN=run)
    parts = [*parts, *[Part(0, 0, 0, 0)] * (PARTS - len(parts))]
    fields = [number for field in zip(*parts, strict=True) for number in field]
    grid = -(-numbers // (run * _BLOCK))
    te.launch(function, grid, _BLOCK, 0, stream, *fields, a, b, *sizes, float32_bits(factor))


def _element_and_run(parts: Sequence[Part], sizes: Sizes, dtype: int) -> tuple[str, int]:
    """Return the element's name in the kernel, and how many a thread moves: 16 bytes, or 1 where that fits no size."""
    element, run = ELEMENTS[dtype]
    within = sizes.r, sizes.outputs, *[number for part in parts for number in (part.start, part.size)]
    return element, run if all([number % run == 0 for number in within]) else 1
