"""What Ops with GEMMs are made of: operands, the three GEMMs, biases, and collectives around them.

With W [out, in]: y = x·Wᵀ, dx = dy·W, dW = dyᵀ·x. Under fp8 the three read e4m3 copies of x and W and a copy of dy in
the recipe's backward format; forward makes the transposed copies that backward reads and frees the others. With
transpose_y=False W is [in, out]: y = x·W, dx = dy·Wᵀ, dW = xᵀ·dy. TE picks of each fp8 operand the copy that Hopper's
GEMM reads, so that only flags differ, and which copy of W backward reads: the one that is not transposed.
"""

import math
import operator
from dataclasses import dataclass
from typing import Any

import paddle

from paddle_te.native import addition
from paddle_te.ops.te.norm import Normed
from paddle_te.ops.te.quantized import (
    Float8Matrix,
    StoredMatrix,
    exchanged,
    new_float8,
    operand_pieces,
    quantize,
    quantized_weight,
    rowwise_pieces,
)
from paddle_te.ops.te.recording import Placeholder
from paddle_te.ops.te.runtime import DTYPES, FLOAT32, Matrix, check_tensor


def row_count(tensor):
    return math.prod(tensor.shape[:-1])


def forward_operands(rt, x, weight, code, quantizers, columnwise, transpose_y=True, recompute=False, w=None):
    """A Matrix and a weight as the forward GEMM reads them: as Matrix, or quantized. recompute: operand_pieces'. w: the
    weight as `weight_operand` has made it before. x may be quantized before, too."""
    if quantizers is None:
        return x, w or rt.matrix(weight, code)
    there = isinstance(x, Float8Matrix)
    wgrad, shape, weight_shape = not weight.stop_gradient, None if there else x.shape, None if w else weight.shape
    pieces = operand_pieces(rt, quantizers, shape, weight_shape, columnwise, wgrad, 0, transpose_y, recompute)
    x = x if there else quantize(rt, x, quantizers.input, pieces.input)
    if w:
        return x, w
    of_weight = pieces.weight if transpose_y else exchanged(pieces.weight)
    return x, quantized_weight(rt, weight, code, quantizers, of_weight)


def weight_operand(rt, weight, code, quantizers, columnwise):
    """A weight [out, in] as several forward GEMMs read it, and with `columnwise` the backward GEMMs, too."""
    if quantizers is None:
        return rt.matrix(weight, code)
    pieces = operand_pieces(rt, quantizers, None, weight.shape, columnwise, not weight.stop_gradient)
    return quantized_weight(rt, weight, code, quantizers, pieces.weight)


def cast_in_kernels(quantizers):
    """Whether norms and activations write fp8 themselves, which takes scales that are known before."""
    return quantizers is not None and quantizers.input.kind == "delayed"


def drop_data(rt, *operands):
    """Backward reads no rowwise fp8 data."""
    for operand in operands:
        if isinstance(operand, Float8Matrix):
            operand.drop_data(rt)


def drop_transpose(rt, weight):
    """Of a weight [in, out] backward reads no columnwise fp8 data."""
    if isinstance(weight, Float8Matrix):
        weight.drop_transpose(rt)


def grad_pieces(rt, shape, quantizers, weight, dbias=None):
    """Memory for dy in fp8; a frozen weight needs no transpose of it, but where the cast sums it."""
    return rowwise_pieces(rt, shape, quantizers.grad_output) if weight.stop_gradient and dbias is None else None


def grad_output(rt, dy, code, quantizers, tp, weight, dbias=None):
    """dy for the backward GEMMs; under sequence parallelism (tp given) the rows of all ranks.

    weight: of the GEMM; a frozen one needs no transpose of dy. dbias: a BiasGradient of all those rows, which the cast
    to fp8 computes.
    """
    # a rank's own rows are cast without their sum, which needs the transpose as well
    if tp is not None and (quantizers is None or not quantizers.same_scales or dbias is not None):
        dy, tp = tp.all_gather(dy), None
    matrix = rt.matrix(dy, code)
    if quantizers is None:
        return matrix
    if tp is None:
        pieces = grad_pieces(rt, matrix.shape, quantizers, weight, dbias)
        return quantize(rt, matrix, quantizers.grad_output, pieces, dbias=dbias and dbias.native)
    local = Float8Matrix.rows_of_rank(rt, matrix.shape, quantizers.grad_output)
    return local.fill(rt, matrix).gathered(rt, tp.all_gather(local.rowwise))


