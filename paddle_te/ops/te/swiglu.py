"""SwiGLU in fp8 by our own kernel: both copies, and current scaling's amax, without a pass over a copy in 16 bits."""

from functools import partial

from paddle_te.native import swiglu
from paddle_te.ops.te.quantized import FP8


# Addresses come from what memory a Matrix lies in: native tensors are moved by each run, and a backward may be recorded
# after some.
def forward(rt, hidden, code, out):
    """Fills `out`, a Float8Matrix, with the activation of a Matrix [rows, 2 cols], whose dtype is `code`."""
    rows, cols = out.shape
    addresses, options = (hidden.memory.data_ptr(),), (rows, cols, code, FP8[out.quantizer.dtype])
    return out.fill_by(rt, partial(_cast, rt, swiglu.swiglu_cast_transpose, addresses, options))


def backward(rt, dact, hidden, code, out):
    """Fills `out` with the gradient of `hidden`; dact: the Matrix of the gradient of forward's result."""
    rows, cols = dact.shape
    addresses = dact.memory.data_ptr(), hidden.memory.data_ptr()
    options = rows, cols, code, FP8[out.quantizer.dtype]
    return out.fill_by(rt, partial(_cast, rt, swiglu.dswiglu_cast_transpose, addresses, options))


def _cast(rt, kernel, addresses, options, target, rounded):
    kernel(rt.te, rt.stream, *addresses, target, *options, rounded)
