"""Operands of grouped GEMMs in fp8: one scale for all experts' matrices, and each with its transposed copy."""

import paddle

from paddle_te.native import experts
from paddle_te.ops.te.quantized import FP8, MATRICES, Pieces, new_float8, new_pieces, rowwise_pieces


class Operand:
    """A Float8Matrix of all experts, and scale_inv, the address of its scale's inverse once for each expert. What is
    wanted of a Matrix is wanted of it."""

    __slots__ = ("_matrix", "scale_inv", "_memory")

    def __init__(self, matrix, scale_inv, memory):
        """memory: the Placeholder that scale_inv lies in."""
        self._matrix, self.scale_inv, self._memory = matrix, scale_inv, memory

    @property
    def native(self):
        return self._matrix.native

    @property
    def shape(self):
        return self._matrix.shape

    def drop_data(self, rt):
        """Let go of the rowwise data: backward reads the transposed copies only."""
        self._matrix.drop_data(rt)

    def fill(self, rt, rows, code):
        """Quantize experts.Rows of that dtype."""
        float8 = FP8[self._matrix.quantizer.dtype]

        def cast(target, _):
            experts.cast_transpose(rt.te, rt.stream, rows, target, self.scale_inv, code, float8)

        self._matrix.fill_by(rt, cast)
        return self


def drop_data(rt, *operands):
    """Let go of what backward does not read of those in fp8."""
    for operand in operands:
        if isinstance(operand, Operand):
            operand.drop_data(rt)


def quantized(rt, rows, quantizer, code, transposes):
    """An Operand of experts.Rows. transposes: whether there are transposed copies, too."""
    shape = rows.rows, rows.columns
    if transposes:
        pieces = new_pieces(rt, _bytes(shape, quantizer)), new_pieces(rt, _bytes(shape, quantizer))
    else:
        pieces = rowwise_pieces(rt, shape, quantizer)
    matrix, scale_inv = new_float8(rt, shape, quantizer, pieces), rt.empty([rows.experts], paddle.float32)
    return Operand(matrix, scale_inv.data_ptr(), scale_inv).fill(rt, rows, code)


def _bytes(shape, quantizer):
    return shape[0] * shape[1] + MATRICES[quantizer.kind].factor_bytes(shape, quantizer)


def quantized_weight(rt, weight, quantizers, code, train):
    """An Operand of a weight [E, out, in], a tensor: the copy that an earlier micro-batch has kept, or a new one."""
    count, out, in_ = weight.shape
    shape, quantizer = (count * out, in_), quantizers.weight
    if quantizers.cached_weight is not None:
        return _kept(rt, quantizers.cached_weight, shape, quantizer, count)
    rows = experts.Rows.of_weight(weight.data_ptr(), count, *shape)
    if not quantizers.keeps_weight:
        return quantized(rt, rows, quantizer, code, train)
    memory = rt.empty([2 * _bytes(shape, quantizer) + 4 * count], paddle.uint8)
    quantizers.cached_weight = memory
    return _kept(rt, memory, shape, quantizer, count).fill(rt, rows, code)


def _kept(rt, memory, shape, quantizer, count):
    """The Operand in the memory of both copies and, behind them, the scales."""
    pieces = Pieces(memory)
    matrix = MATRICES[quantizer.kind](rt, shape, quantizer, pieces, pieces)
    return Operand(matrix, pieces.take(4 * count), memory)
