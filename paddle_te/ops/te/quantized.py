"""fp8 matrices: data, the transposed copy that Hopper's fp8 GEMM reads in backward, and scaling factors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self, TypeAlias

import paddle
import paddle.distributed as dist
from paddle import Tensor
from paddle.distributed.communication.group import Group

from paddle_te.fp8 import BlockScaling, StoredWeight
from paddle_te.fp8.scaling import BLOCK, StoredScaling, TensorScaling
from paddle_te.native import DType, ScalingMode, casts, column_sums, scaling, statistics
from paddle_te.native.casts import CastTarget
from paddle_te.native.library import cublas_version
from paddle_te.ops.te import kernel_choice, runtime
from paddle_te.ops.te.recording import RecordedQuantizer, RecordedQuantizers
from paddle_te.ops.te.runtime import FLOAT32, Matrix, Memory, Runtime

FP8 = {"e4m3": int(DType.FLOAT8_E4M3), "e5m2": int(DType.FLOAT8_E5M2)}
BLOCK_SCALING = {1: int(ScalingMode.BLOCK_SCALING_1D), 2: int(ScalingMode.BLOCK_SCALING_2D)}


class Pieces:
    """Hand out a tensor's memory in pieces.

    An allocation takes as long as ten launches' worth of Python, so what is freed together is allocated together. fp8
    GEMMs' dimensions make pieces multiples of 256 bytes.
    """

    __slots__ = ("memory", "_next")

    def __init__(self, memory: Any) -> None:
        self.memory, self._next = memory, memory.data_ptr()

    def take(self, size: int) -> int:
        """Return the address of the next `size` bytes."""
        address = self._next
        self._next = address + size
        return address


# (rowwise, columnwise), and the factors' where they are not one copy's alone
PiecesOfMatrix: TypeAlias = tuple[Pieces, Pieces | None] | tuple[Pieces, Pieces, Pieces]


def _size(shape: Sequence[int], quantizer: RecordedQuantizer) -> int:
    """Return the bytes of an fp8 matrix (rows, cols), or of its transpose, with its factors."""
    return shape[0] * shape[1] + MATRICES[quantizer.kind].factor_bytes(shape, quantizer)


def new_pieces(rt: Runtime, size: int) -> Pieces:
    """Make Pieces of that many bytes."""
    return Pieces(rt.empty([size], paddle.uint8))


def both_pieces(rt: Runtime, shape: tuple[int, int], quantizer: RecordedQuantizer) -> tuple[Pieces, Pieces]:
    """Make (rowwise, columnwise) for a Float8Matrix whose data and transpose are freed together."""
    both = new_pieces(rt, 2 * _size(shape, quantizer))
    return both, both


def rowwise_pieces(rt: Runtime, shape: tuple[int, int], quantizer: RecordedQuantizer) -> tuple[Pieces, None]:
    """Make them for one without a transpose."""
    return new_pieces(rt, _size(shape, quantizer)), None


class OperandPieces(NamedTuple):
    """Hold memory for a forward GEMM's input and weight: for each the (rowwise, columnwise) that Float8Matrix takes."""

    input: tuple[Pieces, Pieces | None]
    weight: tuple[Pieces, Pieces | None]


