"""SwiGLU and its gradient in fp8, with the transposed copy, in one kernel (kernels/swiglu.cu).

Addresses and sizes are as in `casts`, matrices row-major. z: [rows, 2 cols], gate and up beside each other. The results
have the bits of TE's functions on GPUs before Blackwell, where TE computes the sigmoid in another way.
"""

from typing import NamedTuple

from paddle_te.native import casts
from paddle_te.native.casts import Form, Tiling

NAMES = {"SwiGLU": "swiglu_cast_transpose", "DSwiGLU": "dswiglu_cast_transpose"}  # of the kernels, by their function
TILINGS = {"SwiGLU": Tiling(128, 8, 4), "DSwiGLU": Tiling(128, 8, 3)}


class More(NamedTuple):
    """What a kernel also writes, or reads in z's place: addresses, 0 for what is not there.

    stored: z in MXFP8, as `mxfp8` has it, of a 16-bit dtype and a multiple of mxfp8.BLOCK cols; without z it is read,
    and beside z written. plain: the results in dtype, in the place of fp8 or beside it. again: what
    `dswiglu_cast_transpose` writes swiglu_cast_transpose's y to, in dtype.
    """

    stored: int = 0
    plain: int = 0
    again: int = 0

    def defines(self, z):
        """What the kernel is compiled with for it."""
        stored = (1 if z else 2) if self.stored else 0
        return dict(STORED=stored, PLAIN=int(self.plain != 0), AGAIN=int(self.again != 0))


def swiglu_cast_transpose(te, stream, z, target, rows, cols, dtype, float8, rounded=False, more=None):
    """y = silu(gate) · up, [rows, cols], cast to fp8 with its transposed copy. target: a CastTarget. dtype, float8,
    rounded: a Form's."""
    _launch(te, stream, "SwiGLU", 0, z, target, rows, cols, Form(dtype, float8, rounded), more or More())


def dswiglu_cast_transpose(te, stream, dy, z, target, rows, cols, dtype, float8, rounded=False, more=None):
    """The gradient of z, [rows, 2 cols], from dy [rows, cols]; the rest as `swiglu_cast_transpose`."""
    _launch(te, stream, "DSwiGLU", dy, z, target, rows, cols, Form(dtype, float8, rounded), more or More())


def _launch(te, stream, function, dy, z, target, rows, cols, form, more):
    arguments = dy, z, more.stored, more.again, more.plain, *target, rows, cols
    kernel = NAMES[function], "swiglu.cu", form, TILINGS[function]
    casts.launch(te, stream, *kernel, [(rows, cols)], arguments, FUNCTION=function, **more.defines(z))
