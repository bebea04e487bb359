"""Parts of Ops with GEMMs: operands, the three GEMMs, biases, and the collectives around them.

With W [out, in]: y = x·Wᵀ, dx = dy·W, dW = dyᵀ·x. Under fp8 the three read e4m3 copies of x and W and a copy of dy in
the recipe's backward format. Forward makes the transposed copies that backward reads, and frees the others.

With transpose_y=False W is [in, out]: y = x·W, dx = dy·Wᵀ, dW = xᵀ·dy. TE picks the copy of each fp8 operand that
Hopper's GEMM reads. So only the flags differ, and backward reads the copy of W that is not transposed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import paddle

from paddle_te.fp8 import StoredScaling
from paddle_te.native import addition
from paddle_te.ops.te.norm import Normed, Unnormed
from paddle_te.ops.te.quantized import (
    Float8Matrix,
    Operand,
    Pieces,
    StoredMatrix,
    exchanged,
    new_float8,
    operand_pieces,
    quantize,
    quantized_weight,
    rowwise_pieces,
)
from paddle_te.ops.te.rank_rows import (
    Multiply,
    Product,
    gathered,
    multiply_while_gathering,
    multiply_while_sending,
    to_gather,
)
from paddle_te.ops.te.recording import OpInputs, Placeholder, RecordedQuantizers, RecordedRanks, Recorder
from paddle_te.ops.te.runtime import DTYPES, Matrix, Memory, check_tensor


class Gemm(NamedTuple):
    """A GEMM of an op that is recorded: what its `Projection` holds, as Placeholders.

    w: the weight as the GEMM reads it, where `weight_operand` has made it before; the caller lets go of it. tp: the
    ranks that divide it. train: whether a backward may follow.
    """

    weight: Placeholder
    bias: Placeholder | None
    quantizers: RecordedQuantizers | None
    tp: RecordedRanks | None
    train: bool
    w: Operand | None = None

    @classmethod
    def of(cls, inputs: OpInputs, number: int, place: int, w: Operand | None = None) -> Gemm:
        """Return an op's GEMM by its number; its weight is at a place among the tensors, and its bias behind it."""
        weight, bias = inputs.tensors[place : place + 2]
        return cls(weight, bias, inputs.quantizers[number], inputs.tp, inputs.train, w)


def row_count(tensor: Memory) -> int:
    return math.prod(tensor.shape[:-1])


def forward_operands(
    rt: Recorder, x: Operand, gemm: Gemm, code: int, transpose_y: bool = True, recompute: bool = False
) -> tuple[Operand, Operand]:
    """Return a Matrix and a weight as the forward GEMM reads them: as Matrix, or quantized.

    recompute: backward makes x again. x may be quantized before.
    """
    weight, quantizers, w = gemm.weight, gemm.quantizers, gemm.w
    if quantizers is None:
        return x, w or rt.matrix(weight, code)
    there = isinstance(x, Float8Matrix)
    shape, weight_shape = None if there else x.shape, None if w else weight.shape
    keeps_input = not weight.stop_gradient and not recompute
    pieces = operand_pieces(rt, quantizers, shape, weight_shape, gemm.train, keeps_input, transpose_y=transpose_y)
    operand = x if isinstance(x, Float8Matrix) else quantize(rt, x, quantizers.input, pieces.input)
    if w:
        return operand, w
    of_weight = pieces.weight if transpose_y else exchanged(pieces.weight)
    return operand, quantized_weight(rt, weight, code, quantizers, of_weight)


def weight_operand(
    rt: Recorder, weight: Placeholder, code: int, quantizers: RecordedQuantizers | None, columnwise: bool
) -> Operand:
    """Return a weight [out, in] as several forward GEMMs read it, and with `columnwise` the backward GEMMs, too."""
    if quantizers is None:
        return rt.matrix(weight, code)
    pieces = operand_pieces(rt, quantizers, None, weight.shape, columnwise, not weight.stop_gradient)
    return quantized_weight(rt, weight, code, quantizers, pieces.weight)


def cast_in_kernels(quantizers: RecordedQuantizers | None) -> bool:
    """Say whether norms and activations write fp8 themselves, which takes scales that are known before."""
    return quantizers is not None and quantizers.input.kind == "delayed"