def operand_pieces(
    rt: Runtime,
    quantizers: RecordedQuantizers,
    shape: tuple[int, int] | None,
    weight_shape: Sequence[int] | None,
    columnwise: bool,
    keeps_input: bool,
    more: int = 0,
    transpose_y: bool = True,
) -> OperandPieces:
    """Make OperandPieces for a forward GEMM. Only the transposes of its operands are kept for backward.

    shape, weight_shape: None for an operand in memory of its own, such as a weight that is cached.
    columnwise: whether there is a backward.
    keeps_input: whether a backward reads the input's transpose, which only the weight's gradient does.
    more: further bytes that backward keeps, a multiple of 256.
    transpose_y: False for a weight in `exchanged` pieces.

    Backward makes the transpose of a weight that exists in fp8 only, unless it is kept beside the weight.
    """
    of_input = 0 if shape is None else _size(shape, quantizers.input)
    updated = weight_shape is not None and quantizers.update_weight and not quantizers.keeps_weight
    of_weight = _size(weight_shape, quantizers.weight) if updated and weight_shape is not None else 0
    keeps_input = columnwise and keeps_input
    keeps_weight = columnwise and weight_shape is not None and quantizers.weight.kind != "stored"
    # TE makes no transpose alone, so that without backward there is room for both of a weight [in, out]
    rowwise = new_pieces(rt, of_input + of_weight * (1 if transpose_y or keeps_weight else 2))
    if not (keeps_input or keeps_weight):
        return OperandPieces((rowwise, None), (rowwise, None))
    kept = new_pieces(rt, (of_input + more) * keeps_input + of_weight * keeps_weight)
    return OperandPieces((rowwise, kept if keeps_input else None), (rowwise, kept if keeps_weight else None))


def exchanged(pieces: tuple[Pieces, Pieces | None]) -> tuple[Pieces, Pieces, Pieces]:
    """Return a weight's pieces for one that is [in, out].

    Forward reads its transpose, and backward keeps its data, with its factors.
    """
    rowwise, columnwise = pieces
    kept = columnwise or rowwise
    return kept, rowwise, kept


