"""Norms and GEMMs of a decoder layer as PyLayers.

With W [out, in]: y = x·Wᵀ, dx = dy·W, dW = dyᵀ·x. Under fp8 the three read e4m3 copies of x and W and a copy of dy in
the recipe's backward format; forward makes the transposed copies that backward reads and frees the others.
"""

import math

import paddle
from paddle.autograd import PyLayer

from paddle_te.ops.te import runtime
from paddle_te.ops.te.quantized import Float8Tensor, quantize, quantized_weight
from paddle_te.ops.te.runtime import check_dtype, dense, needs_grad


class Operand:
    """A matrix as a GEMM reads it: `native`, and what keeps its memory alive."""

    __slots__ = ("native", "memory")

    def __init__(self, native, memory):
        self.native, self.memory = native, memory


def _matrix(tensor):
    """(rows, cols) of [..., cols]."""
    *lead, cols = tensor.shape
    return math.prod(lead), cols  # tensor.size would launch an operation


def _operand(rt, tensor):
    return Operand(rt.view(tensor, _matrix(tensor)), tensor)


def _weight(rt, weight, quantizers):
    if quantizers is None:
        return _operand(rt, weight)
    quantized = quantized_weight(rt, weight, quantizers)
    return Operand(quantized.native, quantized)


def _weight_for_backward(rt, operand, quantizers):
    """Of an fp8 weight that no later micro-batch reads, backward needs the transposed copy only."""
    if quantizers is not None and quantizers.cached_weight is operand.memory:
        return operand
    return _drop_rowwise(rt, operand)


def _input(rt, x, shape, quantizers, columnwise):
    """x for the forward GEMM: itself, or quantized."""
    if quantizers is None:
        return Operand(rt.view(x, shape), x)
    quantized = quantize(rt, rt.view(x, shape), shape, quantizers.input, columnwise)
    return Operand(quantized.native, quantized)


def _drop_rowwise(rt, operand):
    """Frees the rowwise half of a quantized matrix after its forward GEMM."""
    if isinstance(operand.memory, Float8Tensor):
        operand.memory.drop_data(rt)
        operand.native = operand.memory.native
    return operand


def _grad_output(rt, dy, quantizers, tp):
    """dy for the backward GEMMs; under sequence parallelism (tp given) the rows of all ranks."""
    shape = _matrix(dy)
    if quantizers is None:
        return _operand(rt, dy if tp is None else tp.all_gather(dy.reshape(list(shape))))
    if tp is not None and not _same_scales(quantizers):
        dy, tp = tp.all_gather(dy.reshape(list(shape))), None
        shape = _matrix(dy)
    quantized = quantize(rt, rt.view(dy, shape), shape, quantizers.grad_output, columnwise=tp is None)
    if tp is not None:
        quantized = quantized.gathered(rt, tp)
    return Operand(quantized.native, quantized)


def _same_scales(quantizers):
    """Whether all tensor parallel ranks quantize alike, so that fp8 bytes may be gathered (the group holds them)."""
    return quantizers.input.kind == "delayed" and quantizers.amax_group is not None


def _fprop(rt, x, weight, out, accumulate=False):
    rt.te.gemm(weight.native, x.native, rt.view(out, _matrix(out)), True, False, rt.stream, accumulate)


def _dgrad(rt, dy, weight, shape, dtype, fp8):
    dx = rt.empty(shape, dtype)
    rt.te.gemm(weight.native, dy.native, rt.view(dx, _matrix(dx)), False, False, rt.stream, False, fp8)
    return dx


def _wgrad(rt, x, dy, weight, fuse, fp8):
    """dW; or None, with dW added to weight.main_grad (float32), where that is to be fused."""
    if not fuse:
        dw = rt.empty(weight.shape, weight.dtype)
        rt.te.gemm(x.native, dy.native, rt.view(dw), False, True, rt.stream, False, fp8)
        return dw
    accumulate = getattr(weight, "main_grad", None) is not None
    if not accumulate:
        weight.main_grad = rt.empty(weight.shape, paddle.float32)
    rt.te.gemm(x.native, dy.native, rt.view(weight.main_grad), False, True, rt.stream, accumulate, fp8)
    return None