def drop_data(rt: Recorder, *operands: Operand | None) -> None:
    """Let go of rowwise fp8 data, which backward does not read."""
    for operand in operands:
        if isinstance(operand, Float8Matrix):
            operand.drop_data(rt)


def drop_transpose(rt: Recorder, weight: Operand) -> None:
    """Let go of a weight's columnwise fp8 data, which backward does not read of one [in, out]."""
    if isinstance(weight, Float8Matrix):
        weight.drop_transpose(rt)


def grad_pieces(
    rt: Recorder,
    shape: tuple[int, int],
    quantizers: RecordedQuantizers,
    weight: Placeholder,
    dbias: BiasGradient | None = None,
) -> tuple[Pieces, None] | None:
    """Make memory for dy in fp8; a frozen weight needs no transpose of it, but where the cast sums it."""
    return rowwise_pieces(rt, shape, quantizers.grad_output) if weight.stop_gradient and dbias is None else None


def grad_output(
    rt: Recorder,
    dy: Placeholder,
    code: int,
    quantizers: RecordedQuantizers | None,
    weight: Placeholder,
    dbias: BiasGradient | None = None,
) -> Operand:
    """Return dy for the backward GEMMs.

    weight: of the GEMM; a frozen one needs no transpose of dy. dbias: a BiasGradient, which the cast to fp8 computes.
    """
    matrix = rt.matrix(dy, code)
    if quantizers is None:
        return matrix
    pieces = grad_pieces(rt, matrix.shape, quantizers, weight, dbias)
    return quantize(rt, matrix, quantizers.grad_output, pieces, dbias=dbias and dbias.native)


def grad_output_and_dgrad(
    rt: Recorder, dy: Placeholder, gemm: Gemm, code: int, dbias: BiasGradient | None, product: Product | None
) -> Operand:
    """Return dy for the backward GEMMs, under sequence parallelism the rows of all ranks, and compute dgrad from it.

    gemm: its tp are the ranks that dy is gathered from. dbias: a BiasGradient of all those rows. product: dgrad, None
    where it is not wanted.
    """
    weight, quantizers, gather = gemm.weight, gemm.quantizers, gathers(gemm.tp)
    # a rank's own rows are cast without their sum, which needs the transpose as well
    if gather and (quantizers is None or quantizers.same_scales and dbias is None):
        return _gathered_grad(rt, rt.matrix(dy, code), quantizers, gather, weight, product)
    grad = grad_output(rt, gather.all_gather(dy) if gather else dy, code, quantizers, weight, dbias)
    if product:
        product.of(grad)
    return grad


def _gathered_grad(
    rt: Recorder,
    dy: Matrix,
    quantizers: RecordedQuantizers | None,
    tp: RecordedRanks,
    weight: Placeholder,
    product: Product | None,
) -> Operand:
    """Return `grad_output_and_dgrad`'s result where it is gathered as the GEMMs read it."""
    if quantizers is None:
        return multiply_while_gathering(rt, dy, tp, product)
    rows = Float8Matrix.rows_of_rank(rt, dy.shape, quantizers.grad_output).fill(rt, dy)
    grad = multiply_while_gathering(rt, rows, tp, product)
    if isinstance(grad, Float8Matrix) and not weight.stop_gradient:
        grad.add_transpose(rt)
    return grad


def fprop(
    rt: Recorder, w: Operand, bias: Placeholder | None = None, accumulate: bool = False, transpose_y: bool = True
) -> Multiply:
    """Return the GEMM of rows of x with the weight. bias: a tensor, to be added. accumulate: whether to add to y."""
    epilogue = () if bias is None else (rt.view(bias, tuple(bias.shape), DTYPES[bias.dtype]),)

    def multiply(x: Operand, y: Matrix) -> None:
        options = accumulate, x.split_accumulator, *epilogue
        rt.te.gemm(w.native, x.native, y.native, transpose_y, False, rt.stream, *options)

    return multiply


def dgrad(rt: Recorder, w: Operand, fp8: bool, transpose_y: bool = True) -> Multiply:
    """Return the GEMM of rows of dy with the weight."""
    if isinstance(w, StoredMatrix):
        w = w.transposed(rt)  # one that is not kept is of one weight at a time: after the GEMM its memory is free again

    def multiply(dy: Operand, dx: Matrix) -> None:
        rt.te.gemm(w.native, dy.native, dx.native, not transpose_y, False, rt.stream, False, fp8)

    return multiply


