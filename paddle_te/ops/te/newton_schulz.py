"""Newton–Schulz by Transformer Engine's GEMMs, whose alpha and beta have the polynomial's coefficients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import paddle
from paddle import Tensor

from paddle_te.ops.newton_schulz import CUBIC, LINEAR, QUINTIC, normalized
from paddle_te.ops.te import runtime
from paddle_te.ops.te.runtime import Runtime, dtype_code


def newton_schulz(matrices: Sequence[Tensor], steps: int, factor: float) -> Tensor:
    """See `Ops.newton_schulz`. Matrices of one shape share their buffers; each GEMM is of one of them."""
    with paddle.no_grad():
        rt, code = runtime.current(), dtype_code("a matrix of Newton-Schulz", matrices[0])
        x = normalized(matrices)
        for step in range(steps):
            x = _step(rt, x, code, factor if step == steps - 1 else 1.0)
        return x


def _step(rt: Runtime, x: Tensor, code: int, factor: float) -> Tensor:
    """Return factor times one step of matrices [n, out, in]. GEMMs add to what they read first, so it is copied."""
    count, rows, columns = x.shape
    wide, small = rows <= columns, min(rows, columns)
    gram = rt.empty([count, small, small], x.dtype)
    for of_x, of_gram in zip(_each(rt, x, code), _each(rt, gram, code), strict=True):
        rt.te.gemm(of_x, of_x, of_gram, wide, not wide, rt.stream)
    polynomial = gram.clone()
    for of_gram, out in zip(_each(rt, gram, code), _each(rt, polynomial, code), strict=True):
        rt.te.gemm(of_gram, of_gram, out, False, False, rt.stream, True, alpha=QUINTIC, beta=CUBIC)
    result = x.clone()
    for of_x, left, out in zip(*(_each(rt, t, code) for t in (x, polynomial, result)), strict=True):
        operands = (of_x, left) if wide else (left, of_x)
        rt.te.gemm(*operands, out, False, False, rt.stream, True, alpha=factor, beta=factor * LINEAR)
    return result


def _each(rt: Runtime, stacked: Tensor, code: int) -> Iterator[object]:
    """Yield the native tensors of the matrices of [n, rows, columns]."""
    count, rows, columns = stacked.shape
    address, size = stacked.data_ptr(), rows * columns * stacked.element_size()
    for number in range(count):
        yield rt.tensor(address + number * size, (rows, columns), code)
