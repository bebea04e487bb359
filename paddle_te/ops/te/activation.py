"""The MLP's activation: as parts of other Ops, with the casts to fp8, and as one: see paddle_te.ops.te.recording."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from paddle import Tensor

from paddle_te.ops.activations import FC1_WIDTHS
from paddle_te.ops.te import autograd, kernel_choice, swiglu
from paddle_te.ops.te.gemm import BiasGradient, cast_in_kernels, drop_data, grad_pieces
from paddle_te.ops.te.input_store import StoredInput
from paddle_te.ops.te.quantized import Float8Matrix, Pieces, new_float8, quantize, rowwise_pieces
from paddle_te.ops.te.recording import Op, OpInputs, Placeholder, RecordedQuantizers, Recorder
from paddle_te.ops.te.runtime import Matrix, dtype_code


class _Kernels(NamedTuple):
    """Hold TE's names of an activation's functions.

    Itself and its gradient, and the gradient in fp8 with its transpose, alone and with the sum of its rows, None where
    there is none.
    """

    forward: str
    backward: str
    to_fp8: str
    to_fp8_with_dbias: str | None

    @classmethod
    def of(cls, activation: str) -> _Kernels:
        backward = f"d{activation}"
        if FC1_WIDTHS[activation] == 2:
            return cls(activation, backward, f"{backward}_cast_transpose", None)
        return cls(activation, backward, backward, f"quantize_dbias_{backward}")


_KERNELS = {activation: _Kernels.of(activation) for activation in FC1_WIDTHS}


def activated(
    rt: Recorder,
    hidden: Matrix | StoredInput,
    code: int,
    quantizers: RecordedQuantizers | None,
    activation: str,
    pieces: tuple[Pieces, Pieces | None] | None = None,
    store: StoredInput | None = None,
) -> Matrix | Float8Matrix:
    """Return the activation's output as a GEMM reads it; SwiGLU and delayed scaling write fp8 in the same kernel.

    hidden: a Matrix, or a StoredInput. pieces: (rowwise, columnwise) for fp8; None: new ones for both. store: a
    StoredInput of `hidden` to fill, or None.
    """
    shape = hidden.shape[0], hidden.shape[1] // FC1_WIDTHS[activation]
    if quantizers is not None and kernel_choice.swiglu(rt, activation, quantizers.input):
        return swiglu.forward(rt, hidden, code, new_float8(rt, shape, quantizers.input, pieces), store)
    if (store or isinstance(hidden, StoredInput)) and kernel_choice.swiglu_of_stored(rt, activation, shape):
        act = rt.new_matrix(shape, _dtype(hidden), code)
        swiglu.forward_plain(rt, hidden, code, act, store)
        return act if quantizers is None else quantize(rt, act, quantizers.input, pieces)
    hidden = _in_16_bits(rt, hidden)
    if store:
        store.fill(rt, hidden)
    activate = getattr(rt.te, _KERNELS[activation].forward)
    if quantizers is not None and cast_in_kernels(quantizers):
        quantized = new_float8(rt, shape, quantizers.input, pieces)
        activate(hidden.native, quantized.native, rt.stream)
        if quantized.counts:
            quantized.count(rt, _activated_plain(rt, hidden, code, activation))
        return quantized
    act = rt.new_matrix(shape, hidden.memory.dtype, code)
    activate(hidden.native, act.native, rt.stream)
    return act if quantizers is None else quantize(rt, act, quantizers.input, pieces)


def _dtype(hidden: Matrix | StoredInput) -> Any:
    return hidden.dtype if isinstance(hidden, StoredInput) else hidden.memory.dtype


def _in_16_bits(rt: Recorder, hidden: Matrix | StoredInput) -> Matrix:
    return hidden.restored(rt) if isinstance(hidden, StoredInput) else hidden


def _activated_plain(
    rt: Recorder, hidden: Matrix | StoredInput, code: int, activation: str, store: StoredInput | None = None
) -> Matrix:
    """Return the activation's output in 16 bits."""
    return cast(Matrix, activated(rt, hidden, code, None, activation, store=store))