class BiasGradient:
    """Hold memory for a bias's gradient: the sum of dy's rows, which no pass over dy of its own computes.

    In fp8 the cast of dy does, else the epilogue of the wgrad GEMM, in the dtype of that GEMM's output.

    native: what TE's functions write it to.
    """

    __slots__ = ("native", "_bias", "_memory")

    def __init__(self, rt: Recorder, bias: Placeholder, memory: Placeholder) -> None:
        self._bias, self._memory = bias, memory
        self.native = rt.view(memory, tuple(bias.shape), DTYPES[memory.dtype])

    @classmethod
    def wanted(cls, rt: Recorder, bias: Placeholder | None, weight: Placeholder, fp8: bool) -> BiasGradient | None:
        """Make it; None for no bias, or a frozen one. weight: the one beside it."""
        if bias is None or bias.stop_gradient:
            return None
        return cls(rt, bias, rt.empty(bias.shape, cls.dtype(bias, weight, fp8)))

    @staticmethod
    def dtype(bias: Placeholder, weight: Placeholder, fp8: bool) -> Any:
        """Say what its memory must be."""
        return bias.dtype if fp8 or weight.main_grad is None else weight.main_grad.dtype

    def in_its_dtype(self, rt: Recorder) -> Placeholder:
        """Return the gradient once it is written."""
        return cast(rt, self._memory, self._bias.dtype)


def cast(rt: Recorder, memory: Placeholder, dtype: Any) -> Placeholder:
    """Return the tensor in that dtype: itself, or a new one."""
    if memory.dtype is dtype:
        return memory
    return rt.on_memory(operator.methodcaller("astype", dtype), memory, out=rt.placeholder(memory.shape, dtype))


def wgrad(
    rt: Recorder, x: Operand, dy: Operand, weight: Placeholder, code: int, fp8: bool, dbias: BiasGradient | None = None
) -> Placeholder | None:
    """Return dW. If the weight has a main_grad, write or add dW to that and return None.

    For a weight [in, out] exchange x and dy. dbias: a BiasGradient, filled here unless in fp8.
    """
    epilogue = () if dbias is None or fp8 else (None, dbias.native)
    if weight.stop_gradient and not epilogue:
        return None
    if weight.main_grad is None:
        rows, cols = weight.shape
        dw = rt.new_matrix((rows, cols), weight.dtype, code)
        rt.te.gemm(x.native, dy.native, dw.native, False, True, rt.stream, False, fp8, *epilogue)
        return None if weight.stop_gradient else dw.memory
    main_grad = rt.matrix(weight.main_grad, DTYPES[weight.main_grad.dtype])
    rt.te.gemm(x.native, dy.native, main_grad.native, False, True, rt.stream, weight.accumulate, fp8, *epilogue)
    return None


def _column_backward(
    rt: Recorder, saved: SavedColumn, dy: Operand, weight: Placeholder, dbias: BiasGradient | None
) -> tuple[Matrix, Placeholder | None]:
    """Return (dz, dW) of a column-parallel GEMM of `column_forward`: dz summed over tp, the rank's rows of it.

    weight, dbias: as `wgrad`'s.

    Collectives run at the same time as GEMMs ("bulk overlap" in Megatron and TE): the input is gathered again during
    dgrad, and its gradient summed during wgrad. With CUDA_DEVICE_MAX_CONNECTIONS=1 the GPU starts them in this order;
    else the GEMM comes first, and where it takes all SMs the collective waits for it.
    """
    x, operand, quantizers, tp = saved.norm, saved.operand, saved.quantizers, saved.tp
    fp8, gather = quantizers is not None, gathers(tp)
    if gather:
        rows = _normed_rows(rt, x, quantizers, tp) if operand is None else operand
        gathering = gather.start_all_gather(to_gather(rows))
    shape = x.tensor.shape if dy.shape[0] == x.x.shape[0] else [dy.shape[0], x.x.shape[1]]
    dz = rt.matrix(rt.empty(shape, x.dtype), x.code)
    dgrad(rt, saved.w, fp8)(dy, dz)
    if gather:
        operand = _gathered_again(rt, rows, gather.finish(gathering), x.code, quantizers)
    elif operand is None:
        operand = _normed_again(rt, x, quantizers)
    if tp is None:
        return dz, wgrad(rt, operand, dy, weight, x.code, fp8, dbias)
    summing = tp.start_reduce_output(dz.memory)
    dw = wgrad(rt, operand, dy, weight, x.code, fp8, dbias)
    return rt.matrix(tp.finish(summing), x.code), dw


