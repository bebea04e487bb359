"""Compute SwiGLU and its gradient in fp8, with the transposed copy, in one kernel (kernels/swiglu.cu).

Addresses and sizes are as in `casts`, matrices row-major. z: [rows, 2 cols], gate and up beside each other. The results
have the bits of TE's functions on GPUs before Blackwell, where TE computes the sigmoid in another way.
"""

from __future__ import annotations

from typing import NamedTuple

from paddle_te.native import casts
from paddle_te.native.casts import CastKernel, CastTarget, Form, Tiling
from paddle_te.native.interface import Shim, Stream

NAMES = {"SwiGLU": "swiglu_cast_transpose", "DSwiGLU": "dswiglu_cast_transpose"}  # of the kernels, by their function
TILINGS = {"SwiGLU": Tiling(128, 8, 4), "DSwiGLU": Tiling(128, 8, 3)}


class More(NamedTuple):
    """What a kernel also writes, or reads instead of z: addresses, 0 for what is not there.

    stored: z in MXFP8, as `mxfp8` has it, of a 16-bit dtype and a multiple of mxfp8.BLOCK cols; without z it is read,
    and beside z written. plain: the results in dtype, instead of fp8 or beside it. again: where
    `dswiglu_cast_transpose` writes swiglu_cast_transpose's y, in dtype.
    """

    stored: int = 0
    plain: int = 0
    again: int = 0

    def defines(self, z: int) -> dict[str, str | int]:
        """Return the macros that the kernel is compiled with for it."""
        stored = (1 if z else 2) if self.stored else 0
        return dict(STORED=stored, PLAIN=int(self.plain != 0), AGAIN=int(self.again != 0))


NOTHING_MORE = More()


def swiglu_cast_transpose(
    te: Shim,
    stream: Stream,
    z: int,
    target: CastTarget,
    shape: tuple[int, int],
    form: Form,
    more: More = NOTHING_MORE,
) -> None:
    """Write y = silu(gate) · up, of `shape` [rows, cols], cast to fp8 with its transposed copy."""
    _launch(te, stream, "SwiGLU", (0, z), target, shape, form, more)


def dswiglu_cast_transpose(
    te: Shim,
    stream: Stream,
    dy: int,
    z: int,
    target: CastTarget,
    shape: tuple[int, int],
    form: Form,
    more: More = NOTHING_MORE,
) -> None:
    """Write the gradient of z, [rows, 2 cols], from dy of `shape`; the rest as `swiglu_cast_transpose`."""
    _launch(te, stream, "DSwiGLU", (dy, z), target, shape, form, more)


def _launch(
    te: Shim,
    stream: Stream,
    function: str,
    read: tuple[int, int],
    target: CastTarget,
    shape: tuple[int, int],
    form: Form,
    more: More,
) -> None:
    """Run the kernel of a function. read: dy, 0 where it has none, and z."""
    defines = {"FUNCTION": function} | more.defines(read[1]) | target.defines
    cast = CastKernel(NAMES[function], "swiglu.cu", form, TILINGS[function], defines)
    arguments = *read, more.stored, more.again, more.plain, *target.arguments, *shape
    casts.launch(te, stream, cast, [shape], arguments)
