"""Move tokens to the rows of their experts and back, and activate these (kernels/experts*.cu).

Addresses are ints; tensors are contiguous. routing_map: bytes [tokens, experts]. The rows of an expert are its tokens
in their order, then padding up to a multiple; the experts' rows follow each other.
"""

from collections.abc import Sequence
from typing import NamedTuple

from paddle_te.native import casts
from paddle_te.native.casts import CastKernel, CastTarget, Form, Tiling
from paddle_te.native.interface import Shim, Stream
from paddle_te.native.kernels import ELEMENTS, kernel

_BLOCK, _MOST_EXPERTS = 256, 1024
_PLACING_BLOCK = 512  # as few blocks as experts: what each thread reads at once counts
_ZEROING_BLOCKS = 8  # of an expert
_LANES = 32  # vectors of 16 bytes that a block sums
CAST_TILING = Tiling(128, 8, 5)
SWIGLU_TILING, DSWIGLU_TILING = Tiling(128, 8, 4), Tiling(128, 8, 3)
_WARP = 32


class Sizes(NamedTuple):
    """rows: that there is memory for. multiple: what divides an expert's rows."""

    tokens: int
    experts: int
    rows: int
    multiple: int


class Places(NamedTuple):
    """Where `place` writes. counts: int64 [experts], of rows, padding included. offsets: int64 [3, experts + 1], where
    an expert's rows begin, for three numbers of columns. place: int32 [tokens, experts], a token's row where it has the
    expert, else unwritten. token_of: int32 [rows], of padding and of what is behind it the number of tokens. prob_of:
    float32 [rows], 0 there."""

    counts: int
    offsets: int
    place: int
    token_of: int
    prob_of: int


def most_rows(tokens: int, experts: int, topk: int, multiple: int, pairs: int | None = None) -> int:
    """Return the rows that tokens with `topk` experts each can need at most.

    pairs: of a token and an expert of it, at most, where that is known.
    """
    pairs = tokens * topk if pairs is None else min(pairs, tokens * topk)
    filled = min(experts, pairs)  # experts that have rows
    return (pairs + filled * (multiple - 1)) // multiple * multiple


def place(
    te: Shim, stream: Stream, routing_map: int, probs: int, places: Places, sizes: Sizes, columns: Sequence[int]
) -> None:
    """Fill Places. probs: float32 [tokens, experts]. columns: of the three kinds of rows."""
    tokens, experts, rows, multiple = sizes
    if experts > _MOST_EXPERTS:
        raise ValueError(f"backend transformer_engine: {experts} experts; its kernels take up to {_MOST_EXPERTS}")
    count = kernel("experts_count", "experts.cu", stream.capability)
    te.launch(count, experts, _PLACING_BLOCK, 0, stream, routing_map, places.counts, tokens, experts, multiple)
    fill = kernel("experts_place", "experts.cu", stream.capability)
    te.launch(fill, experts, _PLACING_BLOCK, 0, stream, routing_map, probs, *places, tokens, experts, rows, *columns)


def offsets(te: Shim, stream: Stream, counts: int, first: int, second: int, experts: int, *columns: int) -> None:
    """Write where the experts' rows begin for two numbers of columns to first and second, int64 [experts + 1]."""
    function = kernel("experts_offsets", "experts.cu", stream.capability)
    te.launch(function, 1, _BLOCK, 0, stream, counts, first, second, experts, *columns)


class Rows(NamedTuple):
    """Rows of experts. x: 16-bit rows, or with token_of, of a Places, the tokens that these are of. begins: where the
    experts' rows begin in a matrix of so many columns, int64 [experts + 1], and counts: the experts' rows, int64
    [experts]; both 0 where each has as many."""

    x: int
    token_of: int
    begins: int
    tokens: int
    experts: int
    rows: int
    columns: int
    counts: int = 0

    @classmethod
    def of_weight(cls, address: int, experts: int, rows: int, columns: int) -> "Rows":
        """Return the Rows of a weight [rows, columns] of experts that have as many rows each."""
        return cls(address, 0, 0, rows, experts, rows, columns)