def _adds(tp: RecordedRanks | None) -> bool:
    """Say whether this rank's GEMM adds bias and residual, for free, before the sum over ranks."""
    return tp is None or tp.rank == 0


class Addends(NamedTuple):
    """What is added to a product. Where ranks share the product, it is added once.

    copied: whether out holds the residual already.
    """

    bias: Placeholder | None
    residual: Placeholder | None
    copied: bool = False


NOTHING = Addends(None, None)


def product_of(
    rt: Recorder, w: Operand, out: Placeholder, code: int, addends: Addends, transpose_y: bool = True
) -> Product:
    """Return the Product out = x·Wᵀ + addends. The residual is in out before any rows are multiplied."""
    (bias, residual, copied), result = addends, rt.matrix(out, code)
    if residual is not None and not copied:
        rt.te.memcpy_async(result.native, rt.view(residual, result.shape, code), rt.stream)
    return Product(fprop(rt, w, bias, residual is not None, transpose_y), result)


def row_output(
    rt: Recorder,
    x: Operand,
    w: Operand,
    out: Placeholder,
    code: int,
    tp: RecordedRanks | None,
    addends: Addends,
    transpose_y: bool = True,
) -> Placeholder:
    """Compute x·Wᵀ + addends, summed over tp where the GEMM is row parallel; return the tensor, this rank's rows.

    out: a tensor for it, in whose place another may be returned under sequence parallelism.
    """
    scatter, adds = gathers(tp), _adds(tp)
    if scatter is None:
        product_of(rt, w, out, code, addends if adds else NOTHING, transpose_y).of(x)
        return out if tp is None else tp.reduce_output(out)
    multiply = fprop(rt, w, addends.bias if adds else None, transpose_y=transpose_y)
    out, residual = multiply_while_sending(rt, x, scatter, Product(multiply, rt.matrix(out, code))), addends.residual
    if residual is not None:
        addition.add_to(rt.te, rt.stream, out.data_ptr(), residual.data_ptr(), math.prod(out.shape), code)
    return out


def gathers(tp: RecordedRanks | None) -> RecordedRanks | None:
    """Return the ranks that gather a column-parallel GEMM's input and scatter a row-parallel one's output, or None."""
    return tp if tp is not None and tp.sequence_parallel else None


def _normed_in_fp8(
    rt: Recorder, x: Normed | Unnormed, quantizers: RecordedQuantizers | None, tp: RecordedRanks | None
) -> bool:
    """Say whether `_normed_rows` are fp8: not where they are gathered, unless the ranks' scales are the same."""
    if x.weight is None:
        return False
    if gathers(tp):
        return quantizers is not None and quantizers.same_scales
    return cast_in_kernels(quantizers) or quantizers is not None and x.casts(rt, quantizers.input)


def _normed_rows(
    rt: Recorder,
    x: Normed | Unnormed,
    quantizers: RecordedQuantizers | None,
    tp: RecordedRanks | None,
    pieces: tuple[Pieces, Pieces | None] | None = None,
    copies: bool = False,
) -> Operand:
    """Return a Normed's output, or an Unnormed's x, this rank's rows.

    pieces: (rowwise, columnwise) for fp8 that is not gathered, and for the statistics; None: new ones. copies:
    `column_forward`'s.

    The norm's kernels write fp8, TE's under delayed scaling alone.
    """
    if x.weight is None:
        return x.x
    shape, gather, statistics = x.x.shape, gathers(tp), pieces and pieces[1]
    if not _normed_in_fp8(rt, x, quantizers, tp):
        rows = rt.new_matrix(shape, x.dtype, x.code)
        x.forward(rt, rows.native, statistics)
        return rows
    assert quantizers is not None
    if gather:
        rows8 = Float8Matrix.rows_of_rank(rt, shape, quantizers.input)
    else:
        rows8 = new_float8(rt, shape, quantizers.input, pieces)
        if x.casts(rt, quantizers.input):
            x.forward_in_fp8(rt, rows8, statistics, copies and _adds(tp))
            return rows8
    if rows8.counts:
        rows = rt.new_matrix(shape, x.dtype, x.code)
        x.forward(rt, rows.native)
        rows8.count(rt, rows)
    x.forward(rt, rows8.native, statistics)
    return rows8


