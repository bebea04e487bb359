"""Norm and rotate q and k and cast q, k and v to e4m3 in one pass (kernels/rotation_cast.cu).

Addresses, `angles` and `geometry` are as in `rope`.
"""

from __future__ import annotations

from typing import NamedTuple

from paddle_te.native.interface import Shim, Stream
from paddle_te.native.kernels import ELEMENTS, kernel
from paddle_te.native.qk_norm import QKNorm, check_head
from paddle_te.native.rope import Geometry

_BLOCK = 256
_NO_NORM = QKNorm(0, 0, 0.0)


class Float8Heads(NamedTuple):
    """Where q, k and v are written, in e4m3, and their one scale.

    strides: bytes from a token to the next, of q, of k and of v. scale is read, amax raised, scale_inv written.
    """

    q: int
    k: int
    v: int
    strides: tuple[int, int, int]
    scale: int
    amax: int
    scale_inv: int


def rotation_cast(
    te: Shim, stream: Stream, qkv: int, target: Float8Heads, norm: QKNorm | None, angles: int, geometry: Geometry
) -> None:
    """Fill the target from the packed buffer `qkv` [tokens, (heads + 2 kv_heads) d]. norm: None for none."""
    check_head(geometry)
    defines = dict(INTERLEAVED=int(geometry.turn.interleaved), OVER_ALL=0, NORM=int(norm is not None))
    name = f"rotation_cast_{ELEMENTS[geometry.dtype][0]}"
    compiled = kernel(name, "rotation_cast.cu", stream.capability, **defines)
    of_norm = norm or _NO_NORM
    places = *target[:3], *target.strides, of_norm.q_weight, of_norm.k_weight
    sizes = geometry.s, geometry.both, *geometry.turned, of_norm.bits
    factors = target.scale, target.amax, target.scale_inv
    arguments = *geometry.packed(qkv), *places, angles, *sizes, *factors
    te.launch(compiled, geometry.tokens, _BLOCK, 4 * geometry.d, stream, *arguments)