def gather(te: Shim, stream: Stream, rows: Rows, y: int, dtype: int) -> None:
    """Write Rows of tokens to y [rows, columns], zeros for padding. columns: a multiple of 16 bytes."""
    function = kernel(f"experts_gather_{ELEMENTS[dtype][0]}", "experts.cu", stream.capability)
    te.launch(function, rows.rows, _BLOCK, 0, stream, rows.x, rows.token_of, y, rows.tokens, rows.columns)


def combine(
    te: Shim,
    stream: Stream,
    rows: int,
    routing_map: int,
    places: Places,
    residual: int,
    out: int,
    sizes: Sizes,
    columns: int,
    dtype: int,
) -> None:
    """Write residual, 0 for none, plus the sum of each token's rows to out [tokens, columns].

    The sum is in float32 and rounded once.
    """
    function = kernel(f"experts_combine_{ELEMENTS[dtype][0]}", "experts.cu", stream.capability)
    given = rows, routing_map, places.place, residual, out, sizes.experts, columns
    te.launch(function, sizes.tokens, _BLOCK, 0, stream, *given)


def scatter_probs(
    te: Shim, stream: Stream, of_rows: int, routing_map: int, places: Places, dprobs: int, sizes: Sizes
) -> None:
    """Write of_rows [rows] to dprobs [tokens, experts] where the token has the expert, else 0; float32."""
    numbers = sizes.tokens * sizes.experts
    function = kernel("experts_probs", "experts.cu", stream.capability)
    te.launch(function, -(-numbers // _BLOCK), _BLOCK, 0, stream, of_rows, routing_map, places.place, dprobs, numbers)


def zero_empty(te: Shim, stream: Stream, gradients: int, counts: int, experts: int, size: int) -> None:
    """Zero the gradients of experts without rows, of `size` bytes each, a multiple of 16."""
    function, blocks = kernel("experts_zero_empty", "experts.cu", stream.capability), _ZEROING_BLOCKS
    te.launch(function, experts * blocks, _BLOCK, 0, stream, gradients, counts, blocks, size)


class ExpertsTarget(NamedTuple):
    """Say where a cast of Rows writes.

    cast: the CastTarget, whose own scale_inv is not written. scale_inv: float32 [experts], all 1 / scale. shares:
    float32 [rows, shares_of_row], whose `row_sums` are the probabilities' gradients; 0: not wanted.
    """

    cast: CastTarget
    scale_inv: int
    shares: int = 0

    @property
    def arguments(self) -> tuple[int, ...]:
        """The arguments of a kernel that stand for its TARGET_PARAMETERS."""
        return self.cast._replace(scale_inv=self.scale_inv).arguments


def cast_transpose(te: Shim, stream: Stream, rows: Rows, target: ExpertsTarget, form: Form) -> None:
    """Cast Rows to fp8, each expert's matrix with its transposed copy."""
    cast = CastKernel("experts_cast_transpose", "experts_cast.cu", form, CAST_TILING, target.cast.defines)
    given = *rows[:3], *target.arguments, *rows[3:7]
    casts.launch(te, stream, cast, [(rows.rows, rows.columns)], given)


def swiglu_cast_transpose(
    te: Shim, stream: Stream, rows: Rows, prob_of: int, target: ExpertsTarget, form: Form
) -> None:
    """Cast SwiGLU of fc1's output times the probabilities of a Places to fp8, as `cast_transpose` casts its result.

    rows: of fc1's output, [rows, 2 columns], as if it had `columns`, those of the result.
    """
    defines = {"GRADIENT": 0, **target.cast.defines}
    cast = CastKernel("experts_swiglu", "experts_swiglu.cu", form, SWIGLU_TILING, defines)
    _activate(te, stream, cast, 0, rows, prob_of, target)


def dswiglu_cast_transpose(
    te: Shim, stream: Stream, dy: int, rows: Rows, prob_of: int, target: ExpertsTarget, form: Form
) -> None:
    """Cast the gradient of fc1's output, [rows, 2 columns], from dy [rows, columns]; the rest as swiglu_cast_transpose.

    It also writes the target's shares.
    """
    defines = {"GRADIENT": 1, **target.cast.defines}
    cast = CastKernel("experts_dswiglu", "experts_swiglu.cu", form, DSWIGLU_TILING, defines)
    _activate(te, stream, cast, dy, rows, prob_of, target)


def _activate(
    te: Shim, stream: Stream, cast: CastKernel, dy: int, rows: Rows, prob_of: int, target: ExpertsTarget
) -> None:
    sizes = rows.experts, rows.rows, rows.columns
    given = dy, rows.x, prob_of, rows.begins, *target.arguments, target.shares, *sizes
    casts.launch(te, stream, cast, [(rows.rows, rows.columns)], given)


def shares_of_row(columns: int, dtype: int) -> int:
    """Return the shares that `dswiglu_cast_transpose` has of a row; 0 where its tiles do not divide the columns."""
    width = casts.VECTORS * ELEMENTS[dtype][1]
    return 0 if columns % width else columns // width


def row_sums(te: Shim, stream: Stream, numbers: int, sums: int, rows: int, columns: int) -> None:
    """Write the sums of the rows of numbers [rows, columns] to sums [rows]; float32."""
    function = kernel("experts_row_sums", "experts.cu", stream.capability)
    te.launch(function, -(-rows * _WARP // _BLOCK), _BLOCK, 0, stream, numbers, sums, rows, columns)


def add_bias(te: Shim, stream: Stream, rows: Rows, bias: int, prob_of: int, dtype: int) -> None:
    """Add an expert's bias [experts, columns] to its Rows, times the probabilities of a Places; 0: once."""
    function = kernel(f"experts_add_bias_{ELEMENTS[dtype][0]}", "experts.cu", stream.capability)
    given = rows.x, rows.begins, bias, prob_of, rows.experts, rows.columns
    te.launch(function, rows.rows, _BLOCK, 0, stream, *given)


def sum_rows(te: Shim, stream: Stream, rows: Rows, prob_of: int, sums: int, dtype: int) -> None:
    """Write the sum of each expert's Rows, times the probabilities of a Places or once, to sums [experts, columns].

    The sum is in float32, in the same order in every run, and rounded once.
    """
    element, size = ELEMENTS[dtype]
    blocks = -(-rows.columns // size // _LANES)
    function = kernel(f"experts_sum_rows_{element}", "experts.cu", stream.capability)
    given = rows.x, rows.token_of, rows.begins, prob_of, sums, rows.tokens, rows.columns
    te.launch(function, rows.experts * blocks, _BLOCK, 0, stream, *given)


def add_bias_products(te: Shim, stream: Stream, rows: Rows, bias: int, of_rows: int, dtype: int) -> None:
    """Add to of_rows, float32 [rows], each row's product with its expert's bias [experts, columns]."""
    function = kernel(f"experts_add_bias_products_{ELEMENTS[dtype][0]}", "experts.cu", stream.capability)
    given = rows.x, rows.token_of, rows.begins, bias, of_rows, rows.tokens, rows.experts, rows.columns
    te.launch(function, rows.rows, _BLOCK, 0, stream, *given)


def scaled_gelu(te: Shim, stream: Stream, x: int, of_rows: int, y: int, rows: int, columns: int, dtype: int) -> None:
    """Write GELU, in its tanh form, of x [rows, columns] times of_rows, float32 [rows], to y; zeros where that is 0."""
    function = kernel(f"experts_scaled_gelu_{ELEMENTS[dtype][0]}", "experts.cu", stream.capability)
    te.launch(function, rows, _BLOCK, 0, stream, x, of_rows, y, columns)


def scaled_dgelu(
    te: Shim,
    stream: Stream,
    dy: int,
    x: int,
    of_rows: int,
    dx: int,
    dof_rows: int,
    rows: int,
    columns: int,
    dtype: int,
) -> None:
    """Write the gradients of x and, float32 [rows], of of_rows to dx and dof_rows, from dy; see `scaled_gelu`."""
    function = kernel(f"experts_scaled_dgelu_{ELEMENTS[dtype][0]}", "experts.cu", stream.capability)
    te.launch(function, rows, _BLOCK, 0, stream, dy, x, of_rows, dx, dof_rows, columns)
