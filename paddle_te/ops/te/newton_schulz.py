"""Newton–Schulz by Transformer Engine's GEMMs, whose alpha and beta have the polynomial's coefficients.

A step makes a·(I + P)·X of X, with P = (b·A + c·A²) / a and A = X·Xᵀ; A is then a²·(I + P)²·A. So where X has many
more columns than rows, the first steps compute with matrices of A's size only, and X is multiplied once, by their
product I + R: "Gram Newton–Schulz" (Zhang et al., Dao AI Lab). All these matrices are symmetric and commute. P and R
are kept instead of I + P and I + R, whose identity bfloat16 would round. Once singular values are near 1, what A's own
rounding errors make of them shows, so that the last steps compute A from X.

Three ways lead to the products, and `native.newton_schulz` says which is taken. Those of many small matrices are one
grouped GEMM. Of large ones only block rows on and above the diagonal are computed. Otherwise each product is a GEMM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import paddle
from paddle import Tensor

from paddle_te.native import addition
from paddle_te.native import newton_schulz as kernels
from paddle_te.ops.newton_schulz import CUBIC, LEAST_NORM, LINEAR, QUINTIC, joined
from paddle_te.ops.te import grouped_gemms, runtime
from paddle_te.ops.te.runtime import Runtime, dtype_code

ITEM = 2  # bytes of an element


def newton_schulz(matrices: Sequence[Tensor], steps: int, factor: float) -> Tensor:
    """See `Ops.newton_schulz`. Matrices of one shape share their buffers."""
    with paddle.no_grad():
        rt, code = runtime.current(), dtype_code("a matrix of Newton-Schulz", matrices[0])
        return _all_steps(rt, code, _normalized(rt, code, matrices), steps, factor)


def _normalized(rt: Runtime, code: int, matrices: Sequence[Tensor]) -> Tensor:
    """Return the matrices divided by their Frobenius norms: [n, rows, columns]."""
    x = joined(matrices)
    count, rows, columns = x.shape
    sums = rt.empty([count, kernels.parts_of(rows * columns)], paddle.float32)
    addresses = x.data_ptr(), sums.data_ptr()
    kernels.divide_by_norms(rt.te, rt.stream, *addresses, count, rows * columns, LEAST_NORM, code)
    return x


def _way(rt: Runtime, code: int, count: int, rows: int, columns: int) -> _Singly:
    """Return the way for so many matrices."""
    if (blocks := kernels.blocks_of(rows, columns)) > 1:
        return _Symmetric(rt, code, blocks, rows > columns)
    if kernels.is_grouped(count, rows, columns) and grouped_gemms.has_grouped_gemms(rt):
        return _Grouped(rt, code, count, rows, columns)
    return _Singly(rt, code)


def _all_steps(rt: Runtime, code: int, x: Tensor, steps: int, factor: float) -> Tensor:
    way, first = _way(rt, code, *x.shape), min(steps, kernels.first_steps(x.shape[1], x.shape[2]))
    at_once = [first] + [1] * (steps - first)
    x = way.begin(x)
    for number, count in enumerate(at_once, 1):
        x = _steps(way, x, count, factor if number == len(at_once) else 1.0)
    return way.end(x)


def _steps(way: _Singly, x: Tensor, steps: int, factor: float) -> Tensor:
    """Return factor times what steps make of x, which is read before the first and multiplied after the last."""
    gram = way.gram(x)
    for step in range(steps):
        polynomial = way.product(gram, gram, gram, QUINTIC / LINEAR, CUBIC / LINEAR)
        if step == 0:
            whole = polynomial
        else:
            whole = way.product(polynomial, whole, way.sum(polynomial, whole), 1.0, 1.0)
        if step < steps - 1:
            half = way.product(polynomial, gram, gram, 1.0, 1.0)
            gram = way.product(polynomial, half, half, LINEAR**2, LINEAR**2)
    return way.applied(whole, x, factor * LINEAR**steps)


class _Square(NamedTuple):
    """Symmetric matrices [n, small, small].

    whole: of which products are made. added: to which they are added; the same, or block rows of it.
    """

    whole: Tensor
    added: Tensor


class _Singly:
    """A GEMM for each product of each matrix. GEMMs add to what is there, so it is copied first."""

    def __init__(self, rt: Runtime, code: int) -> None:
        self.rt, self.code = rt, code

    def begin(self, x: Tensor) -> Tensor:
        """Return matrices [n, rows, columns] as the other methods take them."""
        return x

    def end(self, x: Tensor) -> Tensor:
        """Return what `begin` has changed as it was."""
        return x

    def gram(self, x: Tensor) -> _Square:
        """Return X·Xᵀ, or Xᵀ·X of matrices with more rows than columns."""
        count, rows, columns = x.shape
        wide, small = rows <= columns, min(rows, columns)
        gram = self.rt.empty([count, small, small], x.dtype)
        self._set_gram(x, gram, (wide, not wide))
        return _Square(gram, gram)

    def product(self, left: _Square, right: _Square, added: _Square, alpha: float, beta: float) -> _Square:
        """Return alpha · left · right + beta · added; the two commute."""
        result = self._multiplied(left.whole, right.whole, added.added, alpha, beta)
        return _Square(result, result)

    def sum(self, first: _Square, second: _Square) -> _Square:
        """Return the sum, which is only added to a product."""
        result, rt = first.added.clone(), self.rt
        addresses = result.data_ptr(), second.added.data_ptr()
        addition.add_to(rt.te, rt.stream, *addresses, int(result.size), self.code)
        return _Square(result, result)

    def applied(self, square: _Square, x: Tensor, factor: float) -> Tensor:
        """Return factor · (square + I) · X, or of more rows than columns factor · X · (square + I)."""
        operands = (square.whole, x) if x.shape[1] <= x.shape[2] else (x, square.whole)
        return self._multiplied(*operands, x, factor, factor)

    def _set_gram(self, x: Tensor, gram: Tensor, transposed: tuple[bool, bool]) -> None:
        """Set each matrix of gram to op(x) · op(x), op by BLAS's rule."""
        for of_x, of_gram in zip(self._each(x), self._each(gram), strict=True):
            self.rt.te.gemm(of_x, of_x, of_gram, *transposed, self.rt.stream)

    def _multiplied(self, left: Tensor, right: Tensor, added: Tensor, alpha: float, beta: float) -> Tensor:
        result, rt = added.clone(), self.rt
        for of_left, of_right, out in zip(*map(self._each, (left, right, result)), strict=True):
            rt.te.gemm(of_right, of_left, out, False, False, rt.stream, True, alpha=alpha, beta=beta)
        return result

    def _each(self, stacked: Tensor) -> Iterator[Any]:
        """Yield the native tensors of [n, rows, columns]."""
        _, rows, columns = stacked.shape
        return (self.rt.tensor(address, (rows, columns), self.code) for address in _addresses(stacked))