class Float8Matrix:
    """Hold a matrix (rows, cols) in fp8, uninitialised, with its quantizer's factors, as delayed scaling has them.

    It lies in the next pieces of `rowwise` and, if given, `columnwise`. The classes below have factors of their own.

    factors: the Pieces for these, where they are not one copy's alone; by default the transpose's. native: what TE's
    functions take. rowwise, columnwise: the tensors that its data and its transpose lie in, or None.
    """

    __slots__ = (
        "shape", "quantizer", "native", "rowwise", "columnwise", "_data", "_transpose", "_scale_inv"
    )  # fmt: skip
    split_accumulator = False  # whether the forward GEMM, too, must sum exactly
    has_rows = True  # whether some `rows` of it are a matrix, too

    @staticmethod
    def factor_bytes(shape: Sequence[int], quantizer: RecordedQuantizer) -> int:
        """Return those of a matrix's own factors, in either copy's pieces: a multiple of 256."""
        return 0

    def __init__(
        self,
        rt: Runtime,
        shape: tuple[int, int],
        quantizer: RecordedQuantizer,
        rowwise: Pieces,
        columnwise: Pieces | None,
        factors: Pieces | None = None,
    ) -> None:
        self.shape, self.quantizer = shape, quantizer
        size = shape[0] * shape[1]
        self._data, self.rowwise = rowwise.take(size), rowwise.memory
        self._transpose = columnwise.take(size) if columnwise else 0
        self.columnwise: Any = columnwise.memory if columnwise else None
        self._bind(rt, *self._take_factors(rowwise, columnwise, factors))

    def _take_factors(self, rowwise: Pieces, columnwise: Pieces | None, factors: Pieces | None) -> tuple[int, ...]:
        """Return (scale, amax) for the native tensor."""
        self._scale_inv = self.quantizer.scale_inv_ptr
        return self._scale_and_amax()

    def _scale_and_amax(self) -> tuple[int, int]:
        return self.quantizer.scale_ptr, self.quantizer.amax_ptr

    def _bind(self, rt: Runtime, scale: int = 0, amax: int = 0) -> None:
        code = FP8[self.quantizer.dtype]
        self.native = rt.tensor(self._data, self.shape, code, self._transpose, scale, amax, self._scale_inv)

    def fill(self, rt: Runtime, source: Matrix, dbias: Any = None) -> Self:
        """Quantize a Matrix. dbias: a native tensor for the sum of its rows."""
        if dbias is not None:
            rt.te.quantize_dbias(source.native, self.native, dbias, rt.stream)  # in the same pass
            self.count(rt, source)
        elif kernel_choice.cast():
            dtypes = source.native.dtype, FP8[self.quantizer.dtype]
            casts.cast_transpose(rt.te, rt.stream, source.memory.data_ptr(), self._target(), *self.shape, *dtypes)
        else:
            rt.te.quantize(source.native, self.native, rt.stream)
            self.count(rt, source)
        return self

    @property
    def counts(self) -> bool:
        """Whether this step counts statistics of its numbers."""
        return bool(self.quantizer.statistics_ptr)

    def count(self, rt: Runtime, source: Matrix) -> None:
        """Count what became of a Matrix that one of TE's functions has cast. Our own kernels count for themselves.

        Its scale must be known by now.
        """
        if self.counts:
            x, (scale, _), record = source.memory.data_ptr(), self._scale_and_amax(), self.quantizer.statistics_ptr
            statistics.of_cast(rt.te, rt.stream, x, scale, record, *self.shape, self._form(source))

    def _form(self, source: Matrix) -> casts.Form:
        return casts.Form(source.native.dtype, FP8[self.quantizer.dtype])

    def fill_by(self, rt: Runtime, cast: Callable[[CastTarget, bool], None]) -> Self:
        """Quantize what `cast` computes. Not with block scaling.

        cast: a function of a CastTarget, which it writes to, and of whether the numbers are rounded to the activations'
        dtype before, as if they had been stored.
        """
        cast(self._target(), False)
        return self

    def _target(self) -> CastTarget:
        factors = *self._scale_and_amax(), self._scale_inv
        return CastTarget(self._data, self._transpose, *factors, self.quantizer.statistics_ptr)

    def drop_data(self, rt: Runtime) -> None:
        """Let go of the rowwise data: backward reads the transposed copy only."""
        self.rowwise, self._data = None, 0
        self._bind(rt)

    def drop_transpose(self, rt: Runtime) -> None:
        """Free the transposed copy: backward reads only the rowwise data of a weight [in, out]."""
        self.columnwise, self._transpose = None, 0
        self._bind(rt)

    @classmethod
    def rows_of_rank(cls, rt: Runtime, shape: tuple[int, int], quantizer: RecordedQuantizer) -> Self:
        """Make a rank's own rows, from which `gathered` makes the matrix of all ranks' rows.

        Their data is a tensor of its own, without a transposed copy. Block scaling does not support this.
        """
        return cls(rt, shape, quantizer, Pieces(rt.empty(list(shape), paddle.uint8)), None)

    def gathered(self, rt: Runtime, whole: Memory, rowwise: bool = True, columnwise: bool = True) -> Float8Matrix:
        """Make the matrix whose data is the tensor `whole`, with this matrix's scale.

        whole: all ranks' `rowwise`; the ranks must have the same scale. rowwise, columnwise: whether the data, and
        whether the transpose, is wanted.
        """
        rows, cols = whole.shape
        out = self._of((rows, cols), whole, whole.data_ptr())
        if columnwise:
            out._transpose_data(rt)
        if not rowwise:
            out.rowwise, out._data = None, 0
        out._bind(rt)
        return out

    def rows(self, rt: Runtime, first: int, count: int) -> Float8Matrix:
        """Make the matrix of `count` rows from row `first` on, of the data alone, where it `has_rows`."""
        out = self._of((count, self.shape[1]), self.rowwise, self._data + first * self.shape[1])
        out._bind(rt)
        return out

    def add_transpose(self, rt: Runtime) -> None:
        """Make the transposed copy as well."""
        self._transpose_data(rt)
        self._bind(rt)

    def _of(self, shape: tuple[int, int], rowwise: Any, data: int) -> Float8Matrix:
        """Make a matrix with this matrix's scale on data at an address in a tensor; bind it before use."""
        out = Float8Matrix.__new__(Float8Matrix)
        out.quantizer, out._scale_inv, out.shape = self.quantizer, self._scale_inv, shape
        out.rowwise, out._data, out.columnwise, out._transpose = rowwise, data, None, 0
        return out

    def _transpose_data(self, rt: Runtime) -> None:
        """Make the transposed copy of the data, in a tensor of its own."""
        (rows, cols), code = self.shape, FP8[self.quantizer.dtype]
        self.columnwise = rt.empty([cols, rows], paddle.uint8)
        self._transpose = self.columnwise.data_ptr()
        data, transpose = rt.tensor(self._data, (rows, cols), code), rt.tensor(self._transpose, (cols, rows), code)
        rt.te.transpose(data, transpose, rt.stream)


