"""Multiply rows that sequence-parallel ranks exchange: a rank's own while others are on their way.

`gemm._column_backward` says in which order the GPU starts collective and GEMM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from paddle_te.native import addition
from paddle_te.ops.te.quantized import Float8Matrix, Operand
from paddle_te.ops.te.recording import Placeholder, RecordedRanks, Recorder
from paddle_te.ops.te.runtime import Matrix

MULTIPLE = 16  # rows of an fp8 GEMM; in 16 bits, too, parts then begin at multiples of 16 bytes


class Rows(NamedTuple):
    """Rows one behind the other."""

    first: int
    count: int  # type: ignore[assignment]  # in the place of tuple.count


Multiply: TypeAlias = Callable[[Operand, Matrix], None]  # a GEMM of some rows: of its operand, into its output


class Product(NamedTuple):
    """A GEMM and its output of all rows."""

    multiply: Multiply
    out: Matrix

    def of(self, operand: Operand) -> None:
        """Multiply all rows."""
        self.multiply(operand, self.out)


class RankRows(NamedTuple):
    """Say which of all ranks' rows are a rank's own and which the others', in one or two pieces."""

    own: Rows
    others: tuple[Rows, ...]

    @classmethod
    def of(cls, tp: RecordedRanks, count: int) -> RankRows:
        """count: of each rank."""
        before, behind = tp.rank * count, (tp.size - 1 - tp.rank) * count
        pieces = Rows(0, before), Rows(before + count, behind)
        return cls(Rows(before, count), tuple([piece for piece in pieces if piece.count]))


def to_gather(rows: Operand) -> Placeholder:
    """Return the memory of a rank's rows that is gathered."""
    return rows.rowwise if isinstance(rows, Float8Matrix) else rows.memory


def gathered(rt: Recorder, rows: Operand, whole: Placeholder) -> Operand:
    """Return all ranks' rows, without a transpose. whole: what was gathered of `rows`."""
    if isinstance(rows, Float8Matrix):
        return rows.gathered(rt, whole, columnwise=False)
    return rt.matrix(whole, rows.native.dtype)


def multiply_while_gathering(rt: Recorder, rows: Operand, tp: RecordedRanks, product: Product | None) -> Operand:
    """Multiply this rank's `rows`, and the other ranks' once they have come; return the rows of all.

    product: of all rows; None where they are only gathered.
    """
    if product is None or rows.shape[0] % MULTIPLE:
        whole = gathered(rt, rows, tp.all_gather(to_gather(rows)))
        if product:
            product.of(whole)
        return whole
    gathering, (own, others) = tp.start_all_gather(to_gather(rows)), RankRows.of(tp, rows.shape[0])
    product.multiply(rows, product.out.rows(rt, *own))
    whole = gathered(rt, rows, tp.finish(gathering))
    for piece in others:
        product.multiply(whole.rows(rt, *piece), product.out.rows(rt, *piece))
    return whole


def multiply_while_sending(rt: Recorder, x: Operand, tp: RecordedRanks, product: Product) -> Placeholder:
    """Sum a product over the ranks; return this rank's rows of the sum, a tensor.

    x: the operand's rows for all ranks. The other ranks' are multiplied first, and sent while the rank multiplies its
    own. product: its output is of the rank's own rows, and is returned unless rows cannot be multiplied apart.
    """
    out, (n, cols), code = product.out.memory, product.out.shape, product.out.native.dtype
    if not x.has_rows or n % MULTIPLE:
        whole = rt.empty(tp.gathered_shape(out.shape), out.dtype)
        product.multiply(x, rt.matrix(whole, code))
        return tp.reduce_output(whole)
    own, others = RankRows.of(tp, n)
    sent, first = rt.new_matrix(((tp.size - 1) * n, cols), out.dtype, code), 0
    for piece in others:
        product.multiply(x.rows(rt, *piece), sent.rows(rt, first, piece.count))
        first += piece.count
    sending = tp.start_exchange(sent.memory)
    product.multiply(x.rows(rt, *own), product.out)
    received = tp.finish(sending)
    for first in range(0, (tp.size - 1) * n, n):
        addition.add_to(rt.te, rt.stream, out.data_ptr(), received.rows(first, n).data_ptr(), n * cols, code)
    return out