class _Grouped(_Singly):
    """One GEMM for the products of all matrices, by the grouped GEMMs of experts, which add what lies elsewhere."""

    def __init__(self, rt: Runtime, code: int, count: int, rows: int, columns: int) -> None:
        super().__init__(rt, code)
        sizes = {(rows, columns), (min(rows, columns),) * 2}
        self._count = count
        self._begins = {size: paddle.arange(count + 1, dtype="int64") * (size[0] * size[1]) for size in sizes}
        self._rows = {size: paddle.full([count], size[0], "int64") for size in sizes}

    def _set_gram(self, x: Tensor, gram: Tensor, transposed: tuple[bool, bool]) -> None:
        self._gemm(x, x, gram, transposed, grouped_gemms.factors())

    def _multiplied(self, left: Tensor, right: Tensor, added: Tensor, alpha: float, beta: float) -> Tensor:
        result = self.rt.empty(added.shape, added.dtype)
        self._gemm(right, left, result, (False, False), grouped_gemms.factors(alpha, beta), added)
        return result

    def _gemm(
        self, a: Tensor, b: Tensor, d: Tensor, transposed: tuple[bool, bool], factors: int, added: Tensor | None = None
    ) -> None:
        """Set each matrix of d to op(b) · op(a), op by BLAS's rule, and `added`; see te.grouped_gemm."""
        counts = self._rows[b.shape[1], b.shape[2]].data_ptr()
        offsets = [self._begins[tensor.shape[1], tensor.shape[2]].data_ptr() for tensor in (a, b, d)]
        given = *transposed, self._count, counts, *offsets, factors, self.rt.stream
        natives = map(self._native, (a, b, d))
        self.rt.te.grouped_gemm(*natives, *given, C=None if added is None else self._native(added))

    def _native(self, stacked: Tensor) -> Any:
        count, rows, columns = stacked.shape
        return self.rt.view(stacked, (count * rows, columns), self.code)


