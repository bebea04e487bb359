"""Binding of Transformer Engine 2.20's C library. Knows neither Paddle nor NumPy.

    te = native.load()                                     # or BackendUnavailable, listing every problem and remedy
    stream = te.Stream(raw_stream, allocate)               # with the scratch memory of that stream
    x = te.Tensor(address, (tokens, hidden), DType.BFLOAT16)
    te.gemm(weight, x, y, True, False, stream)             # TransformerEngineError with TE's message and the tensors

`te` is the extension module `_shim` (shim.cpp): its docstrings say what each entry point computes.
"""

from paddle_te.native.errors import BackendUnavailable, Problem, TransformerEngineError
from paddle_te.native.library import diagnose, load, report
from paddle_te.native.types import DType, Mask, QKVLayout, ScalingMode

__all__ = [
    "BackendUnavailable",
    "DType",
    "Mask",
    "Problem",
    "QKVLayout",
    "ScalingMode",
    "TransformerEngineError",
    "diagnose",
    "load",
    "report",
]
