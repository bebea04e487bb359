"""Count what becomes of numbers that are cast to fp8 by others than our kernels (kernels/block_statistics.cu, cast.cu).

Addresses and sizes are as in `casts`. record: where a record of fp8/statistics.py lies, which is added to.
"""

from __future__ import annotations

from typing import NamedTuple

from paddle_te.native import casts
from paddle_te.native.casts import FLOAT8, CastTarget
from paddle_te.native.interface import Shim, Stream
from paddle_te.native.kernels import ELEMENTS, float32_bits, kernel
from paddle_te.native.types import DType

_BLOCK, _THREADS = 128, 256
_GREATEST: dict[int, float] = {DType.BFLOAT16: 3.3895313892515355e38, DType.FLOAT16: 65504.0}


class Blocks(NamedTuple):
    """Say how TE scales blocks, as fp8.BlockScaling does. square: blocks are 128 x 128 instead of 1 x 128."""

    square: bool
    power_2_scale: bool
    amax_epsilon: float


class Part(NamedTuple):
    """Say which rows of a matrix count: begins[experts] / columns of them, int64; by default all."""

    begins: int = 0
    experts: int = 0


def of_cast(te: Shim, stream: Stream, x: int, scale: int, record: int, rows: int, cols: int, form: casts.Form) -> None:
    """Count what a cast of x [rows, cols] with one scale makes of it."""
    target = CastTarget(0, 0, scale, 0, 0, record)
    casts.cast_transpose(te, stream, x, target, rows, cols, form.dtype, form.float8)


def of_blocks(
    te: Shim,
    stream: Stream,
    x: int,
    record: int,
    rows: int,
    cols: int,
    form: casts.Form,
    blocks: Blocks,
    part: Part = Part(),  # noqa: B008, it is immutable
) -> None:
    """Count what block scaling makes of x [rows, cols]. 128 divides cols, and rows of square blocks."""
    name = "block_statistics"
    defines = dict(ELEMENT=ELEMENTS[form.dtype][0], FLOAT8=FLOAT8[form.float8], SQUARE=int(blocks.square), NAME=name)
    compiled = kernel(name, "block_statistics.cu", stream.capability, **defines)
    scaling = blocks.power_2_scale, float32_bits(blocks.amax_epsilon), float32_bits(_GREATEST[form.dtype])
    given = x, part.begins, record, rows, cols, part.experts, *scaling
    te.launch(compiled, -(-rows // _BLOCK) * (cols // _BLOCK), _THREADS, 0, stream, *given)