def activated_in_both(
    rt: Recorder,
    hidden: Matrix | StoredInput,
    code: int,
    quantizers: RecordedQuantizers | None,
    activation: str,
    wgrad: bool,
    store: StoredInput | None = None,
) -> tuple[Matrix, Float8Matrix | None]:
    """Return (the activation's output, a Matrix; the same as a GEMM reads it, or None where the GEMM is to cast it).

    wgrad: whether the GEMM's weight gets a gradient. The rest as `activated`.
    """
    if quantizers is None or not kernel_choice.swiglu(rt, activation, quantizers.input):
        return _activated_plain(rt, hidden, code, activation, store), None
    shape, dtype = (hidden.shape[0], hidden.shape[1] // 2), _dtype(hidden)
    pieces = None if wgrad else rowwise_pieces(rt, shape, quantizers.input)
    act, quantized = rt.new_matrix(shape, dtype, code), new_float8(rt, shape, quantizers.input, pieces)
    swiglu.forward_plain(rt, hidden, code, act, store, quantized)
    return act, quantized


def activated_again(
    rt: Recorder, hidden: Matrix | StoredInput, code: int, quantizers: RecordedQuantizers | None, activation: str
) -> Matrix | Float8Matrix:
    """Compute `activated` again in backward, where forward has not kept it."""
    act = activated(rt, hidden, code, quantizers, activation)
    drop_data(rt, act)
    return act


def activation_backward(
    rt: Recorder,
    dact: Matrix,
    hidden: Matrix | StoredInput,
    activation: str,
    code: int,
    quantizers: RecordedQuantizers | None,
    dbias: BiasGradient | None,
) -> Matrix | Float8Matrix:
    """Return the gradient of fc1's output as the operand of its backward GEMMs.

    hidden: a Matrix, or a StoredInput. dbias: a BiasGradient, filled here in fp8.
    """
    kernels = _KERNELS[activation]
    if quantizers is not None and dbias is None and kernel_choice.swiglu(rt, activation, quantizers.grad_output):
        return swiglu.backward(rt, dact, hidden, code, new_float8(rt, hidden.shape, quantizers.grad_output))
    kernel = kernels.to_fp8 if dbias is None else kernels.to_fp8_with_dbias
    if kernel is None or quantizers is None or not cast_in_kernels(quantizers):
        grad = activation_backward_plain(rt, dact, hidden, activation, code)
        if quantizers is None:
            return grad
        return quantize(rt, grad, quantizers.grad_output, dbias=dbias and dbias.native)
    hidden, grad8 = _in_16_bits(rt, hidden), new_float8(rt, hidden.shape, quantizers.grad_output)
    operands = dact.native, hidden.native, grad8.native
    getattr(rt.te, kernel)(*operands, *(() if dbias is None else (dbias.native,)), rt.stream)
    if grad8.counts:
        grad8.count(rt, activation_backward_plain(rt, dact, hidden, activation, code))
    return grad8


def activation_backward_plain(
    rt: Recorder, dact: Matrix, hidden: Matrix | StoredInput, activation: str, code: int
) -> Matrix:
    """Return the Matrix of the gradient of fc1's output.

    hidden: a Matrix, or a StoredInput.
    """
    grad = rt.new_matrix(hidden.shape, dact.memory.dtype, code)
    if isinstance(hidden, StoredInput) and kernel_choice.swiglu_of_stored(rt, activation, dact.shape):
        swiglu.backward_plain(rt, dact, hidden, code, grad)
        return grad
    hidden = _in_16_bits(rt, hidden)
    getattr(rt.te, _KERNELS[activation].backward)(dact.native, hidden.native, grad.native, rt.stream)
    return grad


class ActivationGradient(NamedTuple):
    """Hold the gradient of fc1's output.

    grad: its Matrix. quantized: the same as fc1's backward GEMMs read it, None where these are to cast it. act: the
    Matrix of the activation's output where it was wanted again.
    """

    grad: Matrix
    quantized: Float8Matrix | None
    act: Matrix | None


def activation_backward_in_both(
    rt: Recorder,
    dact: Matrix,
    hidden: Matrix | StoredInput,
    activation: str,
    code: int,
    quantizers: RecordedQuantizers | None,
    weight: Placeholder,
    again: bool,
) -> ActivationGradient:
    """Return an ActivationGradient.

    weight: fc1's, whose bias gets no gradient. again: whether the output is wanted; SwiGLU's kernel writes it in
    passing. The rest as `activation_backward`.
    """
    in_fp8 = quantizers is not None and kernel_choice.swiglu(rt, activation, quantizers.grad_output)
    of_stored = isinstance(hidden, StoredInput) and kernel_choice.swiglu_of_stored(rt, activation, dact.shape)
    if not (in_fp8 or of_stored):
        act = _activated_plain(rt, hidden, code, activation) if again else None
        return ActivationGradient(activation_backward_plain(rt, dact, hidden, activation, code), None, act)
    dtype = dact.memory.dtype
    grad, quantized = rt.new_matrix(hidden.shape, dtype, code), None
    if quantizers is not None and in_fp8:
        pieces = grad_pieces(rt, hidden.shape, quantizers, weight)
        quantized = new_float8(rt, hidden.shape, quantizers.grad_output, pieces)
    act = rt.new_matrix(dact.shape, dtype, code) if again else None
    swiglu.backward_plain(rt, dact, hidden, code, grad, act, quantized)
    return ActivationGradient(grad, quantized, act)


def _activate_forward(
    rt: Recorder, inputs: OpInputs, kernels: _Kernels
) -> tuple[Placeholder, tuple[Placeholder, Matrix, int, _Kernels]]:
    (x,) = inputs.tensors
    code = dtype_code("x", x)
    hidden = rt.matrix(x, code)
    width = FC1_WIDTHS[kernels.forward]
    out = rt.empty([*x.shape[:-1], x.shape[-1] // width], x.dtype)
    getattr(rt.te, kernels.forward)(hidden.native, rt.matrix(out, code).native, rt.stream)
    return out, (x, hidden, code, kernels)


def _activate_backward(
    rt: Recorder, saved: tuple[Placeholder, Matrix, int, _Kernels], dy: Placeholder
) -> tuple[Placeholder]:
    x, hidden, code, kernels = saved
    dx = rt.empty(x.shape, x.dtype)
    operands = rt.matrix(dy, code).native, hidden.native, rt.matrix(dx, code).native
    getattr(rt.te, kernels.backward)(*operands, rt.stream)
    return (dx,)


_ACTIVATE = Op(_activate_forward, _activate_backward)


def activate(x: Tensor, activation: str) -> Tensor:
    """Activate x by one of `ops.activations`; of a gated one [..., 2·f] becomes [..., f]."""
    return autograd.apply(_ACTIVATE, (x,), _KERNELS[activation])
