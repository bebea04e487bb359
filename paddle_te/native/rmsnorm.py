"""Compute RMSNorm in fp8 with the transposed copy, in two kernels.

One is of the rows' statistics (kernels/rmsnorm_statistics.cu), one of the norm and its cast (kernels/rmsnorm_cast.cu).
x is read twice, what is written is in fp8.

Addresses and sizes are as in `casts`. The results have the bits of TE's functions for hidden sizes for which these have
kernels of their own, see `takes`.
"""

from typing import NamedTuple

from paddle_te.native import casts
from paddle_te.native.casts import CastKernel, CastTarget, Form, Tiling
from paddle_te.native.interface import Shim, Stream
from paddle_te.native.kernels import ELEMENTS, float32_bits, kernel
from paddle_te.native.types import DType

# How many warps share a row in TE's kernel for a hidden size (REGISTER_NORM_LAUNCHER in rmsnorm_fwd_cuda_kernel.cu)
WARPS = {512: 1, 768: 1, 1024: 1, 2048: 1, 4096: 4, 8192: 4}
CAST_TILING = Tiling(128, 8, 6)
_WARPS_OF_BLOCK = 4


class RMSNorm(NamedTuple):
    """A norm of x [rows, hidden].

    x, gamma, rsigma: addresses. gamma: x's dtype, [hidden]; 1 + gamma with zero_centered. rsigma: float32 [rows].
    """

    x: int
    gamma: int
    rsigma: int
    rows: int
    hidden: int
    dtype: int
    epsilon: float
    zero_centered: bool


def takes(hidden: int, dtype: int) -> bool:
    """Return whether these functions have TE's bits."""
    return hidden in WARPS and dtype in (DType.BFLOAT16, DType.FLOAT16)


def statistics(te: Shim, stream: Stream, norm: RMSNorm, amax: int = 0, copy: int = 0) -> None:
    """Write rsigma = 1 / sqrt(mean(x²) + epsilon) of each row.

    amax: the address of a number that is raised to the greatest magnitude of the norm, rounded to dtype, as if that had
    been stored; 0 for none. copy: where x is written a second time, of x's dtype and size; 0 for nowhere.
    """
    x, gamma, rsigma, rows, hidden, dtype, epsilon, zero_centered = norm
    element, warps = ELEMENTS[dtype][0], WARPS[hidden]
    options = dict(ELEMENT=element, HIDDEN=hidden, WARPS=warps, NAME="rmsnorm_statistics")
    compiled = kernel("rmsnorm_statistics", "rmsnorm_statistics.cu", stream.capability, **options)
    blocks = -(-rows // (_WARPS_OF_BLOCK // warps))
    arguments = x, gamma, rsigma, amax, copy, rows, float32_bits(epsilon), zero_centered
    te.launch(compiled, blocks, 32 * _WARPS_OF_BLOCK, 0, stream, *arguments)


def cast_transpose(
    te: Shim,
    stream: Stream,
    norm: RMSNorm,
    target: CastTarget,
    float8: int,
    rounded: bool = False,
    plain: int = 0,
) -> None:
    """Write x · rsigma · gamma, cast to fp8 with its transposed copy.

    float8, rounded: a Form's. plain: where it is also written in x's dtype; 0 for nowhere.
    """
    x, gamma, rsigma, rows, hidden, dtype, _, zero_centered = norm
    defines, form = {"PLAIN": int(plain != 0)} | target.defines, Form(dtype, float8, rounded)
    cast = CastKernel("rmsnorm_cast_transpose", "rmsnorm_cast.cu", form, CAST_TILING, defines)
    arguments = x, gamma, rsigma, plain, *target.arguments, rows, hidden, zero_centered
    casts.launch(te, stream, cast, [(rows, hidden)], arguments)
