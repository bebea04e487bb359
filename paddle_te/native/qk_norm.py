"""Norm the heads of q and k by RMSNorm, with the rotation behind it, on packed q, k, v (kernels/qk_norm.cu).

Addresses, `angles` and `geometry` are as in `rope`; d is at most 512 (bfloat16, float16) or 256 (float32).
"""

from __future__ import annotations

from typing import NamedTuple

from paddle_te.native.interface import Shim, Stream
from paddle_te.native.kernels import ELEMENTS, Kernel, float32_bits, kernel
from paddle_te.native.rope import Geometry, Target
from paddle_te.native.types import DType

_BLOCK, _LANES, _COLUMNS = 256, 32, 32  # threads of a block, at most of a head; qk_norm.cu's kColumns
# Blocks of a backward, each of which has a part of the weights' gradients: 4 for each SM of a Hopper
_BLOCKS = 528
_SHARED = 48 << 10  # bytes of a block's


class QKNorm(NamedTuple):
    """The weights of both norms.

    q_weight, k_weight: addresses of [d], or with over_all of [heads d] and [kv_heads d]. epsilon: added to the mean of
    the squares. zero_centered: the weights are multiplied by as 1 + weight. over_all: the mean is that of all heads of
    q, or of k, not of each head. ranks: that share these heads.
    """

    q_weight: int
    k_weight: int
    epsilon: float
    zero_centered: bool = False
    over_all: bool = False
    ranks: int = 1

    @property
    def bits(self) -> int:
        """The kernels' parameter."""
        return float32_bits(self.epsilon) | self.zero_centered << 32 | self.ranks << 33

    def sums(
        self,
        te: Shim,
        stream: Stream,
        grads: Target | None,
        qkv: int,
        sums: int,
        angles: int,
        geometry: Geometry,
    ) -> None:
        """Fill float32 [tokens, 4], whose sum over the ranks `forward` and `backward` read with over_all.

        grads: `backward`'s, or None before forward.
        """
        q, k, _, stride = geometry.packed(qkv)
        dq, dk, _, dq_stride, dk_stride, _ = [0] * 6 if grads is None else geometry.places(grads)
        arguments = dq, dk, dq_stride, dk_stride, q, k, stride, *self._weights, sums, angles, *self._sizes(geometry)
        shared = 4 * (geometry.d + 4 * _BLOCK // 32)
        te.launch(self._kernel("sums", geometry, stream), geometry.tokens, _BLOCK, shared, stream, *arguments)

    def forward(
        self,
        te: Shim,
        stream: Stream,
        qkv: int,
        target: Target,
        angles: int,
        geometry: Geometry,
        sums: int = 0,
    ) -> None:
        """Norm and rotate q and k of the packed buffer `qkv` [tokens, (heads + 2 kv_heads) d], and copy v.

        target: the address of another packed buffer, or those of q, k and v [tokens, heads or kv_heads, d].
        """
        places = *geometry.places(qkv), *geometry.places(target)
        arguments = *places, *self._weights, sums, angles, *self._sizes(geometry)
        compiled = self._kernel("forward", geometry, stream)
        te.launch(compiled, geometry.tokens, _BLOCK, 4 * geometry.d, stream, *arguments)

    def backward(
        self,
        te: Shim,
        stream: Stream,
        grads: Target,
        qkv: int,
        dqkv: int,
        partials: int,
        angles: int,
        geometry: Geometry,
        sums: int = 0,
    ) -> None:
        """Fill the packed dqkv from the gradients of what forward has written.

        grads: the address of a packed buffer, which may be dqkv, or those of three. qkv: as forward read it. partials:
        address of `partial_bytes`, for `weight_gradients`; 0 where no weight wants a gradient.
        """
        q, k, _, stride = geometry.packed(qkv)
        blocks, (_, *sizes) = min(geometry.tokens, _BLOCKS), self._sizes(geometry)
        places = *geometry.places(grads), q, k, stride, *geometry.packed(dqkv)
        arguments = *places, *self._weights, sums, partials, angles, geometry.s, geometry.tokens, *sizes
        compiled = self._kernel("backward", geometry, stream)
        te.launch(compiled, blocks, _BLOCK, self._shared_by_backward(geometry), stream, *arguments)

    @property
    def _weights(self) -> tuple[int, int]:
        return self.q_weight, self.k_weight

    def _sizes(self, geometry: Geometry) -> tuple[int, int, int, int, int]:
        return geometry.s, geometry.both, *geometry.turned, self.bits

    def _shared_by_backward(self, geometry: Geometry) -> int:
        """Return bytes of a block of backward: a weight's row, and a row of numbers for each of the block's heads."""
        _, _, heads, kv_heads, d, dtype, _ = geometry
        rows = (heads + kv_heads) * d if self.over_all else max(d, 2 * _BLOCK * ELEMENTS[dtype][1])
        if (shared := 4 * (d + rows)) > _SHARED:
            raise ValueError(
                f"norms of q and k over all heads: {heads} + {kv_heads} heads of {d} numbers; they must be at most "
                f"{_SHARED // 4 - d} numbers together: share them among more tensor parallel ranks"
            )
        return shared

    def _kernel(self, direction: str, geometry: Geometry, stream: Stream) -> Kernel:
        """Return the kernel. Raises ValueError for heads that the kernels do not take."""
        check_head(geometry)
        options = dict(INTERLEAVED=int(geometry.turn.interleaved), OVER_ALL=int(self.over_all))
        return kernel(f"qk_norm_{direction}_{ELEMENTS[geometry.dtype][0]}", "qk_norm.cu", stream.capability, **options)


def check_head(geometry: Geometry) -> None:
    """Raise ValueError for heads that the kernels do not take."""
    d, dtype = geometry.d, geometry.dtype
    vector = ELEMENTS[dtype][1]
    vectors, rest = divmod(d, 2 * vector)
    if rest or not 0 < vectors <= _LANES:
        raise ValueError(
            f"norms of q and k in {DType(dtype).name} need a head size that is a multiple of {2 * vector} up to "
            f"{2 * vector * _LANES}, got {d}"
        )
    geometry.turn.check(d, vector)


def partial_bytes(tokens: int, numbers: int) -> int:
    """Return the bytes of the gradients of weights of so many numbers, by block, of a backward of so many tokens."""
    return min(tokens, _BLOCKS) * numbers * 4


def weight_gradients(
    te: Shim,
    stream: Stream,
    partials: int,
    dq_weight: int,
    dk_weight: int,
    tokens: int,
    sizes: tuple[int, int],
    dtype: int,
) -> None:
    """Write the gradients of both weights, of sizes numbers, from the partials of a backward of so many tokens."""
    options = dict(INTERLEAVED=0, OVER_ALL=0)
    compiled = kernel(f"qk_norm_weights_{ELEMENTS[dtype][0]}", "qk_norm.cu", stream.capability, **options)
    grid, arguments = -(-sum(sizes) // _COLUMNS), (partials, dq_weight, dk_weight, min(tokens, _BLOCKS), *sizes)
    te.launch(compiled, grid, _BLOCK, 4 * _BLOCK, stream, *arguments)
