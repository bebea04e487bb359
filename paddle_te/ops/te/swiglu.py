"""Run SwiGLU by our own kernel, without a pass over a copy in 16 bits.

It writes both copies in fp8, current scaling's amax, and MXFP8 of its input.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from paddle_te.native import DType, casts, swiglu
from paddle_te.native.casts import CastTarget, Form
from paddle_te.native.swiglu import More
from paddle_te.ops.te.input_store import StoredInput
from paddle_te.ops.te.quantized import FP8, Float8Matrix
from paddle_te.ops.te.runtime import Matrix, Runtime

_NO_FP8 = CastTarget(0, 0, 0, 0, 0)


# Addresses come from what memory a Matrix lies in: native tensors are moved by each run, and a backward may be recorded
# after some.
def forward(
    rt: Runtime, hidden: Matrix | StoredInput, code: int, out: Float8Matrix, store: StoredInput | None = None
) -> Float8Matrix:
    """Fill `out`, a Float8Matrix, with the activation of hidden [rows, 2 cols].

    hidden: a Matrix whose dtype is `code`, or a StoredInput. store: a StoredInput of it to fill, or None.
    """
    z, more = _input(hidden, store)

    def cast(target: CastTarget, rounded: bool) -> None:
        measures = not (target.data or target.transposed)
        also = more._replace(stored=0) if measures and z else more  # it is stored once
        form = Form(code, FP8[out.quantizer.dtype], rounded)
        swiglu.swiglu_cast_transpose(rt.te, rt.stream, z, target, out.shape, form, also)

    return out.fill_by(rt, cast)


def backward(rt: Runtime, dact: Matrix, hidden: Matrix | StoredInput, code: int, out: Float8Matrix) -> Float8Matrix:
    """Fill `out` with the gradient of `hidden`, as forward's.

    dact: the Matrix of the gradient of forward's result.
    """
    z, more = _input(hidden)

    def cast(target: CastTarget, rounded: bool) -> None:
        form = Form(code, FP8[out.quantizer.dtype], rounded)
        swiglu.dswiglu_cast_transpose(rt.te, rt.stream, dact.memory.data_ptr(), z, target, dact.shape, form, more)

    return out.fill_by(rt, cast)


def forward_plain(
    rt: Runtime,
    hidden: Matrix | StoredInput,
    code: int,
    out: Matrix,
    store: StoredInput | None = None,
    quantized: Float8Matrix | None = None,
) -> None:
    """Fill `out`, a Matrix, and beside it `quantized`, a Float8Matrix, or None; the rest as `forward`."""
    z, more = _input(hidden, store)
    kernel = partial(swiglu.swiglu_cast_transpose, rt.te, rt.stream, z)
    _fill_plain(rt, kernel, out, out.shape, code, more, quantized)


def backward_plain(
    rt: Runtime,
    dact: Matrix,
    hidden: Matrix | StoredInput,
    code: int,
    out: Matrix,
    again: Matrix | None = None,
    quantized: Float8Matrix | None = None,
) -> None:
    """Fill `out`, a Matrix, and beside it `quantized`, as `forward_plain`; the rest as `backward`.

    again: a Matrix for what `forward_plain` gives, or None.
    """
    z, more = _input(hidden)
    more = more._replace(again=0 if again is None else again.memory.data_ptr())
    kernel = partial(swiglu.dswiglu_cast_transpose, rt.te, rt.stream, dact.memory.data_ptr(), z)
    _fill_plain(rt, kernel, out, dact.shape, code, more, quantized)


def _fill_plain(
    rt: Runtime,
    kernel: Callable[..., None],
    out: Matrix,
    shape: tuple[int, int],
    code: int,
    more: More,
    quantized: Float8Matrix | None,
) -> None:
    """Fill both. shape: (rows, cols) of the activation's result."""
    more = more._replace(plain=out.memory.data_ptr())
    if quantized is None:
        kernel(_NO_FP8, shape, Form(code, DType.FLOAT8_E4M3), more)
        return
    float8, read = FP8[quantized.quantizer.dtype], out.memory.data_ptr()

    def cast(target: CastTarget, rounded: bool) -> None:
        if rounded and (target.data or target.transposed):  # what has been measured, as it was written
            casts.cast_transpose(rt.te, rt.stream, read, target, *out.shape, code, float8)
        else:
            kernel(target, shape, Form(code, float8, rounded=True), more)

    quantized.fill_by(rt, cast)


def _input(hidden: Matrix | StoredInput, store: StoredInput | None = None) -> tuple[int, More]:
    """Return (the address of the input in 16 bits, or 0 for a StoredInput; More)."""
    if isinstance(hidden, StoredInput):
        return 0, More(stored=hidden.memory.data_ptr())
    return hidden.memory.data_ptr(), More(stored=0 if store is None else store.memory.data_ptr())
