"""Launch kernels that cast to fp8 with the transposed copy, in one pass (kernels/cast_tile.cuh).

Addresses are ints, of 16 bytes' alignment. Rows and columns are multiples of 16.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from paddle_te.native.interface import Shim, Stream
from paddle_te.native.kernels import ELEMENTS, kernel
from paddle_te.native.types import DType

FLOAT8: dict[int, str] = {DType.FLOAT8_E4M3: "e4m3", DType.FLOAT8_E5M2: "e5m2"}
VECTORS, _PATCH_ROWS = 8, 4  # of a row of a tile, and the rows of which a thread has a vector each


class CastTarget(NamedTuple):
    """Where a cast writes.

    data, transposed: of a DType in fp8 and of any size, 0 where one is not wanted. amax: float32, raised to the
    greatest magnitude before scaling. scale_inv: 1 / scale. scale: read; 0 for 1. statistics: a record of
    fp8/statistics.py that is added to; 0 for none, and then with another kernel.
    """

    data: int
    transposed: int
    scale: int
    amax: int
    scale_inv: int
    statistics: int = 0

    @classmethod
    def only_amax(cls, amax: int) -> CastTarget:
        """Return the target that writes only the amax."""
        return cls(0, 0, 0, amax, 0)

    @property
    def arguments(self) -> tuple[int, ...]:
        """The arguments of a kernel that stand for its TARGET_PARAMETERS."""
        return self if self.statistics else self[:-1]

    @property
    def defines(self) -> dict[str, int]:
        """The macros that a kernel is compiled with to take them."""
        return {"STATISTICS": 1} if self.statistics else {}


class Tiling(NamedTuple):
    """How matrices are cut.

    tile_rows: of a block of threads. band: rows of tiles that are computed together, so that what is written to the
    transposed copy at one time lies close together. blocks_per_sm: the blocks for which the registers must suffice.
    tiles: beside each other that a block computes one after another.
    """

    tile_rows: int
    band: int
    blocks_per_sm: int
    tiles: int = 1


class Form(NamedTuple):
    """The numbers of a cast.

    dtype: of what is read, a DType. float8: of what is written. rounded: whether the numbers are rounded to dtype
    before they are measured and cast, as if they had been stored.
    """

    dtype: int
    float8: int
    rounded: bool = False

    def defines(self, name: str, tiling: Tiling) -> dict[str, Any]:
        """Return the macros that a file of kernels is compiled with for a kernel of this name."""
        return dict(
            ELEMENT=ELEMENTS[self.dtype][0],
            FLOAT8=FLOAT8[self.float8],
            ROUND=int(self.rounded),
            TILE_ROWS=tiling.tile_rows,
            TILES=tiling.tiles,
            BAND=tiling.band,
            BLOCKS_PER_SM=tiling.blocks_per_sm,
            NAME=name,
        )


class CastKernel(NamedTuple):
    """A kernel that casts. more: macros that its file is compiled with beside the Form's `defines`."""

    name: str
    file: str
    form: Form
    tiling: Tiling
    more: Mapping[str, str | int]


def launch(
    te: Shim, stream: Stream, cast: CastKernel, sizes: Sequence[tuple[int, int]], arguments: Iterable[int]
) -> None:
    """Run the kernel on Sources of `sizes` [(rows, columns)]."""
    name, file, form, tiling, more = cast
    compiled = kernel(name, file, stream.capability, **form.defines(name, tiling), **more)
    width = VECTORS * ELEMENTS[form.dtype][1] * tiling.tiles
    blocks = sum([-(-rows // tiling.tile_rows) * -(-columns // width) for rows, columns in sizes])
    te.launch(compiled, blocks, tiling.tile_rows // _PATCH_ROWS * VECTORS, 0, stream, *arguments)


CAST_TILING = Tiling(128, 8, 6)


def cast_transpose(
    te: Shim, stream: Stream, x: int, target: CastTarget, rows: int, cols: int, dtype: int, float8: int
) -> None:
    """Cast x [rows, cols], row-major, to fp8 with its transposed copy, as TE's nvte_quantize does.

    dtype, float8: a Form's.
    """
    defines = {"MATRICES": 1, **target.defines}
    cast = CastKernel("cast_transpose", "cast.cu", Form(dtype, float8), CAST_TILING, defines)
    launch(te, stream, cast, [(rows, cols)], (x, *target.arguments, rows, cols))


def cast_transpose_both(
    te: Shim,
    stream: Stream,
    first: tuple[int, CastTarget, int, int],
    second: tuple[int, CastTarget, int, int],
    dtype: int,
    float8: int,
) -> None:
    """Do `cast_transpose` of two matrices by one kernel, without statistics.

    first, second: (x, target, rows, cols) of each.
    """
    both = first, second
    cast = CastKernel("cast_transpose_both", "cast.cu", Form(dtype, float8), CAST_TILING, {"MATRICES": 2})
    arguments = [number for x, target, *size in both for number in (x, *target.arguments, *size)]
    launch(te, stream, cast, [(rows, cols) for _, _, rows, cols in both], arguments)
