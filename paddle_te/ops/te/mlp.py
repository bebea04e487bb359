"""The MLP half of a layer, and its activation, as Ops: see paddle_te.ops.te.recording."""

from dataclasses import dataclass
from typing import NamedTuple

from paddle_te.ops.activations import FC1_WIDTHS
from paddle_te.ops.te import autograd, kernel_choice, swiglu
from paddle_te.ops.te.gemm import (
    BiasGradient,
    SavedColumn,
    cast_in_kernels,
    check_bias,
    check_fp8,
    check_weight,
    column_forward,
    dgrad,
    drop_data,
    grad_output,
    row_count,
    row_output,
    wgrad,
)
from paddle_te.ops.te.norm import Normed, NormSettings
from paddle_te.ops.te.quantized import Float8Matrix, new_float8, operand_pieces, quantize, quantized_weight
from paddle_te.ops.te.recording import Op, OpInputs
from paddle_te.ops.te.runtime import Matrix, dtype_code


class _Kernels(NamedTuple):
    """TE's names of an activation's functions: itself and its gradient, and the gradient in fp8 with its transpose,
    alone and with the sum of its rows, None where there is none."""

    forward: str
    backward: str
    to_fp8: str
    to_fp8_with_dbias: str | None

    @classmethod
    def of(cls, activation):
        backward = f"d{activation}"
        if FC1_WIDTHS[activation] == 2:
            return cls(activation, backward, f"{backward}_cast_transpose", None)
        return cls(activation, backward, backward, f"quantize_dbias_{backward}")


_KERNELS = {activation: _Kernels.of(activation) for activation in FC1_WIDTHS}


class MLPSettings(NamedTuple):
    """norm: its NormSettings. activation: its name. add_residual: x is added to the output, and else returned behind
    it. recompute: as `layernorm_mlp` has it."""

    norm: NormSettings
    activation: str
    add_residual: bool
    recompute: str | None


class _Fc1(NamedTuple):
    """The first GEMM's output, and what its backward reads."""

    out: Matrix
    saved: SavedColumn

    @classmethod
    def forward(cls, rt, inputs, norm):
        """inputs: the MLP's OpInputs."""
        x, ln_weight, ln_bias, weight, bias, *_ = inputs.tensors
        normed = Normed(rt, x, ln_weight, ln_bias, norm, dtype_code("x", x))
        return cls(*column_forward(rt, normed, weight, bias, inputs.quantizers[0], inputs.tp, inputs.train))


@dataclass(slots=True)
class _SavedMLP:
    """What the MLP's backward reads. inputs, settings: the op's. w2: fc2's weight as its GEMM read it. fc1; act: the
    activation's output as fc2's GEMM read it. Either is None where backward computes it again."""

    inputs: OpInputs
    settings: MLPSettings
    w2: Matrix | Float8Matrix
    fc1: _Fc1 | None
    act: Matrix | Float8Matrix | None


def _forward(rt, inputs, settings):
    x, _, _, fc1_weight, fc1_bias, fc2_weight, fc2_bias = inputs.tensors
    (first, second), tp, train = inputs.quantizers, inputs.tp, inputs.train
    code, hidden_size, ffn = dtype_code("x", x), x.shape[-1], fc2_weight.shape[1]
    fc1_rows = FC1_WIDTHS[settings.activation] * ffn
    check_weight("fc1_weight", fc1_weight, [fc1_rows, hidden_size], x.dtype, first)
    check_weight("fc2_weight", fc2_weight, [hidden_size, ffn], x.dtype, second)
    check_bias("fc1_bias", fc1_bias, fc1_rows, x.dtype)
    check_bias("fc2_bias", fc2_bias, hidden_size, x.dtype)
    check_fp8(first, tokens=row_count(x), hidden_size=hidden_size, ffn_hidden_size=ffn)
    fc1, again = _Fc1.forward(rt, inputs, settings.norm), settings.recompute
    act, w2 = _activated_and_weight(rt, fc1.out, fc2_weight, code, second, settings, train)
    out = rt.empty([*fc1.out.memory.shape[:-1], hidden_size], x.dtype)
    out = row_output(rt, act, w2, out, code, x if settings.add_residual else None, tp, bias=fc2_bias)
    if train:
        drop_data(rt, *((w2,) if again else (act, w2)))
    saved = _SavedMLP(inputs, settings, w2, None if again == "mlp" else fc1, None if again else act)
    return out if settings.add_residual else (out, x), saved


def _backward(rt, saved, dy, dresidual=None):
    """dresidual: where x was returned; else dy is its gradient."""
    x, *_, fc2_weight, fc2_bias = saved.inputs.tensors
    (first, second), tp, activation = saved.inputs.quantizers, saved.inputs.tp, saved.settings.activation
    code, fp8 = dtype_code("x", x), second is not None
    gather = tp is not None and tp.sequence_parallel
    dfc2_bias = BiasGradient.wanted(rt, fc2_bias, fc2_weight, fp8)
    grad = grad_output(rt, dy, code, second, tp if gather else None, fc2_weight, dfc2_bias)
    dact = rt.new_matrix((grad.shape[0], fc2_weight.shape[1]), x.dtype, code)
    dgrad(rt, grad, saved.w2, dact.native, fp8)
    fc1 = saved.fc1 or _Fc1.forward(rt, saved.inputs, saved.settings.norm)
    act = saved.act or _activated_again(rt, fc1.out, code, second, activation)
    dw2 = wgrad(rt, act, grad, fc2_weight, code, fp8, dfc2_bias)
    dfc1_bias = fc1.saved.bias_gradient(rt)
    grad = _activation_backward(rt, dact, fc1.out, _KERNELS[activation], x.dtype, code, first, dfc1_bias)
    of_fc1 = fc1.saved.backward(rt, grad, dfc1_bias, dy if dresidual is None else dresidual)
    return *of_fc1, dw2, dfc2_bias and dfc2_bias.in_its_dtype(rt)


