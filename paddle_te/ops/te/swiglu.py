"""SwiGLU by our own kernel: both copies in fp8, current scaling's amax, and MXFP8 of its input, without a pass over a
copy in 16 bits."""

from paddle_te.native import DType, swiglu
from paddle_te.native.casts import CastTarget
from paddle_te.native.swiglu import More
from paddle_te.ops.te.input_store import StoredInput
from paddle_te.ops.te.quantized import FP8

_NO_FP8 = CastTarget(0, 0, 0, 0, 0)


# Addresses come from what memory a Matrix lies in: native tensors are moved by each run, and a backward may be recorded
# after some.
def forward(rt, hidden, code, out, store=None):
    """Fills `out`, a Float8Matrix, with the activation of hidden [rows, 2 cols], a Matrix whose dtype is `code`, or a
    StoredInput. store: a StoredInput of it to fill, or None."""
    z, more = _input(hidden, store)

    def cast(target, rounded):
        measures = not (target.data or target.transposed)
        also = more._replace(stored=0) if measures and z else more  # it is stored once
        options = *out.shape, code, FP8[out.quantizer.dtype], rounded
        swiglu.swiglu_cast_transpose(rt.te, rt.stream, z, target, *options, also)

    return out.fill_by(rt, cast)


def backward(rt, dact, hidden, code, out):
    """Fills `out` with the gradient of `hidden`, as forward's; dact: the Matrix of the gradient of forward's result."""
    z, more = _input(hidden)

    def cast(target, rounded):
        options = *dact.shape, code, FP8[out.quantizer.dtype], rounded
        swiglu.dswiglu_cast_transpose(rt.te, rt.stream, dact.memory.data_ptr(), z, target, *options, more)

    return out.fill_by(rt, cast)


def forward_plain(rt, hidden, code, out, store=None):
    """Fills `out`, a Matrix; the rest as `forward`."""
    z, more = _input(hidden, store)
    more = more._replace(plain=out.memory.data_ptr())
    swiglu.swiglu_cast_transpose(rt.te, rt.stream, z, _NO_FP8, *out.shape, code, DType.FLOAT8_E4M3, more=more)


def backward_plain(rt, dact, hidden, code, out, again=None):
    """Fills `out`, a Matrix; the rest as `backward`. again: a Matrix for what `forward_plain` gives, or None."""
    z, more = _input(hidden)
    more = more._replace(plain=out.memory.data_ptr(), again=0 if again is None else again.memory.data_ptr())
    options = *dact.shape, code, DType.FLOAT8_E4M3
    swiglu.dswiglu_cast_transpose(rt.te, rt.stream, dact.memory.data_ptr(), z, _NO_FP8, *options, more=more)


def _input(hidden, store=None):
    """(the address of what is read in 16 bits, 0 for a StoredInput, More)."""
    if isinstance(hidden, StoredInput):
        return 0, More(stored=hidden.memory.data_ptr())
    return hidden.memory.data_ptr(), More(stored=0 if store is None else store.memory.data_ptr())
