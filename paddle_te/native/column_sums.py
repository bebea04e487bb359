"""Sum a matrix's rows, where no cast of TE's adds them up in passing (kernels/column_sums.cu)."""

from paddle_te.native.interface import Shim, Stream
from paddle_te.native.kernels import ELEMENTS, kernel

_BLOCK, _VECTORS = 256, 4  # threads of a block, and the vectors of a row that it reads


def column_sums(te: Shim, stream: Stream, x: int, out: int, rows: int, cols: int, dtype: int) -> None:
    """Write to out [cols] the sum of the rows of x [rows, cols], both of a DType; summed in float32 and rounded once.

    x, out: addresses, ints, of 16 bytes. cols: a multiple of a vector's elements, 8 (bfloat16, float16) or 4 (float32).
    """
    name, vector = ELEMENTS[dtype]
    function = kernel(f"column_sums_{name}", "column_sums.cu", stream.capability)
    grid = -(-cols // (_VECTORS * vector))
    te.launch(function, grid, _BLOCK, 4 * _BLOCK * vector, stream, x, out, rows, cols)