def _fprop(rt, x, weight, out, accumulate=False, transpose_y=True, bias=None):
    """Into the native `out`. bias: a tensor, to be added."""
    epilogue = () if bias is None else (rt.view(bias, tuple(bias.shape), DTYPES[bias.dtype]),)
    options = accumulate, x.split_accumulator, *epilogue
    rt.te.gemm(weight.native, x.native, out, transpose_y, False, rt.stream, *options)


def dgrad(rt, dy, weight, dx, fp8, transpose_y=True):
    """Into the native dx."""
    if isinstance(weight, StoredMatrix):
        weight = weight.transposed(rt)  # of one weight at a time: its memory is free again after the GEMM
    rt.te.gemm(weight.native, dy.native, dx, not transpose_y, False, rt.stream, False, fp8)


class BiasGradient:
    """Memory for a bias's gradient: the sum of dy's rows, which no pass over dy of its own computes. In fp8 the cast of
    dy does, else the epilogue of the wgrad GEMM, in the dtype of that GEMM's output.

    native: what TE's functions write it to.
    """

    __slots__ = ("native", "_bias", "_memory")

    def __init__(self, rt, bias, memory):
        self._bias, self._memory = bias, memory
        self.native = rt.view(memory, tuple(bias.shape), DTYPES[memory.dtype])

    @classmethod
    def wanted(cls, rt, bias, weight, fp8):
        """None for no bias, or a frozen one. weight: the one beside it."""
        if bias is None or bias.stop_gradient:
            return None
        return cls(rt, bias, rt.empty(bias.shape, cls.dtype(bias, weight, fp8)))

    @staticmethod
    def dtype(bias, weight, fp8):
        """What its memory must be."""
        return bias.dtype if fp8 or weight.main_grad is None else paddle.float32

    def in_its_dtype(self, rt):
        """The gradient once it is written."""
        return cast(rt, self._memory, self._bias.dtype)


def cast(rt, memory, dtype):
    """The tensor in that dtype: itself, or a new one."""
    if memory.dtype is dtype:
        return memory
    return rt.on_memory(operator.methodcaller("astype", dtype), memory, out=rt.placeholder(memory.shape, dtype))


def wgrad(rt, x, dy, weight, code, fp8, dbias=None):
    """dW; or None, with dW put into weight.main_grad (float32) or added to it, where there is that. Of a weight
    [in, out] it is that with x and dy exchanged. dbias: a BiasGradient, filled here unless in fp8."""
    epilogue = () if dbias is None or fp8 else (None, dbias.native)
    if weight.stop_gradient and not epilogue:
        return None
    if weight.main_grad is None:
        dw = rt.new_matrix(tuple(weight.shape), weight.dtype, code)
        rt.te.gemm(x.native, dy.native, dw.native, False, True, rt.stream, False, fp8, *epilogue)
        return None if weight.stop_gradient else dw.memory
    main_grad = rt.matrix(weight.main_grad, FLOAT32)
    rt.te.gemm(x.native, dy.native, main_grad.native, False, True, rt.stream, weight.accumulate, fp8, *epilogue)
    return None


def _column_backward(rt, dy, operand, w, weight, x, quantizers, tp, dbias=None):
    """(dz, dW) of a column-parallel GEMM of `column_forward`: dz summed over tp, the rank's rows of it. dbias: as
    `wgrad`'s.

    Collectives run at the same time as GEMMs ("bulk overlap" in Megatron and TE): the input is gathered again during
    dgrad, and its gradient summed during wgrad. With CUDA_DEVICE_MAX_CONNECTIONS=1 the GPU starts them in this order;
    else the GEMM comes first, and where it takes all SMs the collective waits for it.
    """
    fp8 = quantizers is not None
    gather = _gathers(tp)
    if gather:
        rows = _normed_rows(rt, x, quantizers, tp) if x.recompute else operand
        pending = tp.start_all_gather(_to_gather(rows))
    shape = x.tensor.shape if dy.shape[0] == x.x.shape[0] else [dy.shape[0], x.x.shape[1]]
    dz = rt.matrix(rt.empty(shape, x.dtype), x.code)
    dgrad(rt, dy, w, dz.native, fp8)
    if gather:
        operand = _gathered_again(rt, rows, tp.finish(pending), x.code, quantizers)
    elif x.recompute:
        operand = _normed_again(rt, x, quantizers)
    pending = None if tp is None else tp.start_reduce_output(dz.memory)
    dw = wgrad(rt, operand, dy, weight, x.code, fp8, dbias)
    return dz if tp is None else rt.matrix(tp.finish(pending), x.code), dw


def _adds(tp):
    """Whether this rank's GEMM adds bias and residual, for free, before the sum over ranks."""
    return tp is None or tp.rank == 0


