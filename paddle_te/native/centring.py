"""Subtract from keys and values their means over a sequence's tokens, and add the values' (kernels/centring.cu).

Addresses, `angles` and `geometry` are as in `rope`, heads as in `qk_norm`. `Attention.quantizers` in ops/heads.py says
what attention in fp8 wants this for.
"""

from __future__ import annotations

from typing import NamedTuple

from paddle_te.native.interface import Shim, Stream
from paddle_te.native.kernels import ELEMENTS, Kernel, kernel
from paddle_te.native.qk_norm import QKNorm, check_head
from paddle_te.native.rope import Geometry, Target

_BLOCK = 256  # threads
_CHUNK, _COLUMNS = 32, 32  # centring.cu's kChunk and kColumns
NO_NORM = QKNorm(0, 0, 0.0)


class Means(NamedTuple):
    """Where means lie, float32 [sequences, 2, kv_heads, d], of k and then of v. sequence: the tokens of each."""

    address: int
    sequence: int

    def fill(
        self,
        te: Shim,
        stream: Stream,
        source: Target,
        partials: int,
        norm: QKNorm | None,
        angles: int,
        geometry: Geometry,
    ) -> None:
        """Compute the means of source's keys, normed and rotated, and of its values, in float32.

        The keys are rounded to their dtype, as if they had been stored. All sums have an order that depends on the
        sizes only. partials: address of `partial_bytes`. norm: None for none.
        """
        _, k, v, _, stride, _ = geometry.places(source)
        of_norm, sizes = norm or NO_NORM, (geometry.s, self.sequence, geometry.both, *geometry.turned)
        arguments = k, v, stride, of_norm.k_weight, angles, *sizes, of_norm.bits, partials
        compiled = _kernel("sums", geometry, stream, norm is not None)
        sequences, chunks, columns = geometry.tokens // self.sequence, -(-self.sequence // _CHUNK), _columns(geometry)
        grid = sequences * chunks * -(-geometry.kv_heads // (_BLOCK // _lanes(geometry)))
        # a block's sums: two vectors of each thread
        te.launch(compiled, grid, _BLOCK, 8 * _BLOCK * ELEMENTS[geometry.dtype][1], stream, *arguments)
        total = kernel("centring_means", "centring.cu", stream.capability, **_OPTIONS)
        of_chunks = partials, self.address, chunks, self.sequence, columns
        te.launch(total, sequences * columns // _COLUMNS, _BLOCK, 4 * _BLOCK, stream, *of_chunks)

    def subtract(self, te: Shim, stream: Stream, target: Target, geometry: Geometry) -> None:
        """Subtract them from the target's keys and values, rounded to their dtype."""
        _, k, v, _, stride, _ = geometry.places(target)
        arguments = k, v, stride, *self, geometry.kv_heads * geometry.d
        te.launch(_kernel("subtract", geometry, stream), geometry.tokens, _BLOCK, 0, stream, *arguments)

    def dequantize(self, te: Shim, stream: Stream, x: int, scale_inv: int, out: int, geometry: Geometry) -> None:
        """Write to out the e4m3 numbers x [tokens, heads, d] times scale_inv plus the means of the heads' values."""
        arguments = x, scale_inv, self.address, out, self.sequence, geometry.both, geometry.d
        te.launch(_kernel("dequantize", geometry, stream), geometry.tokens, _BLOCK, 0, stream, *arguments)


_OPTIONS = dict(INTERLEAVED=0, OVER_ALL=0, NORM=0)


def partial_bytes(sequence: int, geometry: Geometry) -> int:
    """Return the bytes of the sums from which means are computed. sequence: tokens."""
    return 4 * (geometry.tokens // sequence) * -(-sequence // _CHUNK) * _columns(geometry)


def _columns(geometry: Geometry) -> int:
    """Return the numbers of k and v of a token."""
    return 2 * geometry.kv_heads * geometry.d


def _lanes(geometry: Geometry) -> int:
    """Return the threads of a head, as heads.cuh's lanes_of_head."""
    lanes = 1
    while lanes * 2 * ELEMENTS[geometry.dtype][1] < geometry.d:
        lanes *= 2
    return lanes


def _kernel(name: str, geometry: Geometry, stream: Stream, norm: bool = False) -> Kernel:
    """Return the kernel. Raises ValueError for heads that the kernels do not take."""
    check_head(geometry)
    options = _OPTIONS
    if name == "sums":
        options = dict(INTERLEAVED=int(geometry.turn.interleaved), OVER_ALL=0, NORM=int(norm))
    return kernel(f"centring_{name}_{ELEMENTS[geometry.dtype][0]}", "centring.cu", stream.capability, **options)
