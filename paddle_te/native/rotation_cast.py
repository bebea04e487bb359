"""Norm and rotate q and k, centre k and v, and cast all to e4m3 in one pass (kernels/rotation_cast.cu).

Addresses, `angles` and `geometry` are as in `rope`.
"""

from __future__ import annotations

from typing import NamedTuple

from paddle_te.native.centring import NO_NORM, Means
from paddle_te.native.interface import Shim, Stream
from paddle_te.native.kernels import ELEMENTS, kernel
from paddle_te.native.qk_norm import QKNorm, check_head
from paddle_te.native.rope import Geometry, Target

_BLOCK = 256


class Float8Heads(NamedTuple):
    """Where q, k and v are written, in e4m3, and their one scale.

    strides: bytes from a token to the next, of q, and of k and v. scale is read, amax raised, scale_inv written.
    """

    q: int
    k: int
    v: int
    strides: tuple[int, int]
    scale: int
    amax: int
    scale_inv: int


def rotation_cast(
    te: Shim,
    stream: Stream,
    source: Target,
    target: Float8Heads,
    norm: QKNorm | None,
    angles: int,
    means: Means,
    geometry: Geometry,
) -> None:
    """Fill the target from q, k and v of the source. norm: None for none. means: subtracted from k and v."""
    check_head(geometry)
    defines = dict(INTERLEAVED=int(geometry.turn.interleaved), OVER_ALL=0, NORM=int(norm is not None))
    name = f"rotation_cast_{ELEMENTS[geometry.dtype][0]}"
    compiled = kernel(name, "rotation_cast.cu", stream.capability, **defines)
    of_norm = norm or NO_NORM
    places = *geometry.places(source)[:5], *target[:3], *target.strides
    sizes = geometry.s, geometry.both, *geometry.turned, of_norm.bits, *means
    arguments = *places, of_norm.q_weight, of_norm.k_weight, angles, *sizes, *target[4:]
    te.launch(compiled, geometry.tokens, _BLOCK, 4 * geometry.d, stream, *arguments)
