"""Make q, k and v of multi-head latent attention's projections, rotation included (kernels/latent.cu).

Addresses are ints, of contiguous tensors. A head of q and k has plain + turned numbers, the last of which are rotated;
`kv` has for each head the plain numbers of its key and its value. `angles`: float32 [s, turned], row t % s for token t,
of which the first half of each row is read. All widths must be multiples of 16 bytes, and turned of 32 bytes.
"""

from __future__ import annotations

from typing import NamedTuple

from paddle_te.native.interface import Shim, Stream
from paddle_te.native.kernels import ELEMENTS, Kernel, float32_bits, kernel
from paddle_te.native.types import DType

_BLOCK = 256  # threads at most


class Latent(NamedTuple):
    """The sizes: s tokens of a sequence; value: width of a head of v; interleaved, factor: as `rope.Turn`'s."""

    tokens: int
    s: int
    heads: int
    plain: int
    turned: int
    value: int
    dtype: int
    interleaved: bool = True
    factor: float = 1.0

    def check(self) -> None:
        """Raise ValueError for widths that the kernels do not take."""
        vector = ELEMENTS[self.dtype][1]
        if self.plain % vector or self.value % vector or self.turned % (2 * vector) or not 0 < self.turned <= _BLOCK:
            raise ValueError(
                f"latent attention in {DType(self.dtype).name} needs heads of multiples of {vector} numbers, of which "
                f"a multiple of {2 * vector} up to {_BLOCK} is rotated; got {self.plain} and {self.turned} rotated "
                f"ones, and values of {self.value}"
            )

    @property
    def arguments(self) -> tuple[int, int, int, int, int]:
        """Return the kernels' last parameters."""
        return self.s, self.heads, self.plain | self.turned << 32, self.value, float32_bits(self.factor)

    def kernel(self, direction: str, stream: Stream) -> Kernel:
        """Return the kernel "forward" or "backward"."""
        name = f"latent_{direction}_{ELEMENTS[self.dtype][0]}"
        return kernel(name, "latent.cu", stream.capability, INTERLEAVED=int(self.interleaved))


def forward(
    te: Shim,
    stream: Stream,
    source: tuple[int, int, int],
    target: tuple[int, int, int],
    angles: int,
    sizes: Latent,
) -> None:
    """Fill q, k and v (target) from q, kv and position [tokens, turned] (source)."""
    sizes.check()
    compiled, shared = sizes.kernel("forward", stream), 4 * sizes.turned
    te.launch(compiled, sizes.tokens, _BLOCK, shared, stream, *source, *target, angles, *sizes.arguments)


def backward(
    te: Shim,
    stream: Stream,
    source: tuple[int, int, int],
    target: tuple[int, int, int],
    angles: int,
    sizes: Latent,
) -> None:
    """Fill the gradients of q, kv and position (target) from those of q, k and v (source)."""
    sizes.check()
    block = _BLOCK // sizes.turned * sizes.turned
    compiled, shared = sizes.kernel("backward", stream), 4 * (sizes.turned + block)
    te.launch(compiled, sizes.tokens, block, shared, stream, *source, *target, angles, *sizes.arguments)