def normed_in_both(
    rt: Recorder, x: Normed | Unnormed, gemm: Gemm, copies: bool
) -> tuple[Placeholder, Float8Matrix | None]:
    """Return (a Normed's output or an Unnormed's x, a tensor; the same in fp8, or None where the GEMM is to cast it).

    copies: `column_forward`'s, of which None is made where the GEMM casts.
    """
    weight, _, quantizers, tp, train, _ = gemm
    if isinstance(x, Unnormed) or quantizers is None or gathers(tp) or not x.casts(rt, quantizers.input):
        return x.output(rt), None
    wgrad = train and not weight.stop_gradient
    pieces = None if wgrad else rowwise_pieces(rt, x.x.shape, quantizers.input)
    quantized = new_float8(rt, x.x.shape, quantizers.input, pieces)
    return x.output_in_both(rt, quantized, copies and _adds(tp)), quantized


def _normed_again(rt: Recorder, x: Normed | Unnormed, quantizers: RecordedQuantizers | None) -> Operand:
    """Return in backward, where nothing is gathered, the operand of `column_forward`, with new statistics."""
    rows = _normed_rows(rt, x, quantizers, tp=None)
    if quantizers is not None and not isinstance(rows, Float8Matrix):
        rows = quantize(rt, rows, quantizers.input)
    drop_data(rt, rows)
    return rows


def _gathered_again(
    rt: Recorder, rows: Operand, gathered: Placeholder, code: int, quantizers: RecordedQuantizers | None
) -> Operand:
    """Return in backward under sequence parallelism the operand of `column_forward` from the ranks' own rows."""
    if isinstance(rows, Float8Matrix):
        return rows.gathered(rt, gathered, rowwise=False)
    whole = rt.matrix(gathered, code)
    return whole if quantizers is None else quantize(rt, whole, quantizers.input)


@dataclass(slots=True)
class SavedColumn:
    """Hold what the backward of `column_forward` reads.

    norm: the Normed. operand: its output as the GEMM read it; where ranks gather it, this rank's rows, which are
    gathered again; None where it is computed again. w, weight: as the GEMM read it, as it is.
    """

    norm: Normed | Unnormed
    operand: Operand | None
    w: Operand
    weight: Placeholder
    bias: Placeholder | None
    quantizers: RecordedQuantizers | None
    tp: RecordedRanks | None

    def bias_gradient(self, rt: Recorder) -> BiasGradient | None:
        """Make the BiasGradient to be filled by what makes dy or by `backward`, or None."""
        return BiasGradient.wanted(rt, self.bias, self.weight, self.quantizers is not None)

    def backward(
        self,
        rt: Recorder,
        dy: Operand,
        dbias: BiasGradient | None,
        dresidual: Placeholder | None,
        weight: Placeholder | None = None,
        into: Sequence[Placeholder | None] | None = None,
    ) -> tuple[Placeholder | None, Placeholder | None, Placeholder | None, Placeholder | None]:
        """Return (dx, the gradients of the norm's weight and bias, dW) from dy as the backward GEMMs read it.

        dbias: a BiasGradient to fill, or None. weight: replaces its own weight, if the gradient is added up elsewhere.
        into: `Normed.backward`'s.
        """
        dz, dw = _column_backward(rt, self, dy, weight or self.weight, dbias)
        return *self.norm.backward(rt, dz, dresidual, into), dw