Operand: TypeAlias = Matrix | Float8Matrix  # what a GEMM reads


class CurrentMatrix(Float8Matrix):
    """Hold a matrix whose scale comes from its own numbers. Both copies have the same factors."""

    __slots__ = ("_factors",)

    @staticmethod
    def factor_bytes(shape: Sequence[int], quantizer: RecordedQuantizer) -> int:
        return 256  # amax, scale, two unused, scale_inv (16-byte aligned), rounded up for what follows

    def _take_factors(self, rowwise: Pieces, columnwise: Pieces | None, factors: Pieces | None) -> tuple[int, ...]:
        self._factors = (factors or columnwise or rowwise).take(self.factor_bytes(self.shape, self.quantizer))
        self._scale_inv = self._factors + 16
        return self._scale_and_amax()

    def _scale_and_amax(self) -> tuple[int, int]:
        # in delayed scaling's first step the amax is the history's, to which the cast adds
        return self._factors + 4, self.quantizer.amax_ptr or self._factors

    def fill(self, rt: Runtime, source: Matrix, dbias: Any = None) -> Self:
        measured = self._measured(rt)
        rt.te.compute_amax(source.native, measured, rt.stream)
        rt.te.compute_scale_from_amax(measured, rt.stream)
        return super().fill(rt, source, dbias)

    def fill_by(self, rt: Runtime, cast: Callable[[CastTarget, bool], None]) -> Self:
        """Quantize in two passes over the tensor that `cast` reads; the first pass writes only the amax."""
        rt.te.memset_async(self._factors, 0, 4, rt.stream)
        cast(CastTarget.only_amax(self._factors), True)
        rt.te.compute_scale_from_amax(self._measured(rt), rt.stream)
        cast(self._target(), True)
        return self

    def _measured(self, rt: Runtime) -> Any:
        """Make the native tensor with an amax of its own, which compute_amax overwrites."""
        if not self.quantizer.amax_ptr:
            return self.native
        amax, scale, scale_inv = self._factors, self._factors + 4, self._scale_inv
        return rt.tensor(self._data, self.shape, FP8[self.quantizer.dtype], 0, scale, amax, scale_inv)


