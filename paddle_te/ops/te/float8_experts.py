"""Operands of grouped GEMMs in fp8: each expert's matrix with its transposed copy.

With a scale for a tensor all experts share it. With block scaling each expert's copies and their scales lie behind
those of the one before, as Transformer Engine's grouped functions have them.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import paddle

from paddle_te.fp8.scaling import BLOCK, BlockScaling
from paddle_te.native import experts, statistics
from paddle_te.native.casts import CastTarget, Form
from paddle_te.native.experts import ExpertsTarget
from paddle_te.ops.activations import FC1_WIDTHS
from paddle_te.ops.te.quantized import (
    FP8,
    MATRICES,
    BlockMatrix,
    Float8Matrix,
    Pieces,
    new_pieces,
    transposed_bytes,
)
from paddle_te.ops.te.recording import Placeholder, RecordedQuantizer, RecordedQuantizers, Recorder


class ActivationInput(NamedTuple):
    """fc1's output. rows: as `experts.swiglu_cast_transpose` has them. prob_of: a Places'. code: of the dtype."""

    rows: experts.Rows
    prob_of: int
    code: int


class Operand:
    """A Float8Matrix of all experts, used as a Matrix.

    scale_inv: the address of its scale's inverse once for each expert.
    """

    __slots__ = ("_matrix", "scale_inv", "_memory")

    def __init__(self, matrix: Float8Matrix, scale_inv: int, memory: Placeholder | None) -> None:
        """memory: the Placeholder that scale_inv lies in."""
        self._matrix, self.scale_inv, self._memory = matrix, scale_inv, memory

    @property
    def native(self) -> Any:
        return self._matrix.native

    @property
    def shape(self) -> tuple[int, int]:
        return self._matrix.shape

    def drop_data(self, rt: Recorder) -> None:
        """Let go of the rowwise data: backward reads the transposed copies only."""
        self._matrix.drop_data(rt)

    def fill_rows(self, rt: Recorder, rows: experts.Rows, code: int) -> Self:
        """Quantize experts.Rows of that dtype."""
        form = Form(code, FP8[self._matrix.quantizer.dtype])

        def cast(target: CastTarget, _: object) -> None:
            experts.cast_transpose(rt.te, rt.stream, rows, ExpertsTarget(target, self.scale_inv), form)

        self._matrix.fill_by(rt, cast)
        return self

    def fill_activation(self, rt: Recorder, of: ActivationInput, dact: int = 0, shares: int = 0) -> Self:
        """Quantize SwiGLU, or with the address of its result's gradient the input's gradient.

        shares: an ExpertsTarget's.
        """
        float8 = FP8[self._matrix.quantizer.dtype]

        def cast(target: CastTarget, rounded: bool) -> None:
            written = shares if target.data or target.transposed else 0  # once, not when the amax is measured
            given = of.rows, of.prob_of, ExpertsTarget(target, self.scale_inv, written), Form(of.code, float8, rounded)
            if dact:
                experts.dswiglu_cast_transpose(rt.te, rt.stream, dact, *given)
            else:
                experts.swiglu_cast_transpose(rt.te, rt.stream, *given)

        self._matrix.fill_by(rt, cast)
        return self


class BlockOperand(BlockMatrix):
    """One with block scaling. scale_inv: none beside those that the matrix has."""

    __slots__ = ("experts",)
    scale_inv = 0

    def __init__(
        self,
        rt: Recorder,
        shape: tuple[int, int],
        quantizer: RecordedQuantizer,
        rowwise: Pieces,
        columnwise: Pieces | None,
        count: int,
    ) -> None:
        """count: of experts."""
        self.experts = count
        super().__init__(rt, shape, quantizer, rowwise, columnwise)

    def _take_factors(self, rowwise: Pieces, columnwise: Pieces | None, factors: Pieces | None) -> tuple[int, ...]:
        size = _factor_bytes(self.shape, self.quantizer, self.experts)
        self._scale_inv = rowwise.take(size)
        self._transpose_scale_inv = columnwise.take(size) if columnwise else 0
        return ()

    def fill_rows(self, rt: Recorder, rows: experts.Rows, code: int) -> Self:
        """Quantize experts.Rows of that dtype, which are gathered before."""
        source = rt.tensor(rows.x, self.shape, code)
        if rows.token_of:
            gathered = rt.empty([rows.rows, rows.columns], paddle.bfloat16)  # two bytes, whatever they mean
            experts.gather(rt.te, rt.stream, rows, gathered.data_ptr(), code)
            source = rt.view(gathered, self.shape, code)
        scaling, given = self._scaling, (self.experts, rows.counts, rows.begins)
        options = scaling.power_2_scale, scaling.amax_epsilon
        rt.te.quantize_grouped_blocks(source, self.native, *given, *options, rt.stream)
        x = gathered.data_ptr() if rows.token_of else rows.x
        part = statistics.Part(rows.begins, rows.experts if rows.begins else 0)
        self._count(rt, x, Form(code, FP8[self.quantizer.dtype]), part)
        return self


class StoredOperand:
    """A weight [E, out, in] that exists in fp8 only: a tensor of bytes with a StoredWeight as quantizer.

    transpose, transposed: as a StoredMatrix's, of each expert's copy.
    """

    __slots__ = ("weight", "quantizer", "shape", "scale_inv", "native", "_transpose")

    def __init__(
        self,
        rt: Recorder,
        weight: Placeholder,
        quantizer: RecordedQuantizer,
        transpose: Placeholder | None = None,
        transposed: bool = False,
    ) -> None:
        self.weight, self.quantizer, self._transpose = weight, quantizer, transpose
        self.shape, self.scale_inv = (weight.shape[0] * weight.shape[1], weight.shape[2]), quantizer.scale_inv_ptr
        data, columnwise = weight.data_ptr(), 0
        if transposed:
            self._transpose = transposed_bytes(rt, weight) if transpose is None else transpose
            data, columnwise = 0, self._transpose.data_ptr()
        self.native = rt.tensor(data, self.shape, FP8[quantizer.dtype], columnwise, 0, 0, self.scale_inv)

    def transposed(self, rt: Recorder) -> StoredOperand:
        """Make the operand of each expert's transposed copy: of those that are kept, or for one GEMM."""
        return StoredOperand(rt, self.weight, self.quantizer, self._transpose, transposed=True)


