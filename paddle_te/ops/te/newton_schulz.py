"""Newton–Schulz by Transformer Engine's GEMMs, whose alpha and beta have the polynomial's coefficients.

Three ways lead to a step's three products, and `kernel_choice` says which is taken. Many small matrices are one grouped
GEMM. Products that are symmetric are computed on and above the diagonal only where matrices are large. Otherwise each
product is a GEMM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle
from paddle import Tensor

from paddle_te.native import newton_schulz as kernels
from paddle_te.ops.newton_schulz import CUBIC, LINEAR, QUINTIC, normalized
from paddle_te.ops.te import experts, kernel_choice, runtime
from paddle_te.ops.te.runtime import Runtime, dtype_code

ITEM = 2  # bytes of an element


def newton_schulz(matrices: Sequence[Tensor], steps: int, factor: float) -> Tensor:
    """See `Ops.newton_schulz`. Matrices of one shape share their buffers."""
    with paddle.no_grad():
        rt, code = runtime.current(), dtype_code("a matrix of Newton-Schulz", matrices[0])
        x = normalized(matrices)
        count, rows, columns = x.shape
        if (blocks := kernel_choice.newton_schulz_blocks(rows, columns)) > 1:
            return _steps(_Symmetric(rt, code, blocks, rows > columns), x, steps, factor)
        if kernel_choice.groups_newton_schulz(count, rows, columns) and experts.has_grouped_gemms(rt):
            return _steps(_Grouped(rt, code, count, rows, columns), x, steps, factor)
        return _steps(_Singly(rt, code), x, steps, factor)


def _steps(products: _Singly | _Grouped, x: Tensor, steps: int, factor: float) -> Tensor:
    x = products.begin(x)
    for step in range(steps):
        x = products.multiplied(x, products.polynomial(x), factor if step == steps - 1 else 1.0)
    return products.end(x)


class _Singly:
    """A GEMM for each product of each matrix. GEMMs add to what they read first, so it is copied."""

    def __init__(self, rt: Runtime, code: int) -> None:
        self.rt, self.code = rt, code

    def begin(self, x: Tensor) -> Tensor:
        """Return matrices [n, rows, columns] as the products take them."""
        return x

    def end(self, x: Tensor) -> Tensor:
        """Return what `begin` has changed as it was."""
        return x

    def polynomial(self, x: Tensor) -> Tensor:
        """Return b·A + c·A² of each, where A is X·Xᵀ, or Xᵀ·X of matrices with more rows than columns."""
        count, rows, columns = x.shape
        rt, wide, small = self.rt, rows <= columns, min(rows, columns)
        gram = rt.empty([count, small, small], x.dtype)
        for of_x, of_gram in zip(self._each(x), self._each(gram), strict=True):
            rt.te.gemm(of_x, of_x, of_gram, wide, not wide, rt.stream)
        polynomial = gram.clone()
        for of_gram, out in zip(self._each(gram), self._each(polynomial), strict=True):
            rt.te.gemm(of_gram, of_gram, out, False, False, rt.stream, True, alpha=QUINTIC, beta=CUBIC)
        return polynomial

    def multiplied(self, x: Tensor, polynomial: Tensor, factor: float) -> Tensor:
        """Return factor times the sum of a·X and the polynomial's product with X."""
        result, wide, rt = x.clone(), x.shape[1] <= x.shape[2], self.rt
        for of_x, left, out in zip(*map(self._each, (x, polynomial, result)), strict=True):
            operands = (of_x, left) if wide else (left, of_x)
            rt.te.gemm(*operands, out, False, False, rt.stream, True, alpha=factor, beta=factor * LINEAR)
        return result

    def _each(self, stacked: Tensor) -> list[Any]:
        _, rows, columns = stacked.shape
        return [self.rt.tensor(address, (rows, columns), self.code) for address in _addresses(stacked)]