def _norm(rt, x, ln_weight, eps, z, rsigma):
    rt.te.rmsnorm_fwd(rt.view(x, _matrix(x)), rt.view(ln_weight), eps, z, rsigma, rt.stream)


def _norm_backward(rt, dz, x, rsigma, ln_weight, add=None):
    """(dx, d ln_weight), dx with the residual's gradient `add` in it."""
    shape = _matrix(x)
    dx, dgamma = rt.empty(x.shape, x.dtype), rt.empty(ln_weight.shape, ln_weight.dtype)
    rt.te.rmsnorm_bwd(
        rt.view(dz, shape),
        rt.view(x, shape),
        rt.view(rsigma),
        rt.view(ln_weight),
        rt.view(dx, shape),
        rt.view(dgamma),
        rt.stream,
        None if add is None else rt.view(add, shape),
    )
    return dx, dgamma


def _normed_input(rt, x, ln_weight, eps, quantizers, tp, columnwise):
    """RMSNorm(x) as the operand of a column-parallel GEMM: (operand, what backward gathers it from, rsigma).

    Delayed scaling: the norm's kernel writes fp8. Under sequence parallelism each rank norms its own tokens and the
    others' are gathered, in fp8 where the ranks' scales are the same; backward gathers again, to keep less.
    """
    shape = _matrix(x)
    rsigma = rt.empty([shape[0]], paddle.float32)
    gather = tp is not None and tp.sequence_parallel
    delayed = quantizers is not None and quantizers.input.kind == "delayed" and (not gather or _same_scales(quantizers))
    if delayed:
        local = Float8Tensor(rt, shape, quantizers.input, columnwise=columnwise and not gather)
        _norm(rt, x, ln_weight, eps, local.native, rt.view(rsigma))
        whole = local.gathered(rt, tp) if gather else local
        return Operand(whole.native, whole), local, rsigma
    local = rt.empty(list(shape), x.dtype)
    _norm(rt, x, ln_weight, eps, rt.view(local), rt.view(rsigma))
    whole = tp.all_gather(local) if gather else local
    return _input(rt, whole, _matrix(whole), quantizers, columnwise), local, rsigma


def _gathered_again(rt, local, quantizers, tp):
    """In backward under sequence parallelism: what `_normed_input` gave, from the rank's own part."""
    if isinstance(local, Float8Tensor):
        whole = local.gathered(rt, tp, rowwise=False)
        return Operand(whole.native, whole)
    whole = tp.all_gather(local)
    return _input(rt, whole, _matrix(whole), quantizers, True)


def _check_fp8(quantizers, **sizes):
    """Raises ValueError for a GEMM dimension that fp8 cannot have."""
    if quantizers is not None and any(size % 16 for size in sizes.values()):
        wrong = ", ".join(f"{name} {size}" for name, size in sizes.items() if size % 16)
        raise ValueError(f"fp8 GEMMs need dimensions divisible by 16, not {wrong}; choose other sizes or pad")


def _row_output(rt, x, weight, out, residual, tp):
    """out = x·Wᵀ (+ residual), summed over tp where the GEMM is row parallel."""
    scatter = tp is not None and tp.sequence_parallel
    # one rank's GEMM adds the residual, for free, before the sum over ranks
    accumulate = residual is not None and not scatter and (tp is None or tp.rank == 0)
    if accumulate:
        size = math.prod(residual.shape) * residual.element_size()
        rt.te.memcpy_async(out.data_ptr(), residual.data_ptr(), size, rt.stream)
    _fprop(rt, x, weight, out, accumulate)
    if tp is not None:
        out = tp.reduce_output(out)
    return out.add_(residual.view(out.shape)) if scatter and residual is not None else out