def _activated_and_weight(rt, hidden, weight, code, quantizers, settings, train):
    """The activation's output and a weight as the forward GEMM reads them."""
    activation = settings.activation
    if quantizers is None:
        return _activated(rt, hidden, code, None, activation), rt.matrix(weight, code)
    shape = hidden.shape[0], weight.shape[1]
    wgrad, again = not weight.stop_gradient, settings.recompute is not None
    pieces = operand_pieces(rt, quantizers, shape, weight.shape, train, wgrad, recompute=again)
    act = _activated(rt, hidden, code, quantizers, activation, pieces.input)
    return act, quantized_weight(rt, weight, code, quantizers, pieces.weight)


def _activated(rt, hidden, code, quantizers, activation, pieces=None):
    """The activation's output as a GEMM reads it; SwiGLU and delayed scaling write fp8 in the same kernel. pieces:
    (rowwise, columnwise) for fp8; None: new ones for both."""
    shape = hidden.shape[0], hidden.shape[1] // FC1_WIDTHS[activation]
    if quantizers is not None and kernel_choice.swiglu(rt, activation, quantizers.input):
        return swiglu.forward(rt, hidden, code, new_float8(rt, shape, quantizers.input, pieces))
    activate = getattr(rt.te, _KERNELS[activation].forward)
    if cast_in_kernels(quantizers):
        act = new_float8(rt, shape, quantizers.input, pieces)
        activate(hidden.native, act.native, rt.stream)
        return act
    act = rt.new_matrix(shape, hidden.memory.dtype, code)
    activate(hidden.native, act.native, rt.stream)
    return act if quantizers is None else quantize(rt, act, quantizers.input, pieces)


def _activated_again(rt, hidden, code, quantizers, activation):
    """In backward: what forward has not kept of `_activated`."""
    act = _activated(rt, hidden, code, quantizers, activation)
    drop_data(rt, act)
    return act


def _activation_backward(rt, dact, hidden, kernels, dtype, code, quantizers, dbias):
    """The gradient of fc1's output as the operand of its backward GEMMs. dbias: a BiasGradient, filled here in fp8."""
    if quantizers is not None and dbias is None and kernel_choice.swiglu(rt, kernels.forward, quantizers.grad_output):
        return swiglu.backward(rt, dact, hidden, code, new_float8(rt, hidden.shape, quantizers.grad_output))
    kernel = kernels.to_fp8 if dbias is None else kernels.to_fp8_with_dbias
    if kernel is None or not cast_in_kernels(quantizers):
        grad = rt.new_matrix(hidden.shape, dtype, code)
        getattr(rt.te, kernels.backward)(dact.native, hidden.native, grad.native, rt.stream)
        if quantizers is None:
            return grad
        return quantize(rt, grad, quantizers.grad_output, dbias=dbias and dbias.native)
    grad = new_float8(rt, hidden.shape, quantizers.grad_output)
    operands = dact.native, hidden.native, grad.native
    getattr(rt.te, kernel)(*operands, *(() if dbias is None else (dbias.native,)), rt.stream)
    return grad


def _activate_forward(rt, inputs, kernels):
    (x,) = inputs.tensors
    code = dtype_code("x", x)
    hidden = rt.matrix(x, code)
    width = FC1_WIDTHS[kernels.forward]
    out = rt.empty([*x.shape[:-1], x.shape[-1] // width], x.dtype)
    getattr(rt.te, kernels.forward)(hidden.native, rt.matrix(out, code).native, rt.stream)
    return out, (x, hidden, code, kernels)


def _activate_backward(rt, saved, dy):
    x, hidden, code, kernels = saved
    dx = rt.empty(x.shape, x.dtype)
    operands = rt.matrix(dy, code).native, hidden.native, rt.matrix(dx, code).native
    getattr(rt.te, kernels.backward)(*operands, rt.stream)
    return (dx,)


_LAYERNORM_MLP = Op(_forward, _backward, weights=(3, 5))
_ACTIVATE = Op(_activate_forward, _activate_backward)


def layernorm_mlp(
    x,
    norm,
    fc1_weight,
    fc2_weight,
    *,
    fc1_bias=None,
    fc2_bias=None,
    activation="swiglu",
    add_residual=True,
    recompute=None,
    tp=None,
    quantizers=(None, None),
    fuse_wgrad_accumulation=False,
):
    """See `paddle_te.ops.pd.linear.layernorm_mlp`."""
    return autograd.apply(
        _LAYERNORM_MLP,
        (x, norm.weight, norm.bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias),
        MLPSettings(NormSettings.of(norm), activation, add_residual, recompute),
        quantizers=quantizers,
        tp=tp,
        fuse_wgrad_accumulation=fuse_wgrad_accumulation,
    )


def activate(x, activation):
    """x activated by one of `ops.activations`; of a gated one [..., 2·f] becomes [..., f]."""
    return autograd.apply(_ACTIVATE, (x,), _KERNELS[activation])
