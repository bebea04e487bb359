"""Apply rotary position embedding to packed q, k, v (kernels/rope.cu), and say how these lie in memory.

Addresses are ints, strides are elements a token. `angles`: float32 [s, turn.width], row t % s for token t, of which the
first half of each row is read, an angle for each pair; 0 for none: nothing is rotated. d must be a multiple of 16
(bfloat16, float16) or 8 (float32), and all addresses and strides of 16 bytes.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from paddle_te.native.interface import Shim, Stream
from paddle_te.native.kernels import ELEMENTS, float32_bits, kernel
from paddle_te.native.types import DType


class Turn(NamedTuple):
    """The numbers of a head that are rotated in pairs.

    width: so many from its beginning; None: all. interleaved: a pair is two neighbours, numbers 2i and 2i + 1, not
    numbers i and i + width / 2. factor: what these numbers, and no others of the head, are multiplied by.
    """

    width: int | None = None
    interleaved: bool = False
    factor: float = 1.0

    def parameters(self, d: int) -> tuple[int, int]:
        """Return the kernels' two parameters, with the head's width d."""
        return d | (self.width or d) << 32, float32_bits(self.factor)

    def check(self, d: int, vector: int) -> None:
        """Raise ValueError for a width that the kernels do not take. vector: numbers of 16 bytes."""
        width, multiple = self.width or d, 2 if self.interleaved else 2 * vector
        if not 0 < width <= d or width % multiple:
            raise ValueError(
                f"rotary embedding of {width} of a head's {d} numbers: it must be a multiple of {multiple} up to {d}"
            )


WHOLE = Turn()
Places: TypeAlias = tuple[int, int, int, int, int, int]  # addresses and strides of q, k and v
Target: TypeAlias = int | tuple[int, int, int]  # the address of a packed buffer, or those of q, k and v
_NAMES = {dtype: (f"rope_{name}", vector) for dtype, (name, vector) in ELEMENTS.items()}


class Geometry(NamedTuple):
    """How q, k and v lie in memory, and which of their numbers are rotated.

    Packed they are [tokens, (heads + 2 kv_heads) d], apart [tokens, heads or kv_heads, d]. s: tokens of a sequence.
    """

    tokens: int
    s: int
    heads: int
    kv_heads: int
    d: int
    dtype: int
    turn: Turn = WHOLE

    @property
    def both(self) -> int:
        """The kernels' parameter for heads and kv_heads."""
        return self.heads | self.kv_heads << 32

    @property
    def turned(self) -> tuple[int, int]:
        """The kernels' two parameters for the width of a head and for what is rotated."""
        return self.turn.parameters(self.d)

    def packed(self, qkv: int) -> tuple[int, int, int, int]:
        """Return the addresses of q, k, v in the packed buffer, and its stride."""
        head_bytes = self.d * (16 // ELEMENTS[self.dtype][1])
        k, v = self.heads * head_bytes, (self.heads + self.kv_heads) * head_bytes
        return qkv, qkv + k, qkv + v, (self.heads + 2 * self.kv_heads) * self.d

    def places(self, target: Target) -> Places:
        """Return the addresses and strides of q, k and v."""
        if isinstance(target, int):
            q, k, v, stride = self.packed(target)
            return q, k, v, stride, stride, stride
        return *target, self.heads * self.d, self.kv_heads * self.d, self.kv_heads * self.d


def rotate(
    te: Shim, stream: Stream, source: Target, target: Target, angles: int, geometry: Geometry, backward: bool = False
) -> None:
    """Rotate q and k of source into target, and copy v.

    source may be target: then v stays as it is, two thirds of the memory traffic. Backward: source holds gradients.
    """
    d, turn, (name, vector) = geometry.d, geometry.turn, _NAMES[geometry.dtype]
    chunks, rest = divmod(d, 2 * vector)
    if rest or not 0 < chunks <= 256:
        raise ValueError(
            f"rotary embedding in {DType(geometry.dtype).name} needs a head size that is a multiple of {2 * vector}, "
            f"got {d}"
        )
    turn.check(d, vector)
    function = kernel(name, "rope.cu", stream.capability, INTERLEAVED=int(turn.interleaved))
    block, sizes = chunks * (256 // chunks), (geometry.s, geometry.heads, geometry.kv_heads, *geometry.turned)
    places = *geometry.places(source), *geometry.places(target)
    te.launch(function, geometry.tokens, block, d * 4, stream, *places, angles, *sizes, backward)