def _column_input_grad(rt, dy, weight, shape, dtype, tp, fp8):
    """The gradient, of that shape, of a column-parallel GEMM's input, summed over tp."""
    dx = _dgrad(rt, dy, weight, shape, dtype, fp8)
    return dx if tp is None else tp.reduce_output(dx)


class _RMSNorm(PyLayer):
    @staticmethod
    def forward(ctx, x, weight, eps):
        rt = runtime.current()
        out, rsigma = rt.empty(x.shape, x.dtype), rt.empty([_matrix(x)[0]], paddle.float32)
        _norm(rt, x, weight, eps, rt.view(out, _matrix(x)), rt.view(rsigma))
        ctx.saved = x, weight, rsigma
        ctx.x_grad = not x.stop_gradient
        return out

    @staticmethod
    def backward(ctx, dy):
        x, weight, rsigma = ctx.saved
        dx, dgamma = _norm_backward(runtime.current(), dense(dy), x, rsigma, weight)
        return dx if ctx.x_grad else None, None if weight.stop_gradient else dgamma


class _Linear(PyLayer):
    @staticmethod
    def forward(ctx, x, weight, residual, parallel_mode, tp, quantizers, fuse, train):
        rt = runtime.current()
        column, row = (tp if parallel_mode == mode else None for mode in ("column", "row"))
        ctx.needs = not x.stop_gradient, not weight.stop_gradient, residual is not None and not residual.stop_gradient
        if column is not None and column.sequence_parallel:
            x = column.all_gather(x)
        shape = _matrix(x)
        operand, w = _input(rt, x, shape, quantizers, train), _weight(rt, weight, quantizers)
        out = rt.empty([*x.shape[:-1], weight.shape[0]], x.dtype)
        out = _row_output(rt, operand, w, out, residual, row)
        if train:
            ctx.saved = _drop_rowwise(rt, operand), _weight_for_backward(rt, w, quantizers), weight
            ctx.layout = x.shape, x.dtype, column, row, residual is not None
            ctx.quantizers, ctx.fuse = quantizers, fuse
        return out

    @staticmethod
    def backward(ctx, dy):
        rt, dy = runtime.current(), dense(dy)
        operand, w, weight = ctx.saved
        x_shape, dtype, column, row, has_residual = ctx.layout
        fp8 = ctx.quantizers is not None
        grad = _grad_output(rt, dy, ctx.quantizers, row if row is not None and row.sequence_parallel else None)
        x_grad, w_grad, residual_grad = ctx.needs
        dx = _column_input_grad(rt, grad, w, x_shape, dtype, column, fp8) if x_grad else None
        dw = _wgrad(rt, operand, grad, weight, ctx.fuse, fp8) if w_grad else None
        if fp8:
            ctx.quantizers.module.backward_done()
        return (dx, dw, dy if residual_grad else None) if has_residual else (dx, dw)