class _Symmetric(_Singly):
    """GEMMs for the block rows on and above the diagonal, left_i · (right_i ...)ᵀ, which a kernel mirrors.

    Matrices with more rows than columns are transposed, for only block rows lie in one piece. blocks: how many. tall:
    whether there are more rows than columns.
    """

    def __init__(self, rt: Runtime, code: int, blocks: int, tall: bool) -> None:
        super().__init__(rt, code)
        self._blocks, self._tall = blocks, tall

    def begin(self, x: Tensor) -> Tensor:
        """Return the matrices with no more rows than columns."""
        return self._transposed(x) if self._tall else x

    def end(self, x: Tensor) -> Tensor:
        """Return the matrices as they were given: transposing again undoes `begin`."""
        return self.begin(x)

    def gram(self, x: Tensor) -> _Square:
        """Return X·Xᵀ."""
        count, small, _ = x.shape
        begin, width = kernels.upper_rows(small, small // self._blocks)[-1]
        upper = self.rt.empty([count, 1, begin + width * width], x.dtype)
        return self._mirrored(x, x, upper, False, 1.0, 1.0)

    def product(self, left: _Square, right: _Square, added: _Square, alpha: float, beta: float) -> _Square:
        """Return alpha · left · right + beta · added."""
        return self._mirrored(left.whole, right.whole, added.added.clone(), True, alpha, beta)

    def _mirrored(
        self, left: Tensor, right: Tensor, upper: Tensor, accumulate: bool, alpha: float, beta: float
    ) -> _Square:
        """Return alpha · left · rightᵀ, with `accumulate` added to beta · upper. upper: the block rows, written."""
        rt, (count, small, columns) = self.rt, left.shape
        height, whole = small // self._blocks, rt.empty([count, small, small], left.dtype)
        for of_left, of_right, of_upper, out in zip(*map(_addresses, (left, right, upper, whole)), strict=True):
            for begin, width in kernels.upper_rows(small, height):
                first = ITEM * (small - width) * columns
                operands = (
                    rt.tensor(of_right + first, (width, columns), self.code),
                    rt.tensor(of_left + first, (height, columns), self.code),
                    rt.tensor(of_upper + ITEM * begin, (height, width), self.code),
                )
                rt.te.gemm(*operands, True, False, rt.stream, accumulate, alpha=alpha, beta=beta)
            kernels.mirror(rt.te, rt.stream, of_upper, out, small, height, self.code)
        return _Square(whole, upper)

    def _transposed(self, x: Tensor) -> Tensor:
        count, rows, columns = x.shape
        out = self.rt.empty([count, columns, rows], x.dtype)
        for source, target in zip(_addresses(x), _addresses(out), strict=True):
            kernels.transpose(self.rt.te, self.rt.stream, source, target, rows, columns, self.code)
        return out


def _addresses(stacked: Tensor) -> list[int]:
    """Return where each matrix of [n, rows, columns] lies."""
    count, rows, columns = stacked.shape
    return [stacked.data_ptr() + number * rows * columns * ITEM for number in range(count)]
