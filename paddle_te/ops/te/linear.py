"""Norms and GEMMs of a decoder layer, as Ops: see paddle_te.ops.te.recording.

With W [out, in]: y = x·Wᵀ, dx = dy·W, dW = dyᵀ·x. Under fp8 the three read e4m3 copies of x and W and a copy of dy in
the recipe's backward format; forward makes the transposed copies that backward reads and frees the others. With
transpose_y=False W is [in, out]: y = x·W, dx = dy·Wᵀ, dW = xᵀ·dy. TE picks of each fp8 operand the copy that Hopper's
GEMM reads, so that only flags differ, and which copy of W backward reads: the one that is not transposed.
"""

import functools
import math
import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import paddle

from paddle_te.ops.te import autograd, runtime
from paddle_te.ops.te.quantized import (
    Float8Matrix,
    both_pieces,
    exchanged,
    new_pieces,
    operand_pieces,
    quantize,
    quantized_weight,
)
from paddle_te.ops.te.recording import Op, Placeholder
from paddle_te.ops.te.runtime import DTYPES, FLOAT32, Matrix, check_tensor, dense, dtype_code


def _rows(tensor):
    return math.prod(tensor.shape[:-1])


def _operands(rt, x, weight, code, quantizers, columnwise, transpose_y=True):
    """A Matrix and a weight as the forward GEMM reads them: as Matrix, or quantized."""
    weight = rt.matrix(weight, code)
    if quantizers is None:
        return x, weight
    pieces = operand_pieces(rt, quantizers, x.shape, weight.shape, columnwise, transpose_y=transpose_y)
    x = quantize(rt, x, quantizers.input, pieces)
    return x, quantized_weight(rt, weight, quantizers, pieces if transpose_y else exchanged(pieces))


def _cast_in_kernels(quantizers):
    """Whether norms and activations write fp8 themselves, which takes scales that are known before."""
    return quantizers is not None and quantizers.input.kind == "delayed"


def _drop_data(rt, *operands):
    """Backward reads no rowwise fp8 data."""
    for operand in operands:
        if isinstance(operand, Float8Matrix):
            operand.drop_data(rt)


def _drop_transpose(rt, weight):
    """Of a weight [in, out] backward reads no columnwise fp8 data."""
    if isinstance(weight, Float8Matrix):
        weight.drop_transpose(rt)


def _grad_output(rt, dy, code, quantizers, tp, dbias=None):
    """dy for the backward GEMMs; under sequence parallelism (tp given) the rows of all ranks.

    dbias: a _BiasGradient, which the cast to fp8 computes; never with tp.
    """
    if tp is not None and (quantizers is None or not quantizers.same_scales):
        dy, tp = tp.all_gather(dy), None
    matrix = rt.matrix(dy, code)
    if quantizers is None:
        return matrix
    if tp is None:
        return quantize(rt, matrix, quantizers.grad_output, dbias=dbias and dbias.native)
    local = Float8Matrix.rows_of_rank(rt, matrix.shape, quantizers.grad_output)
    return local.fill(rt, matrix.native).gathered(rt, tp.all_gather(local.rowwise))


def _fprop(rt, x, weight, out, accumulate=False, transpose_y=True, bias=None):
    """Into the native `out`. bias: native, to be added."""
    epilogue = () if bias is None else (False, bias)
    rt.te.gemm(weight.native, x.native, out, transpose_y, False, rt.stream, accumulate, *epilogue)


def _dgrad(rt, dy, weight, dx, fp8, transpose_y=True):
    """Into the native dx."""
    rt.te.gemm(weight.native, dy.native, dx, not transpose_y, False, rt.stream, False, fp8)


class _BiasGradient:
    """Memory for a bias's gradient: the sum of dy's rows, which no pass over dy of its own computes. In fp8 the cast of
    dy does, else the epilogue of the wgrad GEMM, in the dtype of that GEMM's output.

    native: what TE's functions write it to.
    """

    __slots__ = ("native", "_bias", "_memory")

    def __init__(self, rt, bias, dtype):
        self._bias, self._memory = bias, rt.empty(bias.shape, dtype)
        self.native = rt.view(self._memory, tuple(bias.shape), DTYPES[dtype])

    @classmethod
    def wanted(cls, rt, bias, weight, fp8):
        """None for no bias, or a frozen one. weight: the one beside it."""
        if bias is None or bias.stop_gradient:
            return None
        return cls(rt, bias, bias.dtype if fp8 or weight.main_grad is None else paddle.float32)

    def in_its_dtype(self, rt):
        """The gradient once it is written."""
        bias, memory = self._bias, self._memory
        if memory.dtype is bias.dtype:
            return memory
        return rt.on_memory(
            operator.methodcaller("astype", bias.dtype), memory, out=rt.placeholder(bias.shape, bias.dtype)
        )