def column_forward(
    rt: Recorder, normed: Normed | Unnormed, gemm: Gemm, copies: bool = False
) -> tuple[Matrix, SavedColumn]:
    """(a Matrix, SavedColumn): a Normed's output · weightᵀ (+ bias), of the rows of all ranks.

    copies: whether x is the residual of a `row_output` to come. A norm by our kernels then copies x while it reads it,
    into a new tensor for that output, normed.copy; it stays None where the norm is another's, or where another rank
    adds the residual.

    Under sequence parallelism each rank norms its own tokens and the others' are gathered, in fp8 where the ranks'
    scales are the same; backward keeps its own and gathers again. A Normed with `recompute` is normed again instead.
    The own rows are multiplied during the gather, unless those of all ranks are to be cast together.
    """
    weight, bias, quantizers, tp, train, w = gemm
    gather, again = gathers(tp), normed.recompute
    casts = quantizers is not None and not _normed_in_fp8(rt, normed, quantizers, tp)
    if casts:
        rows, operand, of_weight = _cast_operands(rt, normed, gemm)
    else:
        rows, of_weight = _rows_and_weight(rt, normed, gemm, copies)
        operand = rows
    lead = [gather.size * rows.shape[0]] if gather else normed.tensor.shape[:-1]
    out = rt.matrix(rt.empty([*lead, of_weight.shape[0]], normed.dtype), normed.code)
    product = Product(fprop(rt, of_weight, bias), out)
    if gather and not casts:
        multiply_while_gathering(rt, rows, gather, product)
    else:
        product.of(operand)
    if train:
        drop_data(rt, *[operand] * (not gather and not again), *[of_weight] * (w is None))
    kept = None if again else rows if gather else operand
    return out, SavedColumn(normed, kept, of_weight, weight, bias, quantizers, tp)


def _rows_and_weight(rt: Recorder, x: Normed | Unnormed, gemm: Gemm, copies: bool) -> tuple[Operand, Operand]:
    """Return (a Normed's rows of this rank, the weight), both as the GEMM reads them. copies: `column_forward`'s."""
    weight, _, quantizers, tp, train, w = gemm
    if quantizers is None:
        return _normed_rows(rt, x, None, tp), w or rt.matrix(weight, x.code)
    shape, weight_shape = None if gathers(tp) else x.x.shape, None if w else weight.shape
    keeps_input = not weight.stop_gradient and not x.recompute
    pieces = operand_pieces(rt, quantizers, shape, weight_shape, train, keeps_input, x.statistics_bytes)
    rows = _normed_rows(rt, x, quantizers, tp, pieces.input, copies)
    return rows, w or quantized_weight(rt, weight, x.code, quantizers, pieces.weight)


def _cast_operands(rt: Recorder, x: Normed | Unnormed, gemm: Gemm) -> tuple[Operand, Operand, Operand]:
    """Return (a Normed's rows of this rank in its dtype, those of all ranks and the weight as the GEMM reads them)."""
    rows, gather = _normed_rows(rt, x, gemm.quantizers, gemm.tp), gathers(gemm.tp)
    whole = gathered(rt, rows, gather.all_gather(to_gather(rows))) if gather else rows
    return rows, *forward_operands(rt, whole, gemm, x.code, recompute=x.recompute)


def check_weight(
    name: str, weight: Memory, shape: Sequence[int], dtype: Any, quantizers: RecordedQuantizers | None
) -> None:
    """Raise TypeError or ValueError for a weight of another shape or dtype; bytes where it exists in fp8 only."""
    stored = quantizers is not None and quantizers.weight.kind == "stored"
    check_tensor(name, weight, shape, paddle.uint8 if stored else dtype)


def check_bias(name: str, bias: Memory | None, size: int, dtype: Any) -> None:
    """Raise TypeError or ValueError for a bias, None or a tensor, that is not [size] and of that dtype."""
    if bias is not None:
        check_tensor(name, bias, [size], dtype)


def check_fp8(quantizers: RecordedQuantizers | None, **sizes: int) -> None:
    """Raise ValueError for a GEMM dimension that fp8 cannot have.

    quantizers: None for a GEMM that is not in fp8.
    """
    if quantizers is None:
        return
    scaling = quantizers.input.scaling
    assert not isinstance(scaling, StoredScaling)  # only weights are stored
    multiple = scaling.multiple
    wrong = ", ".join([f"{name} {size}" for name, size in sizes.items() if size % multiple])
    if wrong:
        kind = "block scaling's" if quantizers.input.kind == "block" else "fp8"
        raise ValueError(
            f"{kind} GEMMs need dimensions divisible by {multiple}, not {wrong}; choose other sizes or pad"
        )
