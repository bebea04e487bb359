"""How Newton–Schulz multiplies matrices, and its kernels (kernels/newton_schulz.cu): norms, mirrors and transposes.

Tests and benchmarks replace the functions that choose. Addresses are ints, of 16 bytes; all tensors of a kernel have
one DType.
"""

from paddle_te.native.interface import Shim, Stream
from paddle_te.native.kernels import ELEMENTS, float32_bits, kernel

TILE = 64  # divides the sizes of matrices that are mirrored or transposed
_BLOCK = 256
_PART, _PARTS = 2**15, 2**10  # elements at least of a matrix that a block of threads sums, and its blocks at most
BLOCK_ROWS = 2048  # at least, of a symmetric product: a GEMM of as many rows and columns is a tile for almost each SM
GROUPED_MOST = 2048  # with more rows and columns a GEMM of one matrix fills a GPU
FIRST_STEPS = 3  # without products with X: about as exact as one by one, which four are not
FIRST_STEPS_FROM = 128  # rows and columns; of fewer X·Xᵀ has large elements, whose rounding shows


def blocks_of(rows: int, columns: int) -> int:
    """Return how many block rows a symmetric product of a matrix is divided into, of which those below are mirrored.

    1: it is computed whole.
    """
    small = min(rows, columns)
    if max(rows, columns) % TILE:
        return 1
    return next((n for n in range(small // BLOCK_ROWS, 1, -1) if small % (n * TILE) == 0), 1)


def is_grouped(count: int, rows: int, columns: int) -> bool:
    """Say whether the products of so many matrices are one grouped GEMM, which reads lines of 16 bytes.

    They may be any number: nvte_grouped_gemm takes memory by it, and cuBLAS documents no limit for its groups. TE's
    limit of 64 (cublaslt_grouped_gemm.cu) is for lists of tensors, which have other functions.
    """
    return count > 1 and not (rows % 8 or columns % 8) and min(rows, columns) <= GROUPED_MOST


def first_steps(rows: int, columns: int) -> int:
    """Return how many steps at first compute with X·Xᵀ only: more than one where that takes fewer operations."""
    small, large = sorted((rows, columns))
    return FIRST_STEPS if small >= FIRST_STEPS_FROM and large >= 1.5 * small else 1


def parts_of(size: int) -> int:
    """Return of how many sums of squares a matrix's norm is made: numbers of float32 that `divide_by_norms` needs."""
    return min(max(size // _PART, 1), _PARTS)


def divide_by_norms(
    te: Shim, stream: Stream, x: int, sums: int, count: int, size: int, least: float, dtype: int
) -> None:
    """Divide each of so many matrices that lie one behind the other by its Frobenius norm, or by `least` if greater.

    sums: scratch memory, float32 [count, parts_of(size)]. size: a matrix's elements. The result does not change from
    call to call.
    """
    parts, (name, _) = parts_of(size), ELEMENTS[dtype]
    functions = [
        kernel(f"{what}_{name}", "newton_schulz.cu", stream.capability) for what in ("squares", "divide_by_norms")
    ]
    te.launch(functions[0], count * parts, _BLOCK, 0, stream, x, sums, size, parts)
    te.launch(functions[1], count * parts, _BLOCK, 0, stream, x, sums, size, parts, float32_bits(least))


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