class _Grouped:
    """One GEMM for the products of all matrices, by the grouped GEMMs of experts, which add what lies elsewhere."""

    def __init__(self, rt: Runtime, code: int, count: int, rows: int, columns: int) -> None:
        self.rt, self.code, self.count, self.wide = rt, code, count, rows <= columns
        sizes = {(rows, columns), (min(rows, columns),) * 2}
        self._begins = {size: paddle.arange(count + 1, dtype="int64") * (size[0] * size[1]) for size in sizes}
        self._rows = {size: paddle.full([count], size[0], "int64") for size in sizes}

    def begin(self, x: Tensor) -> Tensor:
        """Return x."""
        return x

    def end(self, x: Tensor) -> Tensor:
        """Return x."""
        return x

    def polynomial(self, x: Tensor) -> Tensor:
        """Return b·A + c·A² of each."""
        small = min(x.shape[1:])
        gram, polynomial = (self.rt.empty([self.count, small, small], x.dtype) for _ in range(2))
        self._gemm(x, x, gram, self.wide, not self.wide)
        self._gemm(gram, gram, polynomial, False, False, gram, QUINTIC, CUBIC)
        return polynomial

    def multiplied(self, x: Tensor, polynomial: Tensor, factor: float) -> Tensor:
        """Return factor times the sum of a·X and the polynomial's product with X."""
        result = self.rt.empty(x.shape, x.dtype)
        operands = (x, polynomial) if self.wide else (polynomial, x)
        self._gemm(*operands, result, False, False, x, factor, factor * LINEAR)
        return result

    def _gemm(
        self,
        a: Tensor,
        b: Tensor,
        d: Tensor,
        transa: bool,
        transb: bool,
        added: Tensor | None = None,
        alpha: float = 1.0,
        beta: float = 0.0,
    ) -> None:
        """Set each matrix of d to alpha · op(b) · op(a) + beta · added, op by BLAS's rule; see te.grouped_gemm."""
        counts = self._rows[b.shape[1], b.shape[2]].data_ptr()
        offsets = [self._begins[tensor.shape[1], tensor.shape[2]].data_ptr() for tensor in (a, b, d)]
        given = transa, transb, self.count, counts, *offsets, experts.factors(alpha, beta), self.rt.stream
        natives = map(self._native, (a, b, d))
        self.rt.te.grouped_gemm(*natives, *given, C=None if added is None else self._native(added))

    def _native(self, stacked: Tensor) -> Any:
        count, rows, columns = stacked.shape
        return self.rt.view(stacked, (count * rows, columns), self.code)


class _Symmetric(_Singly):
    """GEMMs for the block rows of X·Xᵀ and of A² = A·Aᵀ from the diagonal on, which a kernel mirrors.

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
        """Return the matrices as they were given."""
        return self._transposed(x) if self._tall else x

    def polynomial(self, x: Tensor) -> Tensor:
        """Return b·A + c·A² of each, A = X·Xᵀ."""
        count, small, _ = x.shape
        height = small // self._blocks
        blocks = kernels.upper_rows(small, height)
        first, width = blocks[-1]
        upper = self.rt.empty([count, 1, first + height * width], x.dtype)
        gram = self.rt.empty([count, small, small], x.dtype)
        for of_x, of_upper, of_gram in zip(*map(_addresses, (x, upper, gram)), strict=True):
            mirror = of_upper, of_gram, small, height, self.code
            self._upper(of_x, x.shape[2], of_upper, small, blocks)
            kernels.mirror(self.rt.te, self.rt.stream, *mirror)
            self._upper(of_gram, small, of_upper, small, blocks, True, QUINTIC, CUBIC)
            kernels.mirror(self.rt.te, self.rt.stream, *mirror)
        return gram

    def _upper(
        self,
        x: int,
        columns: int,
        upper: int,
        small: int,
        blocks: Sequence[tuple[int, int]],
        accumulate: bool = False,
        alpha: float = 1.0,
        beta: float = 1.0,
    ) -> None:
        """Compute the block rows of x·xᵀ, x [small, columns], from the diagonal on. blocks: `upper_rows` of them."""
        rt, height = self.rt, small // len(blocks)
        for begin, width in blocks:
            rest = rt.tensor(x + ITEM * (small - width) * columns, (width, columns), self.code)
            rows = rt.tensor(x + ITEM * (small - width) * columns, (height, columns), self.code)
            out = rt.tensor(upper + ITEM * begin, (height, width), self.code)
            rt.te.gemm(rest, rows, out, True, False, rt.stream, accumulate, alpha=alpha, beta=beta)

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