class _LayerNormLinear(PyLayer):
    @staticmethod
    def forward(ctx, x, ln_weight, weight, eps, tp, quantizers, fuse, train):
        rt = runtime.current()
        operand, local, rsigma = _normed_input(rt, x, ln_weight, eps, quantizers, tp, train)
        w = _weight(rt, weight, quantizers)
        gather = tp is not None and tp.sequence_parallel
        lead = [x.shape[0] * tp.size] if gather else x.shape[:-1]
        out = rt.empty([*lead, weight.shape[0]], x.dtype)
        _fprop(rt, operand, w, out)
        if train:
            if not gather:
                local = _drop_rowwise(rt, operand)
            ctx.saved = x, ln_weight, rsigma, local, _weight_for_backward(rt, w, quantizers), weight
            ctx.tp, ctx.gather, ctx.quantizers, ctx.fuse = tp, gather, quantizers, fuse
            ctx.x_grad = not x.stop_gradient
        return out, x.view(x.shape)

    @staticmethod
    def backward(ctx, dy, dresidual):
        rt, tp, quantizers = runtime.current(), ctx.tp, ctx.quantizers
        x, ln_weight, rsigma, operand, w, weight = ctx.saved
        fp8 = quantizers is not None
        if ctx.gather:
            operand = _gathered_again(rt, operand, quantizers, tp)
        grad = _grad_output(rt, dense(dy), quantizers, None)
        shape = [x.shape[0] * tp.size, x.shape[1]] if ctx.gather else x.shape
        dz = _column_input_grad(rt, grad, w, shape, x.dtype, tp, fp8)
        dw = None if weight.stop_gradient else _wgrad(rt, operand, grad, weight, ctx.fuse, fp8)
        dx, dgamma = _norm_backward(rt, dz, x, rsigma, ln_weight, dense(dresidual))
        if fp8:
            quantizers.module.backward_done()
        return dx if ctx.x_grad else None, None if ln_weight.stop_gradient else dgamma, dw


class _LayerNormMLP(PyLayer):
    @staticmethod
    def forward(ctx, x, ln_weight, fc1_weight, fc2_weight, eps, tp, quantizers, fuse, train):
        rt = runtime.current()
        first, second = quantizers
        operand, local, rsigma = _normed_input(rt, x, ln_weight, eps, first, tp, train)
        gather = tp is not None and tp.sequence_parallel
        rows = _matrix(x)[0] * (tp.size if gather else 1)
        w1, w2 = _weight(rt, fc1_weight, first), _weight(rt, fc2_weight, second)
        hidden = rt.empty([rows, fc1_weight.shape[0]], x.dtype)
        _fprop(rt, operand, w1, hidden)
        act = _swiglu(rt, hidden, second, train)
        out = rt.empty([rows, x.shape[-1]] if gather else x.shape, x.dtype)
        out = _row_output(rt, act, w2, out, x, tp)
        if train:
            if not gather:
                local = _drop_rowwise(rt, operand)
            weights = _weight_for_backward(rt, w1, first), _weight_for_backward(rt, w2, second)
            ctx.saved = x, ln_weight, rsigma, local, hidden, _drop_rowwise(rt, act), *weights, fc1_weight, fc2_weight
            ctx.tp, ctx.gather, ctx.quantizers, ctx.fuse = tp, gather, quantizers, fuse
            ctx.x_grad = not x.stop_gradient
        return out

    @staticmethod
    def backward(ctx, dy):
        rt, tp, dy = runtime.current(), ctx.tp, dense(dy)
        first, second = ctx.quantizers
        x, ln_weight, rsigma, operand, hidden, act, w1, w2, fc1_weight, fc2_weight = ctx.saved
        fp8 = first is not None
        rows, inner = hidden.shape[0], fc2_weight.shape[1]
        grad = _grad_output(rt, dy, second, tp if ctx.gather else None)
        dact = _dgrad(rt, grad, w2, [rows, inner], x.dtype, fp8)
        dw2 = None if fc2_weight.stop_gradient else _wgrad(rt, act, grad, fc2_weight, ctx.fuse, fp8)
        grad = _dswiglu(rt, dact, hidden, first)
        del dact, hidden
        dz = _column_input_grad(rt, grad, w1, [rows, x.shape[-1]], x.dtype, tp, fp8)
        if ctx.gather:
            operand = _gathered_again(rt, operand, first, tp)
        dw1 = None if fc1_weight.stop_gradient else _wgrad(rt, operand, grad, fc1_weight, ctx.fuse, fp8)
        dx, dgamma = _norm_backward(rt, dz, x, rsigma, ln_weight, dy)
        if fp8:
            first.module.backward_done()
        return dx if ctx.x_grad else None, None if ln_weight.stop_gradient else dgamma, dw1, dw2