def block_factor_bytes(shape: Sequence[int], block_scaling_dim: int) -> int:
    """Return the bytes of the scales of one copy of a matrix (rows, cols) with block scaling, a multiple of 256.

    The greater of both copies', whose last dimensions are rounded up to multiples of 4.
    """
    rows, cols = shape
    if block_scaling_dim == 2:
        rows, cols = (-(-size // (4 * BLOCK)) * 4 for size in shape)
    else:
        cols //= BLOCK
    return -(-4 * rows * cols // 256) * 256


class BlockMatrix(Float8Matrix):
    """Hold one with block scaling.

    Each copy has scales of its own, behind it in its pieces, and with blocks of 1 x 128 other values, too: both are
    quantized from the source.
    """

    __slots__ = ("_transpose_scale_inv",)
    split_accumulator, has_rows = True, False

    @staticmethod
    def factor_bytes(shape: Sequence[int], quantizer: RecordedQuantizer) -> int:
        assert isinstance(quantizer.scaling, BlockScaling)
        return block_factor_bytes(shape, quantizer.scaling.block_scaling_dim)

    def _take_factors(self, rowwise: Pieces, columnwise: Pieces | None, factors: Pieces | None) -> tuple[int, ...]:
        size = self.factor_bytes(self.shape, self.quantizer)
        self._scale_inv = rowwise.take(size)
        self._transpose_scale_inv = columnwise.take(size) if columnwise else 0
        return ()

    @property
    def _scaling(self) -> BlockScaling:
        assert isinstance(self.quantizer.scaling, BlockScaling)
        return self.quantizer.scaling

    def _bind(self, rt: Runtime, scale: int = 0, amax: int = 0) -> None:
        mode = BLOCK_SCALING[self._scaling.block_scaling_dim]
        scale_inv = self._scale_inv if self._data else 0
        transpose_scale_inv = self._transpose_scale_inv if self._transpose else 0
        factors = 0, 0, scale_inv, transpose_scale_inv, mode
        self.native = rt.tensor(self._data, self.shape, FP8[self.quantizer.dtype], self._transpose, *factors)

    def fill(self, rt: Runtime, source: Matrix, dbias: Any = None) -> Self:
        scaling = self._scaling
        rt.te.quantize_blocks(source.native, self.native, scaling.power_2_scale, scaling.amax_epsilon, rt.stream)
        if dbias is not None:
            addresses = source.native.data_ptr, dbias.data_ptr
            column_sums.column_sums(rt.te, rt.stream, *addresses, *self.shape, source.native.dtype)
        self.count(rt, source)
        return self

    def count(self, rt: Runtime, source: Matrix) -> None:
        self._count(rt, source.memory.data_ptr(), self._form(source))

    def _count(self, rt: Runtime, x: int, form: casts.Form, part: statistics.Part | None = None) -> None:
        """Count the numbers at an address, or a part of them."""
        if self.counts:
            scaling, given = self._scaling, (x, self.quantizer.statistics_ptr, *self.shape, form)
            blocks = scaling.block_scaling_dim == 2, scaling.power_2_scale, scaling.amax_epsilon
            statistics.of_blocks(rt.te, rt.stream, *given, statistics.Blocks(*blocks), part or statistics.Part())


class StoredMatrix(Float8Matrix):
    """Hold a weight that exists in fp8 only: a tensor of bytes with a StoredWeight as quantizer.

    transpose: a tensor of the transposed copy, if that is kept. transposed: hold this copy alone, a new one if none is
    kept.
    """

    __slots__ = ()

    def __init__(
        self, rt: Runtime, weight: Any, quantizer: Any, transpose: Any = None, transposed: bool = False
    ) -> None:
        self.shape, self.quantizer, self.rowwise, self.columnwise = tuple(weight.shape), quantizer, weight, transpose
        self._data, self._transpose = weight.data_ptr(), 0
        self._find_factors()
        if transposed:
            self.columnwise = transposed_bytes(rt, weight) if transpose is None else transpose
            self._data, self._transpose = 0, self.columnwise.data_ptr()
        self._bind(rt)

    def _find_factors(self) -> None:
        self._scale_inv = self.quantizer.scale_inv_ptr

    def drop_data(self, rt: Runtime) -> None:
        """Keep it: the parameter stays; backward may make the transpose of it."""

    def transposed(self, rt: Runtime) -> Self:
        """Make the matrix of the transposed copy alone."""
        return type(self)(rt, self.rowwise, self.quantizer, self.columnwise, transposed=True)


class StoredBlockMatrix(StoredMatrix, BlockMatrix):
    """Hold one with a scale for each block. The scales of the transposed copy are the same numbers, transposed.

    They are kept behind the scales of the data, although they could be made anew: they take only 4 bytes for 16,384
    numbers of the weight.
    """

    __slots__ = ()

    @property
    def _scaling(self) -> BlockScaling:
        return _made_in_blocks(self.quantizer.scaling)

    def _find_factors(self) -> None:
        self._scale_inv = self.quantizer.scale_inv_ptr
        self._transpose_scale_inv = self._scale_inv + block_factor_bytes(self.shape, self._scaling.block_scaling_dim)

    @classmethod
    def store(cls, rt: Runtime, source: Matrix, weight: Tensor, stored: StoredWeight) -> None:
        """Quantize a Matrix into the bytes `weight`, and give the StoredWeight scale_inv.

        TE's kernel writes the transposed scales with a transposed copy, which is let go of.
        """
        size = block_factor_bytes(source.shape, _made_in_blocks(stored.scaling).block_scaling_dim)
        stored.scale_inv = rt.empty([2 * size // 4], paddle.float32)
        matrix = cls(rt, weight, stored)
        matrix.columnwise = rt.empty(source.shape[::-1], paddle.uint8)
        matrix._transpose = matrix.columnwise.data_ptr()
        matrix._bind(rt)
        matrix.fill(rt, source)


def transposed_bytes(rt: Runtime, weight: Any) -> Any:
    """Return a tensor with the bytes [..., out, in] of a weight, each matrix of it transposed: [..., in, out]."""
    *experts, out, in_ = weight.shape
    transpose, code = rt.empty([*experts, in_, out], paddle.uint8), FP8["e4m3"]
    for begin in range(0, math.prod(weight.shape), out * in_):
        data = rt.tensor(weight.data_ptr() + begin, (out, in_), code)
        rt.te.transpose(data, rt.tensor(transpose.data_ptr() + begin, (in_, out), code), rt.stream)
    return transpose


def _made_in_blocks(scaling: TensorScaling | BlockScaling | StoredScaling) -> BlockScaling:
    assert isinstance(scaling, StoredScaling) and isinstance(scaling.made_by, BlockScaling)
    return scaling.made_by


MATRICES: dict[str, type[Float8Matrix]] = {
    "delayed": Float8Matrix,
    "current": CurrentMatrix,
    "block": BlockMatrix,
}  # by their quantizers' kind


def quantize_weight(source: Tensor, weight: Tensor, stored: StoredWeight, group: Group | None = None) -> None:
    """Quantize a weight of bfloat16 or float16: see `paddle_te.fp8.emulation.quantize_weight`.

    A transposed copy that is kept is made here, where the weight gets other bytes, and nowhere else.
    """
    rt = runtime.current()
    matrix = rt.matrix(runtime.dense(source), runtime.dtype_code("the weight", source))
    if stored.scaling.in_blocks:
        StoredBlockMatrix.store(rt, matrix, weight, stored)
    else:
        _store(rt, matrix, weight, stored, group)
    stored.transpose = transposed_bytes(rt, weight) if stored.scaling.keeps_transpose else None


def _store(rt: Runtime, matrix: Matrix, weight: Tensor, stored: StoredWeight, group: Group | None) -> None:
    """Quantize a Matrix into the bytes `weight`, under one scale."""
    amax, scale = rt.empty([1], paddle.float32), rt.empty([1], paddle.float32)
    factors = scale.data_ptr(), amax.data_ptr(), stored.scale_inv_ptr
    native = rt.tensor(weight.data_ptr(), matrix.shape, FP8[stored.dtype], 0, *factors)
    rt.te.compute_amax(matrix.native, native, rt.stream)
    if group is not None:
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
    rt.te.compute_scale_from_amax(native, rt.stream)
    rt.te.quantize(matrix.native, native, rt.stream)
    if weight.ndim == 3:  # experts': grouped GEMMs read the scale once for each
        stored.scale_inv = stored.scale_inv[:1].expand([weight.shape[0]]).contiguous()


def new_float8(
    rt: Runtime,
    shape: tuple[int, int],
    quantizer: RecordedQuantizer,
    pieces: PiecesOfMatrix | None = None,
) -> Float8Matrix:
    """Make a Float8Matrix of the quantizer's kind, uninitialised.

    pieces: (rowwise, columnwise); None: new ones for both.
    """
    return MATRICES[quantizer.kind](rt, shape, quantizer, *(pieces or both_pieces(rt, shape, quantizer)))


def quantize(
    rt: Runtime,
    source: Matrix,
    quantizer: RecordedQuantizer,
    pieces: PiecesOfMatrix | None = None,
    dbias: Any = None,
) -> Float8Matrix:
    """Make a Float8Matrix of a Matrix; pieces: `new_float8`'s. dbias: as `fill`'s."""
    return new_float8(rt, source.shape, quantizer, pieces).fill(rt, source, dbias)


def quantized_weight(
    rt: Runtime, weight: Memory, code: int, quantizers: RecordedQuantizers, pieces: PiecesOfMatrix
) -> Float8Matrix:
    """Return the weight, a tensor, in fp8.

    Itself where it exists so only, the copy that an earlier micro-batch or this op's forward has kept, or a new one.

    code: of its dtype where it is not in fp8. pieces: the weight's of `operand_pieces`, `exchanged` for a weight [in,
    out].
    """
    scaling = quantizers.weight.scaling
    if isinstance(scaling, StoredScaling):
        kind = StoredBlockMatrix if scaling.in_blocks else StoredMatrix
        return kind(rt, weight, quantizers.weight, quantizers.cached_weight)
    matrix = rt.matrix(weight, code)
    if quantizers.cached_weight is not None:
        kept = Pieces(quantizers.cached_weight)
        return MATRICES[quantizers.weight.kind](rt, matrix.shape, quantizers.weight, kept, kept)
    result = quantize(rt, matrix, quantizers.weight, None if quantizers.keeps_weight else pieces)
    if quantizers.keeps_weight:
        quantizers.cached_weight = result.rowwise
    return result


def quantized_together(
    rt: Runtime, weights: Sequence[Memory], code: int, quantizers: Sequence[RecordedQuantizers | None], columnwise: bool
) -> list[Float8Matrix] | list[None]:
    """Return two weights [out, in] in fp8, cast by one kernel.

    quantizers: of each weight's GEMM. columnwise: whether there is a backward.

    Returns [None, None] if each weight needs `quantized_weight`: scales are not known before, a weight is already in
    fp8, its copy is kept, TE's function casts, or statistics are counted.
    """
    pairs = [(weight, q) for weight, q in zip(weights, quantizers, strict=True) if q is not None and _casts_anew(q)]
    if len(pairs) < len(weights) or not kernel_choice.cast():
        return [None, None]
    made: list[Float8Matrix] = []
    calls: list[tuple[int, CastTarget, int, int]] = []
    for weight, q in pairs:
        rows, cols = weight.shape
        pieces = operand_pieces(rt, q, None, (rows, cols), columnwise, keeps_input=False)
        made.append(new_float8(rt, (rows, cols), q.weight, pieces.weight))
        calls.append((weight.data_ptr(), made[-1]._target(), rows, cols))
    first, second = calls
    casts.cast_transpose_both(rt.te, rt.stream, first, second, code, FP8[made[0].quantizer.dtype])
    return made


def _casts_anew(quantizers: RecordedQuantizers) -> bool:
    once = quantizers.update_weight and not quantizers.keeps_weight
    return quantizers.weight.kind == "delayed" and once and not quantizers.weight.statistics_ptr


def check_block_scaling() -> None:
    """Raise ValueError where cuBLAS has no GEMM of fp8 with block scaling."""
    major, minor = runtime.current().stream.capability
    if major != 9:  # TE's PyTorch layers compute with MXFP8 in its place on Blackwell
        raise ValueError(
            f"fp8_recipe=block needs GPUs of compute capability 9.0, Hopper's, not {major}.{minor}; take delayed or "
            "current scaling"
        )
    if cublas_version() < (12, 9):
        raise ValueError(
            "fp8_recipe=block needs cuBLAS 12.9 or newer, not {}.{}; update it, or take delayed or current "
            "scaling".format(*cublas_version())
        )


def amax_and_scale_update(
    history: Tensor,
    scale: Tensor,
    fp8_max: float,
    margin: int,
    amax_compute_algo: str,
    scale_inv: Tensor | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Update all of delayed scaling's scales in one kernel, in place: see `paddle_te.fp8.amax_and_scale_update`."""
    rt = runtime.current()
    dtype = FP8["e4m3" if fp8_max == 448 else "e5m2"]
    of_history, of_scale = [rt.view(tensor, tuple(tensor.shape), FLOAT32) for tensor in (history, scale)]
    rt.te.amax_and_scale_update(of_history, of_scale, amax_compute_algo, dtype, margin, rt.stream)
    if scale_inv is not None:
        scaling.reciprocals(rt.te, rt.stream, scale.data_ptr(), scale_inv.data_ptr(), scale.shape[0])
    return None