def row_output(rt, x, weight, out, code, residual, tp, transpose_y=True, bias=None, copied=False):
    """out = x·Wᵀ (+ bias) (+ residual), summed over tp where the GEMM is row parallel. Returns the tensor.

    copied: whether `out` has the residual's numbers already, from the norm of `column_forward`.
    """
    scatter, adds = tp is not None and tp.sequence_parallel, _adds(tp)
    bias = bias if adds else None
    accumulate = residual is not None and not scatter and adds
    result = rt.matrix(out, code)
    if accumulate and not copied:
        rt.te.memcpy_async(result.native, rt.view(residual, result.shape, code), rt.stream)
    _fprop(rt, x, weight, result.native, accumulate, transpose_y, bias)
    if tp is not None:
        out = tp.reduce_output(out)
    if scatter and residual is not None:
        addition.add_to(rt.te, rt.stream, out.data_ptr(), residual.data_ptr(), math.prod(out.shape), code)
    return out


def _gathers(tp):
    """Whether a column-parallel GEMM's input is gathered from the ranks."""
    return tp is not None and tp.sequence_parallel


def _normed_in_fp8(rt, x, quantizers, tp):
    """Whether `_normed_rows` are fp8: not where they are gathered, unless the ranks' scales are the same."""
    if x.weight is None:
        return False
    if _gathers(tp):
        return quantizers is not None and quantizers.same_scales
    return cast_in_kernels(quantizers) or quantizers is not None and x.casts(rt, quantizers.input)


def _normed_rows(rt, x, quantizers, tp, pieces=None, copies=False):
    """A Normed's output, or an Unnormed's x, this rank's rows. pieces: (rowwise, columnwise) for fp8 that is not
    gathered, and for the statistics; None: new ones. copies: `column_forward`'s.

    The norm's kernels write fp8, TE's under delayed scaling alone.
    """
    if x.weight is None:
        return x.x
    shape, gather, statistics = x.x.shape, _gathers(tp), pieces and pieces[1]
    if not _normed_in_fp8(rt, x, quantizers, tp):
        rows = rt.new_matrix(shape, x.dtype, x.code)
    elif gather:
        rows = Float8Matrix.rows_of_rank(rt, shape, quantizers.input)
    else:
        rows = new_float8(rt, shape, quantizers.input, pieces)
        if x.casts(rt, quantizers.input):
            x.forward_in_fp8(rt, rows, statistics, copies and _adds(tp))
            return rows
    x.forward(rt, rows.native, statistics)
    return rows


def _normed_again(rt, x, quantizers):
    """In backward, where nothing is gathered: the operand of `column_forward`, with new statistics."""
    rows = _normed_rows(rt, x, quantizers, tp=None)
    if quantizers is not None and not isinstance(rows, Float8Matrix):
        rows = quantize(rt, rows, quantizers.input)
    drop_data(rt, rows)
    return rows


def _to_gather(rows):
    """What of a rank's rows is gathered."""
    return rows.rowwise if isinstance(rows, Float8Matrix) else rows.memory


def _gathered_again(rt, rows, gathered, code, quantizers):
    """In backward under sequence parallelism: the operand of `column_forward` from the ranks' own rows."""
    if isinstance(rows, Float8Matrix):
        return rows.gathered(rt, gathered, rowwise=False)
    whole = rt.matrix(gathered, code)
    return whole if quantizers is None else quantize(rt, whole, quantizers.input)


@dataclass(slots=True)
class SavedColumn:
    """What the backward of `column_forward` reads.

    norm: the Normed. operand: its output as the GEMM read it; where ranks gather it, this rank's rows, which are
    gathered again; None where it is computed again. w, weight: as the GEMM read it, as it is.
    """

    norm: Normed
    operand: Matrix | Float8Matrix | None
    w: Matrix | Float8Matrix
    weight: Placeholder
    bias: Placeholder | None
    quantizers: Any
    tp: Any

    def bias_gradient(self, rt):
        """The BiasGradient to be filled by what makes dy or by `backward`, or None."""
        return BiasGradient.wanted(rt, self.bias, self.weight, self.quantizers is not None)

    def backward(self, rt, dy, dbias, dresidual, weight=None, into=None):
        """(dx, the gradients of the norm's weight and bias, dW) from dy as the backward GEMMs read it.

        dbias: a BiasGradient to fill, or None. weight: in the place of its own, whose gradient is to be added up
        elsewhere. into: `Normed.backward`'s.
        """
        given = self.operand, self.w, weight or self.weight, self.norm, self.quantizers, self.tp
        dz, dw = _column_backward(rt, dy, *given, dbias)
        return *self.norm.backward(rt, dz, dresidual, into), dw


