"""Norm and rotate q and k and cast q, k and v to e4m3 in one pass (kernels/rotation_cast.cu).

Addresses, `angles`, sizes and `turn` are as in `rope`.
"""

from __future__ import annotations

from typing import NamedTuple

from paddle_te.native.interface import Shim, Stream
from paddle_te.native.kernels import ELEMENTS, kernel
from paddle_te.native.qk_norm import QKNorm, check_head
from paddle_te.native.rope import WHOLE, Turn, packed

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
    te: Shim,
    stream: Stream,
    qkv: int,
    target: Float8Heads,
    norm: QKNorm | None,
    angles: int,
    tokens: int,
    s: int,
    heads: int,
    kv_heads: int,
    d: int,
    dtype: int,
    turn: Turn = WHOLE,
) -> None:
    """Fill the target from the packed buffer `qkv` [tokens, (heads + 2 kv_heads) d]. norm: None for none."""
    check_head(d, dtype, turn)
    defines = dict(INTERLEAVED=int(turn.interleaved), OVER_ALL=0, NORM=int(norm is not None))
    compiled = kernel(f"rotation_cast_{ELEMENTS[dtype][0]}", "rotation_cast.cu", stream.capability, **defines)
    of_norm = norm or _NO_NORM
    places = *target[:3], *target.strides, of_norm.q_weight, of_norm.k_weight
    sizes = s, heads | kv_heads << 32, *turn.parameters(d), of_norm.bits
    factors = target.scale, target.amax, target.scale_inv
    arguments = *packed(qkv, heads, kv_heads, d, dtype), *places, angles, *sizes, *factors
    te.launch(compiled, tokens, _BLOCK, 4 * d, stream, *arguments)
