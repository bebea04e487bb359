"""SwiGLU and its gradient in fp8, with the transposed copy, in one kernel (kernels/swiglu.cu).

Addresses and sizes are as in `casts`, matrices row-major. z: [rows, 2 cols], gate and up beside each other. The results
have the bits of TE's functions on GPUs before Blackwell, where TE computes the sigmoid in another way.
"""

from paddle_te.native import casts
from paddle_te.native.casts import Form, Tiling

NAMES = {"SwiGLU": "swiglu_cast_transpose", "DSwiGLU": "dswiglu_cast_transpose"}  # of the kernels, by their function
TILINGS = {"SwiGLU": Tiling(128, 8, 4), "DSwiGLU": Tiling(128, 8, 3)}


def swiglu_cast_transpose(te, stream, z, target, rows, cols, dtype, float8, rounded=False):
    """y = silu(gate) · up, [rows, cols], cast to fp8 with its transposed copy. target: a CastTarget. dtype, float8,
    rounded: a Form's."""
    _launch(te, stream, "SwiGLU", 0, z, target, rows, cols, Form(dtype, float8, rounded))


def dswiglu_cast_transpose(te, stream, dy, z, target, rows, cols, dtype, float8, rounded=False):
    """The gradient of z, [rows, 2 cols], from dy [rows, cols]; the rest as `swiglu_cast_transpose`."""
    _launch(te, stream, "DSwiGLU", dy, z, target, rows, cols, Form(dtype, float8, rounded))


def _launch(te, stream, function, dy, z, target, rows, cols, form):
    arguments = dy, z, *target, rows, cols
    kernel = NAMES[function], "swiglu.cu", form, TILINGS[function]
    casts.launch(te, stream, *kernel, (rows, cols), arguments, FUNCTION=function)