def for_backward(rt: Recorder, weight: Any) -> Any:
    """Return a weight's operand as dgrad reads it."""
    return weight.transposed(rt) if isinstance(weight, StoredOperand) else weight


def scale_inv(matrix: object) -> int:
    """Return the address of an operand's scales' inverses, one for each expert, or 0."""
    return matrix.scale_inv if isinstance(matrix, Operand | StoredOperand) else 0


def drop_data(rt: Recorder, *operands: Any) -> None:
    """Let go of what backward does not read of those in fp8."""
    for operand in operands:
        if isinstance(operand, Operand | BlockOperand):
            operand.drop_data(rt)


def quantized(
    rt: Recorder, rows: experts.Rows, quantizer: RecordedQuantizer, code: int, transposes: bool
) -> Operand | BlockOperand:
    """Return an operand of experts.Rows. transposes: whether there are transposed copies, too."""
    return _new_operand(rt, (rows.rows, rows.columns), quantizer, rows.experts, transposes).fill_rows(rt, rows, code)


def activated(
    rt: Recorder, of: ActivationInput, quantizer: RecordedQuantizer, transposes: bool, dact: int = 0, shares: int = 0
) -> Operand:
    """Return the operand of `Operand.fill_activation`, where `kernel_choice.experts_swiglu` takes it."""
    shape = of.rows.rows, of.rows.columns * (FC1_WIDTHS["swiglu"] if dact else 1)
    operand = _new_operand(rt, shape, quantizer, of.rows.experts, transposes)
    assert isinstance(operand, Operand)
    return operand.fill_activation(rt, of, dact, shares)


