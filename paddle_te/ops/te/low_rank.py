"""The low-rank product beside a GEMM, as a part of `linear`'s Op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paddle import Tensor

from paddle_te.native import low_rank as kernels
from paddle_te.native.low_rank import Part, Sizes
from paddle_te.ops.low_rank import LowRankUpdate
from paddle_te.ops.te.recording import Placeholder, RecordedRanks, Recorder
from paddle_te.ops.te.runtime import Matrix, Memory, check_tensor


class LowRankSettings(NamedTuple):
    """Hold what a `paddle_te.ops.low_rank.LowRankUpdate` has besides tensors."""

    sizes: tuple[int, ...]
    scaling: float

    @classmethod
    def of(cls, low_rank: LowRankUpdate) -> LowRankSettings:
        return cls(tuple(low_rank.sizes), low_rank.scaling)


def factors_and_settings(
    *low_ranks: LowRankUpdate | None,
) -> tuple[list[Tensor | None], list[LowRankSettings | None]]:
    """Return (each one's A and then its B, the settings of each) for an op with the products of several."""
    factors: list[Tensor | None] = []
    settings: list[LowRankSettings | None] = []
    for low_rank in low_ranks:
        factors += () if low_rank is None else (*low_rank.a, *low_rank.b)
        settings.append(None if low_rank is None else LowRankSettings.of(low_rank))
    return factors, settings


@dataclass(slots=True)
class LowRankProduct:
    """Compute scaling · x · A · B of all parts in two GEMMs, forward and backward: see `kernels.pack`.

    x: [..., inputs] of this rank. factors: Placeholders of the parts' A, then of their B, None for parts without.
    a, b: the two matrices. z: x · A as B's GEMM reads it. column, row: the ranks, if the GEMM is parallel that way.
    """

    x: Placeholder
    factors: Sequence[Placeholder | None]
    settings: LowRankSettings
    code: int
    sizes: Sizes
    a: Matrix
    b: Matrix
    z: Matrix
    column: RecordedRanks | None
    row: RecordedRanks | None

    @classmethod
    def forward(
        cls,
        rt: Recorder,
        x: Placeholder,
        factors: Sequence[Placeholder | None],
        settings: LowRankSettings,
        outputs: int,
        code: int,
        column: RecordedRanks | None,
        row: RecordedRanks | None,
    ) -> LowRankProduct:
        """Compute the product, of which `add_to` remains. outputs: columns of this rank's output."""
        matrix, sizes = rt.matrix(x, code), _sizes(factors, settings, x, outputs)
        a = rt.new_matrix((sizes.inputs, sizes.width), x.dtype, code)
        b = rt.new_matrix((sizes.width, outputs), x.dtype, code)
        z = rt.new_matrix((matrix.shape[0], sizes.width), x.dtype, code)
        product = cls(x, factors, settings, code, sizes, a, b, z, column, row)
        kernels.pack(rt.te, rt.stream, product._parts(factors), *product._packed(a, b), settings.scaling, code)
        rt.te.gemm(a.native, matrix.native, z.native, False, False, rt.stream)
        if column is not None and column.sequence_parallel:
            product.z = rt.matrix(column.all_gather(z.memory), code)
        elif row is not None:
            product.z = rt.matrix(row.reduce_output(z.memory), code)
        return product

    def add_to(self, rt: Recorder, out: Placeholder) -> None:
        """Add the product to out, a tensor."""
        whole = rt.matrix(out, self.code)
        rt.te.gemm(self.b.native, self.z.native, whole.native, False, False, rt.stream, True)

    def input_gradient(
        self, rt: Recorder, dy: Memory, dx: Memory | None = None, accumulate: bool = False
    ) -> tuple[Matrix, Matrix]:
        """Return (dB as `kernels.pack` has B, the gradient of x · A), for `factor_gradients`, from the output's.

        dx: a tensor for x's, which it becomes or, with accumulate, to which it is added; None: it is not wanted.
        """
        sizes, dtype, code, te, stream = self.sizes, self.x.dtype, self.code, rt.te, rt.stream
        grad, db = rt.matrix(dy, code), rt.new_matrix(self.b.shape, dtype, code)
        te.gemm(grad.native, self.z.native, db.native, False, True, stream)
        dz = rt.new_matrix((grad.shape[0], sizes.width), dtype, code)
        te.gemm(self.b.native, grad.native, dz.native, True, False, stream)
        if self.column is not None:
            dz = rt.matrix(self.column.reduce_output(dz.memory), code)
        elif self.row is not None and self.row.sequence_parallel:
            dz = rt.matrix(self.row.all_gather(dz.memory), code)
        if dx is not None:
            te.gemm(self.a.native, dz.native, rt.matrix(dx, code).native, True, False, stream, accumulate)
        return db, dz

    def factor_gradients(
        self, rt: Recorder, db: Matrix, dz: Matrix, x: Memory | None = None
    ) -> list[Placeholder | None]:
        """Return the gradients of the factors, in their order, from what `input_gradient` has given.

        x: replaces forward's x where backward has computed it again.
        """
        dtype, code, te, stream = self.x.dtype, self.code, rt.te, rt.stream
        matrix, da = rt.matrix(self.x if x is None else x, code), rt.new_matrix(self.a.shape, dtype, code)
        te.gemm(dz.native, matrix.native, da.native, False, True, stream)
        gradients = [
            None if factor is None or factor.stop_gradient else rt.empty(factor.shape, dtype) for factor in self.factors
        ]
        kernels.unpack(te, stream, self._parts(gradients), *self._packed(da, db), self.settings.scaling, code)
        return gradients

    def _parts(self, tensors: Sequence[Placeholder | None]) -> list[Part]:
        """Return a Part for those that are there, with the addresses of their `tensors`."""
        count, parts, start = len(self.settings.sizes), [], 0
        for a, b, size, there in zip(
            tensors[:count], tensors[count:], self.settings.sizes, self.factors[:count], strict=True
        ):
            if there is not None:
                at_a, at_b = (0 if tensor is None else tensor.data_ptr() for tensor in (a, b))
                parts.append(Part(at_a, at_b, start, size))
            start += size
        return parts

    def _packed(self, a: Matrix, b: Matrix) -> tuple[int, int, Sizes]:
        return a.memory.data_ptr(), b.memory.data_ptr(), self.sizes


def _sizes(factors: Sequence[Placeholder | None], settings: LowRankSettings, x: Placeholder, outputs: int) -> Sizes:
    """Return the Sizes. Raises TypeError or ValueError for factors that do not fit."""
    count = len(settings.sizes)
    if sum(settings.sizes) != outputs:
        raise ValueError(f"low rank: the parts' sizes are {settings.sizes}; their sum must be {outputs}")
    if len(factors) != 2 * count:
        raise ValueError(f"low rank: there are {len(factors)} factors; {count} parts have two each, or None")
    of_each = zip(factors[:count], factors[count:], settings.sizes, strict=True)
    there = [(a, b, size) for a, b, size in of_each if a is not None and b is not None]
    if not 0 < len(there) <= kernels.PARTS:
        raise ValueError(f"low rank: {len(there)} parts have factors; it must be one to {kernels.PARTS}")
    r = there[0][0].shape[1]
    for a, b, size in there:
        check_tensor("A of a low-rank product", a, [x.shape[-1], r], x.dtype)
        check_tensor("B of a low-rank product", b, [r, size], x.dtype)
    return Sizes.of(x.shape[-1], outputs, r, len(there))