def _swiglu(rt, hidden, quantizers, train):
    """silu(gate)·up as the operand of fc2; delayed scaling writes fp8 in the same kernel."""
    shape = hidden.shape[0], hidden.shape[1] // 2
    if quantizers is not None and quantizers.input.kind == "delayed":
        act = Float8Tensor(rt, shape, quantizers.input, columnwise=train)
        rt.te.swiglu(rt.view(hidden), act.native, rt.stream)
        return Operand(act.native, act)
    act = rt.empty(list(shape), hidden.dtype)
    rt.te.swiglu(rt.view(hidden), rt.view(act), rt.stream)
    return _input(rt, act, shape, quantizers, train)


def _dswiglu(rt, dact, hidden, quantizers):
    """The gradient of fc1's output as the operand of its backward GEMMs."""
    shape = tuple(hidden.shape)
    if quantizers is not None and quantizers.grad_output.kind == "delayed":
        grad = Float8Tensor(rt, shape, quantizers.grad_output)
        rt.te.dswiglu_cast_transpose(rt.view(dact), rt.view(hidden), grad.native, rt.stream)
        return Operand(grad.native, grad)
    grad = rt.empty(list(shape), hidden.dtype)
    rt.te.dswiglu(rt.view(dact), rt.view(hidden), rt.view(grad), rt.stream)
    if quantizers is None:
        return Operand(rt.view(grad), grad)
    grad = quantize(rt, rt.view(grad), shape, quantizers.grad_output)
    return Operand(grad.native, grad)


def rms_norm(x, weight, eps):
    """x / sqrt(mean(x²) + eps) · weight over the last axis, in float32 inside."""
    check_dtype("x", x)
    return _RMSNorm.apply(dense(x), weight, eps)


def linear(x, weight, *, residual=None, parallel_mode=None, tp=None, quantizers=None, fuse_wgrad_accumulation=False):
    """x · weightᵀ (+ residual), weight split by `parallel_mode` ("column", "row" or None) over `tp`."""
    check_dtype("x", x)
    _check_fp8(quantizers, tokens=_matrix(x)[0], in_features=weight.shape[1], out_features=weight.shape[0])
    train = needs_grad(x, weight)
    residual = None if residual is None else dense(residual)
    return _Linear.apply(dense(x), weight, residual, parallel_mode, tp, quantizers, fuse_wgrad_accumulation, train)


def layernorm_linear(x, ln_weight, weight, eps, *, tp=None, quantizers=None, fuse_wgrad_accumulation=False):
    """(rms_norm(x) · weightᵀ, x): column parallel; x comes back as the residual branch, whose gradient the norm's
    backward kernel adds."""
    check_dtype("x", x)
    _check_fp8(quantizers, tokens=_matrix(x)[0], in_features=weight.shape[1], out_features=weight.shape[0])
    train = needs_grad(x, ln_weight, weight)
    return _LayerNormLinear.apply(dense(x), ln_weight, weight, eps, tp, quantizers, fuse_wgrad_accumulation, train)


def layernorm_mlp(
    x, ln_weight, fc1_weight, fc2_weight, eps, *, tp=None, quantizers=(None, None), fuse_wgrad_accumulation=False
):
    """x + swiglu(rms_norm(x) · fc1ᵀ) · fc2ᵀ; fc1 is column parallel (gate and up stacked), fc2 row parallel."""
    check_dtype("x", x)
    hidden, ffn = fc2_weight.shape
    _check_fp8(quantizers[0], tokens=_matrix(x)[0], hidden_size=hidden, ffn_hidden_size=ffn)
    train = needs_grad(x, ln_weight, fc1_weight, fc2_weight)
    return _LayerNormMLP.apply(
        dense(x), ln_weight, fc1_weight, fc2_weight, eps, tp, quantizers, fuse_wgrad_accumulation, train
    )
