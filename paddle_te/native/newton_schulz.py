"""Mirror symmetric matrices of which block rows were computed, and transpose (kernels/newton_schulz.cu).

Addresses are ints, of 16 bytes; all tensors have one DType.
"""

from paddle_te.native.interface import Shim, Stream
from paddle_te.native.kernels import ELEMENTS, kernel

TILE = 64  # divides all sizes
_BLOCK = 256


def upper_rows(n: int, rows: int) -> list[tuple[int, int]]:
    """Return where each block row of `mirror`'s `upper` begins, in elements, and how many columns it has."""
    widths = range(n, 0, -rows)
    return [(rows * sum(widths[:block]), width) for block, width in enumerate(widths)]


def mirror(te: Shim, stream: Stream, upper: int, out: int, n: int, rows: int, dtype: int) -> None:
    """Write out [n, n], symmetric, from its block rows of `rows` rows on and above the diagonal; see `upper_rows`."""
    _launch("mirror", te, stream, upper, out, n, rows, n // TILE * (n // TILE), dtype)


def transpose(te: Shim, stream: Stream, x: int, out: int, rows: int, cols: int, dtype: int) -> None:
    """Write out [cols, rows] from x [rows, cols]."""
    _launch("transpose_tiles", te, stream, x, out, rows, cols, rows // TILE * (cols // TILE), dtype)


def _launch(
    name: str, te: Shim, stream: Stream, source: int, out: int, first: int, second: int, grid: int, dtype: int
) -> None:
    function = kernel(f"{name}_{ELEMENTS[dtype][0]}", "newton_schulz.cu", stream.capability)
    te.launch(function, grid, _BLOCK, 0, stream, source, out, first, second)