def _new_operand(
    rt: Recorder, shape: tuple[int, int], quantizer: RecordedQuantizer, count: int, transposes: bool
) -> Operand | BlockOperand:
    """Make an operand of `count` experts, uninitialised."""
    size = _bytes(shape, quantizer, count)
    rowwise, columnwise = new_pieces(rt, size), new_pieces(rt, size) if transposes else None
    memory = rt.empty([count], paddle.float32) if quantizer.kind != "block" else None
    scales = 0 if memory is None else memory.data_ptr()
    return _operand(rt, shape, quantizer, rowwise, columnwise, count, scales, memory)


def _operand(
    rt: Recorder,
    shape: tuple[int, int],
    quantizer: RecordedQuantizer,
    rowwise: Pieces,
    columnwise: Pieces | None,
    count: int,
    scales: int,
    memory: Placeholder | None,
) -> Operand | BlockOperand:
    """scales: the address of the scales' inverses of a quantizer that has one for a tensor; memory: what holds them."""
    if quantizer.kind == "block":
        return BlockOperand(rt, shape, quantizer, rowwise, columnwise, count)
    return Operand(MATRICES[quantizer.kind](rt, shape, quantizer, rowwise, columnwise), scales, memory)


def _bytes(shape: tuple[int, int], quantizer: RecordedQuantizer, count: int) -> int:
    return shape[0] * shape[1] + _factor_bytes(shape, quantizer, count)


def _factor_bytes(shape: tuple[int, int], quantizer: RecordedQuantizer, count: int) -> int:
    """Return the bytes of the factors of one copy of all experts' matrices, a multiple of 256."""
    scaling = quantizer.scaling
    if not isinstance(scaling, BlockScaling):
        return MATRICES[quantizer.kind].factor_bytes(shape, quantizer)
    rows, columns = shape
    scales = rows * columns // BLOCK
    if scaling.block_scaling_dim == 2:  # the lines of an expert's are filled up to 4, in either copy
        blocks = [-(-size // (4 * BLOCK)) * 4 for size in (rows // count, columns)]
        scales = count * blocks[0] * blocks[1]
    return -(-4 * scales // 256) * 256


def quantized_weight(
    rt: Recorder, weight: Placeholder, quantizers: RecordedQuantizers, code: int, train: bool
) -> Operand | BlockOperand | StoredOperand:
    """Return an operand of a weight [E, out, in], a tensor.

    Itself where it exists in fp8 only, what an earlier micro-batch has kept, or a new one.
    """
    count, out, in_ = weight.shape
    shape, quantizer = (count * out, in_), quantizers.weight
    if quantizer.kind == "stored":
        return StoredOperand(rt, weight, quantizer, quantizers.cached_weight)
    if quantizers.cached_weight is not None:
        return _kept(rt, quantizers.cached_weight, shape, quantizer, count)
    rows = experts.Rows.of_weight(weight.data_ptr(), count, *shape)
    if not quantizers.keeps_weight:
        return quantized(rt, rows, quantizer, code, train)
    memory = rt.empty([2 * _bytes(shape, quantizer, count) + 4 * count], paddle.uint8)
    quantizers.cached_weight = memory
    return _kept(rt, memory, shape, quantizer, count).fill_rows(rt, rows, code)


def _kept(
    rt: Recorder, memory: Placeholder, shape: tuple[int, int], quantizer: RecordedQuantizer, count: int
) -> Operand | BlockOperand:
    """Return the operand in the memory of both copies and, behind them, the scales."""
    pieces = Pieces(memory)
    operand = _operand(rt, shape, quantizer, pieces, pieces, count, 0, memory)
    if isinstance(operand, Operand):
        operand.scale_inv = pieces.take(4 * count)
    return operand