def _wgrad(rt, x, dy, weight, code, fp8, dbias=None):
    """dW; or None, with dW put into weight.main_grad (float32) or added to it, where there is that. Of a weight
    [in, out] it is that with x and dy exchanged. dbias: a _BiasGradient, filled here unless in fp8."""
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
    """(dz, dW) of a column-parallel GEMM of `_normed_operands`: dz summed over tp, the rank's rows of it. dbias: as
    `_wgrad`'s.

    Collectives run at the same time as GEMMs ("bulk overlap" in Megatron and TE): the input is gathered again during
    dgrad, and its gradient summed during wgrad. With CUDA_DEVICE_MAX_CONNECTIONS=1 the GPU starts them in this order;
    else the GEMM comes first, and where it takes all SMs the collective waits for it.
    """
    fp8 = quantizers is not None
    gather = tp is not None and tp.sequence_parallel
    pending = tp.start_all_gather(_rows_of_rank(operand)) if gather else None
    dz = rt.new_matrix((dy.shape[0], x.x.shape[1]), x.dtype, x.code)
    _dgrad(rt, dy, w, dz.native, fp8)
    if gather:
        operand = _gathered_again(rt, operand, tp.finish(pending), x.code, quantizers)
    pending = None if tp is None else tp.start_reduce_output(dz.memory)
    dw = _wgrad(rt, operand, dy, weight, x.code, fp8, dbias)
    return dz if tp is None else rt.matrix(tp.finish(pending), x.code), dw


def _row_output(rt, x, weight, out, code, residual, tp, transpose_y=True):
    """out = x·Wᵀ (+ residual), summed over tp where the GEMM is row parallel. Returns the tensor."""
    scatter = tp is not None and tp.sequence_parallel
    # one rank's GEMM adds the residual, for free, before the sum over ranks
    accumulate = residual is not None and not scatter and (tp is None or tp.rank == 0)
    shape = x.shape[0], out.shape[-1]
    result = rt.view(out, shape, code)
    if accumulate:
        rt.te.memcpy_async(result, rt.view(residual, shape, code), rt.stream)
    _fprop(rt, x, weight, result, accumulate, transpose_y)
    if tp is not None:
        out = tp.reduce_output(out)
    if scatter and residual is not None:
        rt.on_memory(lambda out, residual: out.add_(residual.view(out.shape)), out, residual)
    return out