def column_forward(rt, normed, weight, bias, quantizers, tp, train, w=None, copies=False):
    """(a Matrix, SavedColumn): a Normed's output · weightᵀ (+ bias), of the rows of all ranks. w: the weight's
    `weight_operand`, which the caller lets go of; None: it is made here.

    copies: whether x is the residual of a `row_output` to come. A norm by our kernels then copies x while it reads it,
    into a new tensor for that output, normed.copy; it stays None where the norm is another's, or where another rank
    adds the residual.

    Under sequence parallelism each rank norms its own tokens and the others' are gathered, in fp8 where the ranks'
    scales are the same; backward keeps its own and gathers again. A Normed with `recompute` is normed again instead.
    """
    gather, again = _gathers(tp), normed.recompute
    casts = quantizers is not None and not _normed_in_fp8(rt, normed, quantizers, tp)
    if casts:
        rows, operand, of_weight = _cast_operands(rt, normed, weight, quantizers, tp, train, w)
    else:
        rows, of_weight = _rows_and_weight(rt, normed, weight, quantizers, tp, train, w, copies)
        operand = _all_rows(rt, rows, normed.code, tp) if gather else rows
    lead = [tp.size * rows.shape[0]] if gather else normed.tensor.shape[:-1]
    out = rt.matrix(rt.empty([*lead, of_weight.shape[0]], normed.dtype), normed.code)
    _fprop(rt, operand, of_weight, out.native, bias=bias)
    if train:
        drop_data(rt, *[operand] * (not gather and not again), *[of_weight] * (w is None))
    kept = None if again else rows if gather else operand
    return out, SavedColumn(normed, kept, of_weight, weight, bias, quantizers, tp)


def _rows_and_weight(rt, x, weight, quantizers, tp, columnwise, w, copies):
    """(a Normed's rows of this rank, the weight), both as the GEMM reads them. w, copies: `column_forward`'s."""
    if quantizers is None:
        return _normed_rows(rt, x, None, tp), w or rt.matrix(weight, x.code)
    shape, weight_shape = None if _gathers(tp) else x.x.shape, None if w else weight.shape
    wgrad, more = not weight.stop_gradient, x.statistics_bytes
    pieces = operand_pieces(rt, quantizers, shape, weight_shape, columnwise, wgrad, more, recompute=x.recompute)
    rows = _normed_rows(rt, x, quantizers, tp, pieces.input, copies)
    return rows, w or quantized_weight(rt, weight, x.code, quantizers, pieces.weight)


def _cast_operands(rt, x, weight, quantizers, tp, columnwise, w):
    """(a Normed's rows of this rank in its dtype, those of all ranks and the weight as the GEMM reads them)."""
    rows = _normed_rows(rt, x, quantizers, tp)
    whole = _all_rows(rt, rows, x.code, tp) if _gathers(tp) else rows
    options = dict(recompute=x.recompute, w=w)
    return rows, *forward_operands(rt, whole, weight, x.code, quantizers, columnwise, **options)


def _all_rows(rt, rows, code, tp):
    """The forward GEMM's operand from each rank's rows: a Matrix, or a Float8Matrix without a transpose."""
    gathered = tp.all_gather(_to_gather(rows))
    in_fp8 = isinstance(rows, Float8Matrix)
    return rows.gathered(rt, gathered, columnwise=False) if in_fp8 else rt.matrix(gathered, code)


def check_weight(name, weight, shape, dtype, quantizers):
    """Raises TypeError or ValueError for a weight that is not of that shape and of that dtype, or bytes where it exists
    in fp8 only."""
    stored = quantizers is not None and quantizers.weight.kind == "stored"
    check_tensor(name, weight, shape, paddle.uint8 if stored else dtype)


def check_bias(name, bias, size, dtype):
    """Raises TypeError or ValueError for a bias, None or a tensor, that is not [size] and of that dtype."""
    if bias is not None:
        check_tensor(name, bias, [size], dtype)


def check_fp8(quantizers, **sizes):
    """Raises ValueError for a GEMM dimension that fp8 cannot have. quantizers: None for a GEMM that is not in fp8."""
    if quantizers is None:
        return
    multiple = quantizers.input.scaling.multiple
    wrong = ", ".join([f"{name} {size}" for name, size in sizes.items() if size % multiple])
    if wrong:
        kind = "block scaling's" if quantizers.input.kind == "block" else "fp8"
        raise ValueError(
            f"{kind} GEMMs need dimensions divisible by {multiple}, not {wrong}; choose other sizes or pad"
        )
