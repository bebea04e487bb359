"""Norm each head of q and k by RMSNorm, with the rotation behind it, on packed q, k, v (kernels/qk_norm.cu).

Addresses, `angles`, sizes and `turn` are as in `rope`; d is at most 512 (bfloat16, float16) or 256 (float32).
"""

from __future__ import annotations

import struct
from typing import NamedTuple, TypeAlias

from paddle_te.native.interface import Shim, Stream
from paddle_te.native.kernels import ELEMENTS, Kernel, kernel
from paddle_te.native.rope import WHOLE, Places, Turn, packed, packed_places
from paddle_te.native.types import DType

_BLOCK, _LANES, _COLUMNS = 256, 32, 32  # threads of a block, at most of a head; qk_norm.cu's kColumns
# Blocks of a backward, each of which has a part of the weights' gradients: 4 for each SM of a Hopper
_BLOCKS = 528
Target: TypeAlias = int | tuple[int, int, int]  # the address of a packed buffer, or those of q, k and v


class QKNorm(NamedTuple):
    """The weights of both norms.

    q_weight, k_weight: addresses of [d]. epsilon: added to the mean of the squares. zero_centered: the weights are
    multiplied by as 1 + weight.
    """

    q_weight: int
    k_weight: int
    epsilon: float
    zero_centered: bool = False

    @property
    def _bits(self) -> int:
        """The kernels' parameter."""
        return struct.unpack("I", struct.pack("f", self.epsilon))[0] | self.zero_centered << 32

    def forward(
        self,
        te: Shim,
        stream: Stream,
        qkv: int,
        target: Target,
        angles: int,
        tokens: int,
        s: int,
        heads: int,
        kv_heads: int,
        d: int,
        dtype: DType,
        turn: Turn = WHOLE,
    ) -> None:
        """Norm and rotate q and k of the packed buffer `qkv` [tokens, (heads + 2 kv_heads) d], and copy v.

        target: the address of another packed buffer, or those of q, k and v [tokens, heads or kv_heads, d].
        """
        compiled = _kernel("forward", d, dtype, turn, stream)
        *source, stride = packed(qkv, heads, kv_heads, d, dtype)
        places = _places(target, heads, kv_heads, d, dtype)
        sizes = angles, s, heads, kv_heads, turn.widths(d), self._bits
        arguments = *source, stride, stride, stride, *places, self.q_weight, self.k_weight, *sizes
        te.launch(compiled, tokens, _BLOCK, 4 * d, stream, *arguments)

    def backward(
        self,
        te: Shim,
        stream: Stream,
        grads: Target,
        qkv: int,
        dqkv: int,
        partials: int,
        angles: int,
        tokens: int,
        s: int,
        heads: int,
        kv_heads: int,
        d: int,
        dtype: DType,
        turn: Turn = WHOLE,
    ) -> None:
        """Fill the packed dqkv from the gradients of what forward has written.

        grads: the address of a packed buffer, which may be dqkv, or those of three. qkv: as forward read it. partials:
        address of `partial_bytes`, for `weight_gradients`; 0 where no weight wants a gradient.
        """
        compiled = _kernel("backward", d, dtype, turn, stream)
        q, k, _, stride = packed(qkv, heads, kv_heads, d, dtype)
        source, out = _places(grads, heads, kv_heads, d, dtype), packed(dqkv, heads, kv_heads, d, dtype)
        blocks = min(tokens, _BLOCKS)
        sizes = angles, s, tokens, blocks, heads, kv_heads, turn.widths(d), self._bits
        arguments = *source, q, k, stride, *out, self.q_weight, self.k_weight, partials, *sizes
        shared = 4 * max(d, 2 * _BLOCK * ELEMENTS[dtype][1])  # a row of d numbers for each of the block's heads
        te.launch(compiled, blocks, _BLOCK, shared, stream, *arguments)


def partial_bytes(tokens: int, d: int) -> int:
    """Return the bytes of the weights' gradients, by block, of a backward of so many tokens."""
    return min(tokens, _BLOCKS) * 2 * d * 4


def weight_gradients(
    te: Shim, stream: Stream, partials: int, dq_weight: int, dk_weight: int, tokens: int, d: int, dtype: DType
) -> None:
    """Write the gradients of both weights, [d] each, from the partials of a backward of so many tokens."""
    compiled = kernel(f"qk_norm_weights_{ELEMENTS[dtype][0]}", "qk_norm.cu", stream.capability, INTERLEAVED=0)
    grid, arguments = -(-2 * d // _COLUMNS), (partials, dq_weight, dk_weight, min(tokens, _BLOCKS), d)
    te.launch(compiled, grid, _BLOCK, 4 * _BLOCK, stream, *arguments)


def _kernel(direction: str, d: int, dtype: DType, turn: Turn, stream: Stream) -> Kernel:
    """Return the kernel. Raises ValueError for heads that the kernels do not take."""
    element, vector = ELEMENTS[dtype]
    vectors, rest = divmod(d, 2 * vector)
    if rest or not 0 < vectors <= _LANES:
        raise ValueError(
            f"norms of q and k in {DType(dtype).name} need a head size that is a multiple of {2 * vector} up to "
            f"{2 * vector * _LANES}, got {d}"
        )
    turn.check(d, vector)
    name, interleaved = f"qk_norm_{direction}_{element}", int(turn.interleaved)
    return kernel(name, "qk_norm.cu", stream.capability, INTERLEAVED=interleaved)


def _places(target: Target, heads: int, kv_heads: int, d: int, dtype: DType) -> Places:
    """Return the addresses and strides of q, k and v: of one packed buffer, or of three."""
    if isinstance(target, int):
        return packed_places(target, heads, kv_heads, d, dtype)
    q, k, v = target
    return q, k, v, heads * d, kv_heads * d, kv_heads * d