class _Normed:
    """x of an RMSNorm with its statistics, forward and backward.

    x: Matrix; ln_weight: parameter. _rsigma: native float32 [rows], 1 / rms(x), of rsigma_bytes.
    """

    __slots__ = ("tensor", "x", "dtype", "code", "ln_weight", "rsigma_bytes", "_gamma", "_rsigma")

    def __init__(self, rt, tensor, ln_weight, code):
        check_tensor("the norm's weight", ln_weight, tensor.shape[-1:], tensor.dtype)
        self.tensor, self.ln_weight, self.code, self.dtype = tensor, ln_weight, code, tensor.dtype
        self.x = rt.matrix(tensor, code)
        self._gamma = rt.view(ln_weight, self.x.shape[1:], code)
        self.rsigma_bytes = -(-4 * self.x.shape[0] // 256) * 256

    def forward(self, rt, eps, z, pieces=None):
        """z = x / rms(x) · ln_weight; z is a native tensor in x's dtype or fp8. pieces: Pieces for the statistics."""
        pieces = pieces or new_pieces(rt, self.rsigma_bytes)
        self._rsigma = rt.tensor(pieces.take(self.rsigma_bytes), self.x.shape[:1], FLOAT32)
        rt.te.rmsnorm_fwd(self.x.native, self._gamma, eps, z, self._rsigma, rt.stream)

    def backward(self, rt, dz, add=None):
        """(dx, d ln_weight) from the native dz; the tensor `add`, the residual's gradient, is added to dx."""
        x, code = self.x, self.code
        dx, dgamma = rt.empty(self.tensor.shape, self.dtype), rt.empty(x.shape[1:], self.ln_weight.dtype)
        rt.te.rmsnorm_bwd(
            dz,
            x.native,
            self._rsigma,
            self._gamma,
            rt.view(dx, x.shape, code),
            rt.view(dgamma, x.shape[1:], code),
            rt.stream,
            None if add is None else rt.view(add, x.shape, code),
        )
        return (
            None if self.tensor.stop_gradient else dx,
            None if self.ln_weight.stop_gradient else dgamma,
        )


def _normed_operands(rt, x, eps, weight, quantizers, tp, columnwise):
    """RMSNorm(x) and a weight as a column-parallel GEMM reads them: (operand, weight, what backward keeps of operand).

    Delayed scaling: the norm's kernel writes fp8. Under sequence parallelism each rank norms its own tokens and the
    others' are gathered, in fp8 where the ranks' scales are the same; backward keeps its own and gathers again.
    """
    gather = tp is not None and tp.sequence_parallel
    shape = x.x.shape
    if not _cast_in_kernels(quantizers) or gather and not quantizers.same_scales:
        local = rt.new_matrix(shape, x.dtype, x.code)
        x.forward(rt, eps, local.native)
        whole = rt.matrix(tp.all_gather(local.memory), x.code) if gather else local
        operand, weight = _operands(rt, whole, weight, x.code, quantizers, columnwise)
        return operand, weight, local if gather else operand
    weight = rt.matrix(weight, x.code)
    pieces = operand_pieces(rt, quantizers, None if gather else shape, weight.shape, columnwise, x.rsigma_bytes)
    if gather:
        local = Float8Matrix.rows_of_rank(rt, shape, quantizers.input)
    else:
        local = Float8Matrix(rt, shape, quantizers.input, *pieces)
    x.forward(rt, eps, local.native, pieces[1])
    operand = local.gathered(rt, tp.all_gather(local.rowwise)) if gather else local
    return operand, quantized_weight(rt, weight, quantizers, pieces), local


def _rows_of_rank(local):
    """What `_gathered_again` wants from all ranks."""
    return local.rowwise if isinstance(local, Float8Matrix) else local.memory


def _gathered_again(rt, local, rows, code, quantizers):
    """In backward under sequence parallelism: the operand of `_normed_operands` from the ranks' own parts."""
    if isinstance(local, Float8Matrix):
        return local.gathered(rt, rows, rowwise=False)
    whole = rt.matrix(rows, code)
    return whole if quantizers is None else quantize(rt, whole, quantizers.input)


class NormSettings(NamedTuple):
    """eps: added to the mean square."""

    eps: float


def _rms_norm_forward(rt, inputs, settings):
    x, weight = inputs.tensors
    code = dtype_code("x", x)
    normed, out = _Normed(rt, x, weight, code), rt.empty(x.shape, x.dtype)
    normed.forward(rt, settings.eps, rt.matrix(out, code).native)
    return out, normed


def _rms_norm_backward(rt, normed, dy):
    return normed.backward(rt, rt.view(dy, normed.x.shape, normed.code))


class LinearSettings(NamedTuple):
    """parallel_mode: "column", "row" or None. transpose_y: the weight is [out, in]."""

    parallel_mode: str | None
    transpose_y: bool


@dataclass(slots=True)
class _SavedLinear:
    """What the backward of `linear_forward` reads.

    x, weight, residual: as forward was given them. whole: the shape of x with the rows of all ranks. operand, w: x and
    the weight as the GEMM read them. code: x's dtype for TE. column, row: the ranks, if the GEMM is parallel that way.
    """

    x: Placeholder
    whole: list
    operand: Matrix | Float8Matrix
    w: Matrix | Float8Matrix
    weight: Placeholder
    residual: Placeholder | None
    code: int
    quantizers: Any
    column: Any
    row: Any
    transpose_y: bool


def _linear_forward(rt, inputs, settings):
    (quantizers,) = inputs.quantizers
    return linear_forward(rt, *inputs.tensors, quantizers, inputs.tp, inputs.train, *settings)


def linear_forward(rt, x, weight, residual, quantizers, tp, train, parallel_mode, transpose_y=True):
    """(the output of `linear`, _SavedLinear)."""
    code = dtype_code("x", x)
    out_features, in_features = weight.shape[0 if transpose_y else 1], x.shape[-1]
    expected = [out_features, in_features] if transpose_y else [in_features, out_features]
    check_tensor("weight", weight, expected, x.dtype)
    if quantizers is not None:
        _check_fp8(tokens=_rows(x), in_features=in_features, out_features=out_features)
    column, row = (tp if parallel_mode == mode else None for mode in ("column", "row"))
    whole = column.all_gather(x) if column is not None and column.sequence_parallel else x
    shape = [*whole.shape[:-1], out_features]
    if residual is not None:
        check_tensor("residual", residual, shape if row is None else row.output_shape(shape), x.dtype)
    operand, w = _operands(rt, rt.matrix(whole, code), weight, code, quantizers, train, transpose_y)
    out = _row_output(rt, operand, w, rt.empty(shape, x.dtype), code, residual, row, transpose_y)
    if train:
        _drop_data(rt, operand)
        (_drop_data if transpose_y else _drop_transpose)(rt, w)
    saved = _SavedLinear(
        x=x,
        whole=whole.shape,
        operand=operand,
        w=w,
        weight=weight,
        residual=residual,
        code=code,
        quantizers=quantizers,
        column=column,
        row=row,
        transpose_y=transpose_y,
    )
    return out, saved


def linear_backward(rt, saved, dy):
    """(dx, dW, the residual's gradient)."""
    x, operand, code, residual = saved.x, saved.operand, saved.code, saved.residual
    fp8 = saved.quantizers is not None
    gather = saved.row if saved.row is not None and saved.row.sequence_parallel else None
    grad = _grad_output(rt, dy, code, saved.quantizers, gather)
    dx = None
    if not x.stop_gradient:
        dx = rt.empty(saved.whole, x.dtype)
        _dgrad(rt, grad, saved.w, rt.view(dx, operand.shape, code), fp8, saved.transpose_y)
        if saved.column is not None:
            dx = saved.column.reduce_output(dx)
    operands = (operand, grad) if saved.transpose_y else (grad, operand)
    dw = _wgrad(rt, *operands, saved.weight, code, fp8)
    return dx, dw, None if residual is None or residual.stop_gradient else dy


@dataclass(slots=True)
class _SavedColumn:
    """What the backward of a norm with a column-parallel GEMM reads.

    norm: the norm. operand: of its output what `_normed_operands` keeps. w, weight: as the GEMM read it, as it is.
    bias: that of the GEMM.
    """

    norm: _Normed
    operand: Matrix | Float8Matrix
    w: Matrix | Float8Matrix
    weight: Placeholder
    quantizers: Any
    tp: Any
    bias: Placeholder | None = None

    def backward(self, rt, dy, dbias=None):
        """(native dz, dW) from dy as the backward GEMMs read it; dz is the gradient of the norm's output. dbias: as
        `_wgrad`'s."""
        given = self.operand, self.w, self.weight, self.norm, self.quantizers, self.tp
        dz, dw = _column_backward(rt, dy, *given, dbias)
        return dz.native, dw


def _layernorm_linear_forward(rt, inputs, settings):
    (quantizers,) = inputs.quantizers
    return layernorm_linear_forward(rt, *inputs.tensors, quantizers, inputs.tp, inputs.train, settings.eps)


def layernorm_linear_forward(rt, x, ln_weight, weight, bias, quantizers, tp, train, eps):
    """(the outputs of `layernorm_linear`, _SavedColumn)."""
    code = dtype_code("x", x)
    check_tensor("weight", weight, [weight.shape[0], x.shape[-1]], x.dtype)
    if bias is not None:
        check_tensor("bias", bias, weight.shape[:1], x.dtype)
    if quantizers is not None:
        _check_fp8(tokens=_rows(x), in_features=weight.shape[1], out_features=weight.shape[0])
    normed = _Normed(rt, x, ln_weight, code)
    operand, w, kept = _normed_operands(rt, normed, eps, weight, quantizers, tp, train)
    lead = [operand.shape[0]] if kept is not operand else x.shape[:-1]
    out = rt.empty([*lead, w.shape[0]], x.dtype)
    added = None if bias is None else rt.view(bias, tuple(bias.shape), code)
    _fprop(rt, operand, w, rt.view(out, (operand.shape[0], w.shape[0]), code), bias=added)
    if train:
        _drop_data(rt, *((operand, w) if kept is operand else (w,)))
    return (out, x), _SavedColumn(normed, kept, w, weight, quantizers, tp, bias)


def layernorm_linear_backward(rt, saved, dy, dresidual):
    """(dx, d ln_weight, dW, dbias)."""
    fp8 = saved.quantizers is not None
    dbias = _BiasGradient.wanted(rt, saved.bias, saved.weight, fp8)
    grad = _grad_output(rt, dy, saved.norm.code, saved.quantizers, None, dbias)
    dz, dw = saved.backward(rt, grad, dbias)
    return *saved.norm.backward(rt, dz, dresidual), dw, dbias and dbias.in_its_dtype(rt)


class MLPSettings(NamedTuple):
    """eps: of the norm. add_residual: x is added to the output, and else returned behind it."""

    eps: float
    add_residual: bool


@dataclass(slots=True)
class _SavedMLP:
    """What the MLP's backward reads. hidden: fc1's output. act, w2: SwiGLU's output and fc2's weight as its GEMM read
    them. quantizers: fc2's."""

    fc1: _SavedColumn
    hidden: Matrix
    act: Matrix | Float8Matrix
    w2: Matrix | Float8Matrix
    fc2_weight: Placeholder
    quantizers: Any


def _layernorm_mlp_forward(rt, inputs, settings):
    x, ln_weight, fc1_weight, fc2_weight = inputs.tensors
    (first, second), tp, train = inputs.quantizers, inputs.tp, inputs.train
    code = dtype_code("x", x)
    hidden, ffn = x.shape[-1], fc2_weight.shape[1]
    check_tensor("fc1_weight", fc1_weight, [2 * ffn, hidden], x.dtype)
    check_tensor("fc2_weight", fc2_weight, [hidden, ffn], x.dtype)
    if first is not None:
        _check_fp8(tokens=_rows(x), hidden_size=hidden, ffn_hidden_size=ffn)
    normed = _Normed(rt, x, ln_weight, code)
    operand, w1, kept = _normed_operands(rt, normed, settings.eps, fc1_weight, first, tp, train)
    hidden = rt.new_matrix((operand.shape[0], w1.shape[0]), x.dtype, code)
    _fprop(rt, operand, w1, hidden.native)
    act, w2 = _swiglu(rt, hidden, fc2_weight, x.dtype, code, second, train)
    out = rt.empty([operand.shape[0], x.shape[-1]] if kept is not operand else x.shape, x.dtype)
    out = _row_output(rt, act, w2, out, code, x if settings.add_residual else None, tp)
    if train:
        _drop_data(rt, *((operand, w1) if kept is operand else (w1,)), act, w2)
    fc1 = _SavedColumn(normed, kept, w1, fc1_weight, first, tp)
    saved = _SavedMLP(fc1, hidden, act, w2, fc2_weight, second)
    return out if settings.add_residual else (out, x), saved


def _layernorm_mlp_backward(rt, saved, dy, dresidual=None):
    """dresidual: where x was returned; else dy is its gradient."""
    norm, tp = saved.fc1.norm, saved.fc1.tp
    dtype, code, fp8 = norm.dtype, norm.code, saved.quantizers is not None
    gather = tp is not None and tp.sequence_parallel
    grad = _grad_output(rt, dy, code, saved.quantizers, tp if gather else None)
    dact = rt.new_matrix(saved.act.shape, dtype, code)
    _dgrad(rt, grad, saved.w2, dact.native, fp8)
    dw2 = _wgrad(rt, saved.act, grad, saved.fc2_weight, code, fp8)
    grad = _dswiglu(rt, dact, saved.hidden, dtype, code, saved.fc1.quantizers)
    dz, dw1 = saved.fc1.backward(rt, grad)
    return *norm.backward(rt, dz, dy if dresidual is None else dresidual), dw1, dw2


def _swiglu(rt, hidden, weight, dtype, code, quantizers, train):
    """silu(gate)·up and a weight as the forward GEMM reads them; delayed scaling writes fp8 in the same kernel."""
    shape = hidden.shape[0], hidden.shape[1] // 2
    if not _cast_in_kernels(quantizers):
        act = rt.new_matrix(shape, dtype, code)
        rt.te.swiglu(hidden.native, act.native, rt.stream)
        return _operands(rt, act, weight, code, quantizers, train)
    weight = rt.matrix(weight, code)
    pieces = operand_pieces(rt, quantizers, shape, weight.shape, train)
    act = Float8Matrix(rt, shape, quantizers.input, *pieces)
    rt.te.swiglu(hidden.native, act.native, rt.stream)
    return act, quantized_weight(rt, weight, quantizers, pieces)


def _dswiglu(rt, dact, hidden, dtype, code, quantizers):
    """The gradient of fc1's output as the operand of its backward GEMMs."""
    if not _cast_in_kernels(quantizers):
        grad = rt.new_matrix(hidden.shape, dtype, code)
        rt.te.dswiglu(dact.native, hidden.native, grad.native, rt.stream)
        return grad if quantizers is None else quantize(rt, grad, quantizers.grad_output)
    pieces = both_pieces(rt, hidden.shape, quantizers.grad_output)
    grad = Float8Matrix(rt, hidden.shape, quantizers.grad_output, *pieces)
    rt.te.dswiglu_cast_transpose(dact.native, hidden.native, grad.native, rt.stream)
    return grad


def _check_fp8(**sizes):
    """Raises ValueError for a GEMM dimension that fp8 cannot have."""
    if functools.reduce(operator.or_, sizes.values()) % 16:
        wrong = ", ".join(f"{name} {size}" for name, size in sizes.items() if size % 16)
        raise ValueError(f"fp8 GEMMs need dimensions divisible by 16, not {wrong}; choose other sizes or pad")


_RMS_NORM = Op(_rms_norm_forward, _rms_norm_backward)
LINEAR = Op(_linear_forward, linear_backward, weights=(1,))
_LAYERNORM_LINEAR = Op(_layernorm_linear_forward, layernorm_linear_backward, weights=(2,))
_LAYERNORM_MLP = Op(_layernorm_mlp_forward, _layernorm_mlp_backward, weights=(2, 3))


def rms_norm(x, weight, eps):
    """x / sqrt(mean(x²) + eps) · weight over the last axis, in float32 inside."""
    return autograd.apply(_RMS_NORM, (x, weight), NormSettings(eps))


def linear(
    x,
    weight,
    *,
    residual=None,
    parallel_mode=None,
    tp=None,
    quantizers=None,
    fuse_wgrad_accumulation=False,
    transpose_y=True,
):
    """x · weightᵀ (+ residual), or x · weight without transpose_y; the weight is split by `parallel_mode` ("column",
    "row" or None) over `tp`."""
    return autograd.apply(
        LINEAR,
        (x, weight, residual),
        LinearSettings(parallel_mode, transpose_y),
        quantizers=(quantizers,),
        tp=tp,
        fuse_wgrad_accumulation=fuse_wgrad_accumulation,
    )


def layernorm_linear(x, ln_weight, weight, eps, *, bias=None, tp=None, quantizers=None, fuse_wgrad_accumulation=False):
    """(rms_norm(x) · weightᵀ (+ bias), x): column parallel; x comes back as the residual branch, whose gradient the
    norm's backward kernel adds."""
    return autograd.apply(
        _LAYERNORM_LINEAR,
        (x, ln_weight, weight, bias),
        NormSettings(eps),
        quantizers=(quantizers,),
        tp=tp,
        fuse_wgrad_accumulation=fuse_wgrad_accumulation,
    )


def layernorm_mlp(
    x,
    ln_weight,
    fc1_weight,
    fc2_weight,
    eps,
    *,
    add_residual=True,
    tp=None,
    quantizers=(None, None),
    fuse_wgrad_accumulation=False,
):
    """x + swiglu(rms_norm(x) · fc1ᵀ) · fc2ᵀ; fc1 is column parallel (gate and up stacked), fc2 row parallel.

    Without add_residual it returns (the second summand, x), as layernorm_linear does.
    """
    return autograd.apply(
        _LAYERNORM_MLP,
        (x, ln_weight, fc1_weight, fc2_weight),
        MLPSettings(eps, add_residual),
        quantizers=quantizers,
        tp=tp,
        fuse_wgrad_accumulation=fuse_wgrad_accumulation,
    )


def accumulate_wgrad(x, dy, out=None):
    """xᵀ · dy in float32, added to `out` (in place) where that is given, in the GEMM."""
    rt, code = runtime.current(), dtype_code("hidden states", x)
    result = rt.empty([x.shape[-1], dy.shape[-1]], paddle.float32) if out is None else out
    left, right = rt.matrix(dense(x), code), rt.matrix(dense(dy), code)
    rt.te.gemm(
        right.native, left.native, rt.matrix(result, FLOAT32).native, False, True, rt.stream, out is not None, False
    )
    return result
