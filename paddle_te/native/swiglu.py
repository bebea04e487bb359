"""SwiGLU and its gradient in fp8, with the transposed copy, in one kernel (kernels/swiglu.cu).

Addresses are ints, of 16 bytes' alignment, and row-major. z: [rows, 2 cols], gate and up beside each other. rows and
cols: multiples of 16. The results have the bits of TE's functions on GPUs before Blackwell, where TE computes the
sigmoid in another way.
"""

from typing import NamedTuple

from paddle_te.native.kernels import ELEMENTS, kernel
from paddle_te.native.types import DType

_FLOAT8 = {DType.FLOAT8_E4M3: "e4m3", DType.FLOAT8_E5M2: "e5m2"}
_VECTORS, _PATCH_ROWS = 8, 4  # of a row of a tile, and the rows of which a thread has a vector each


class CastTarget(NamedTuple):
    """Where a cast writes: data and transposed, of a DType in fp8 and of any size, 0 where one is not wanted; float32
    amax, raised to the greatest magnitude before scaling; scale_inv, 1 / scale. scale: read; 0 for 1."""

    data: int
    transposed: int
    scale: int
    amax: int
    scale_inv: int

    @classmethod
    def only_amax(cls, amax):
        return cls(0, 0, 0, amax, 0)


class Tiling(NamedTuple):
    """How matrices are cut. tile_rows: of a block of threads. band: rows of tiles that are computed together, so that
    what is written to the transposed copy at one time lies close together. blocks_per_sm: that the registers must
    suffice for."""

    tile_rows: int
    band: int
    blocks_per_sm: int


NAMES = {"SwiGLU": "swiglu_cast_transpose", "DSwiGLU": "dswiglu_cast_transpose"}  # of the kernels, by their function
TILINGS = {"SwiGLU": Tiling(128, 8, 4), "DSwiGLU": Tiling(128, 8, 3)}


def swiglu_cast_transpose(te, stream, z, target, rows, cols, dtype, float8, rounded=False):
    """y = silu(gate) · up, [rows, cols], cast to fp8 with its transposed copy. target: a CastTarget. dtype: z's, a
    DType. float8: the target's. rounded: y is rounded to dtype before it is measured and cast, as if it had been
    stored."""
    _launch(te, stream, "SwiGLU", 0, z, target, rows, cols, dtype, float8, rounded)


def dswiglu_cast_transpose(te, stream, dy, z, target, rows, cols, dtype, float8, rounded=False):
    """The gradient of z, [rows, 2 cols], from dy [rows, cols]; the rest as `swiglu_cast_transpose`."""
    _launch(te, stream, "DSwiGLU", dy, z, target, rows, cols, dtype, float8, rounded)


def defines(function, dtype, float8, rounded, tiling):
    """What kernels/swiglu.cu is compiled with."""
    return dict(
        FUNCTION=function,
        ELEMENT=ELEMENTS[dtype][0],
        FLOAT8=_FLOAT8[float8],
        ROUND=int(rounded),
        TILE_ROWS=tiling.tile_rows,
        BAND=tiling.band,
        BLOCKS_PER_SM=tiling.blocks_per_sm,
        NAME=NAMES[function],
    )


def _launch(te, stream, function, dy, z, target, rows, cols, dtype, float8, rounded):
    tiling = TILINGS[function]
    options = defines(function, dtype, float8, rounded, tiling)
    compiled = kernel(NAMES[function], "swiglu.cu", stream.capability, **options)
    tiles = -(-rows // tiling.tile_rows) * -(-cols // (_VECTORS * ELEMENTS[dtype][1]))
    te.launch(compiled, tiles, tiling.tile_rows // _PATCH_ROWS * _VECTORS, 0, stream, dy, z, *target, rows, cols)
