"""Low-rank products beside grouped GEMMs, in 16 bits: see `paddle_te.ops.moe.GroupedLowRank`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import paddle

from paddle_te.native import experts
from paddle_te.ops.te.recording import Placeholder, Recorder
from paddle_te.ops.te.runtime import Matrix, check_tensor

if TYPE_CHECKING:
    from paddle_te.ops.te.grouped_gemms import Group

_MULTIPLE = 8  # what divides the columns of 16-bit grouped GEMMs


class Factors(NamedTuple):
    """The tensors a [E, width, in] and b [E, out, width]."""

    a: Placeholder
    b: Placeholder

    @property
    def width(self) -> int:
        """Return the columns between the factors."""
        return int(self.a.shape[1])


class Gradients(NamedTuple):
    """The gradients of a and b."""

    a: Placeholder | None = None
    b: Placeholder | None = None


def factors(name: str, a: Placeholder | None, b: Placeholder | None, weight: Placeholder) -> Factors | None:
    """Return the Factors beside a weight [E, out, in], or None. Raises TypeError or ValueError for others."""
    if a is None or b is None:
        return None
    (count, out, in_), width = weight.shape, a.shape[1]
    check_tensor(f"A beside {name}", a, [count, width, in_], a.dtype)
    check_tensor(f"B beside {name}", b, [count, out, width], a.dtype)
    if width % _MULTIPLE:
        raise ValueError(
            f"backend transformer_engine: LoRA on experts has {width} columns between A and B of {name}; its rank must "
            f"make them a multiple of {_MULTIPLE}"
        )
    return Factors(a, b)


def find_begins(rt: Recorder, group: Group, first: Factors | None, second: Factors | None) -> None:
    """Give the Group where the experts' rows begin in matrices of as many columns as the factors have between them."""
    widths = [found.width for found in (first, second) if found is not None]
    if not widths:
        return
    size = 8 * (group.experts + 1)
    address = rt.empty([2 * size], paddle.uint8).data_ptr()
    begins = address, address + size
    experts.offsets(rt.te, rt.stream, group.counts, *begins, group.experts, widths[0], widths[-1])
    group.begins.update({widths[0]: begins[0], widths[-1]: begins[1]})


def add(rt: Recorder, group: Group, rows: Matrix, found: Factors | None, out: Matrix, code: int) -> Matrix | None:
    """Add rows · aᵀ · bᵀ to out, and return rows · aᵀ for the gradients."""
    if found is None:
        return None
    z = rt.new_matrix((group.rows, found.width), found.a.dtype, code)
    group.forward(rt, rows, rt.matrix(found.a, code), z)
    group.forward(rt, z, rt.matrix(found.b, code), out, accumulate=True)
    return z


def gradients(
    rt: Recorder, group: Group, z: Matrix, rows: Matrix, found: Factors, dout: Matrix, dx: Matrix | None, code: int
) -> Gradients:
    """Return the Gradients from the output's, of rows; dx: that of `rows`, to which theirs is added, or None."""
    db = group.wgrad(rt, z, dout, found.b)
    dz = rt.new_matrix((group.rows, found.width), found.a.dtype, code)
    group.dgrad(rt, dout, rt.matrix(found.b, code), dz)
    if dx is not None:
        group.dgrad(rt, dz, rt.matrix(found.a, code), dx, accumulate=True)
    return Gradients(group.wgrad(rt, rows, dz, found.a), db)
