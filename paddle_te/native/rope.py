"""Apply rotary position embedding to packed q, k, v (kernels/rope.cu).

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
_NAMES = {dtype: (f"rope_{name}", vector) for dtype, (name, vector) in ELEMENTS.items()}


def rope_packed(
    te: Shim,
    stream: Stream,
    source: int,
    target: int,
    angles: int,
    tokens: int,
    s: int,
    heads: int,
    kv_heads: int,
    d: int,
    dtype: int,
    backward: bool = False,
    turn: Turn = WHOLE,
) -> None:
    """Rotate q and k of the packed buffer `source` [tokens, (heads + 2 kv_heads) d] into `target`, laid out alike.

    source may be target: then v stays as it is, two thirds of the memory traffic. Backward: source holds gradients.
    """
    from_, to = (packed_places(qkv, heads, kv_heads, d, dtype) for qkv in (source, target))
    _launch(te, stream, from_, to, angles, tokens, s, heads, kv_heads, d, dtype, backward, turn)


def rope_split(
    te: Shim,
    stream: Stream,
    qkv: int,
    q: int,
    k: int,
    v: int,
    angles: int,
    tokens: int,
    s: int,
    heads: int,
    kv_heads: int,
    d: int,
    dtype: int,
    turn: Turn = WHOLE,
) -> None:
    """Rotate packed qkv [tokens, (heads + 2 kv_heads) d] to q [tokens, heads, d], k and v [tokens, kv_heads, d]."""
    source = packed_places(qkv, heads, kv_heads, d, dtype)
    target = (q, k, v, heads * d, kv_heads * d, kv_heads * d)
    _launch(te, stream, source, target, angles, tokens, s, heads, kv_heads, d, dtype, False, turn)


def rope_merge(
    te: Shim,
    stream: Stream,
    dq: int,
    dk: int,
    dv: int,
    dqkv: int,
    angles: int,
    tokens: int,
    s: int,
    heads: int,
    kv_heads: int,
    d: int,
    dtype: int,
    turn: Turn = WHOLE,
) -> None:
    """Do the backward of `rope_split`: gradients dq, dk, dv to the packed dqkv."""
    target = packed_places(dqkv, heads, kv_heads, d, dtype)
    source = (dq, dk, dv, heads * d, kv_heads * d, kv_heads * d)
    _launch(te, stream, source, target, angles, tokens, s, heads, kv_heads, d, dtype, True, turn)


def packed(qkv: int, heads: int, kv_heads: int, d: int, dtype: int) -> tuple[int, int, int, int]:
    """Return the addresses of q, k, v in the packed buffer, and its stride."""
    head_bytes = d * (16 // _NAMES[dtype][1])
    return qkv, qkv + heads * head_bytes, qkv + (heads + kv_heads) * head_bytes, (heads + 2 * kv_heads) * d


def packed_places(qkv: int, heads: int, kv_heads: int, d: int, dtype: int) -> Places:
    """Return the addresses and strides of q, k and v in the packed buffer."""
    q, k, v, stride = packed(qkv, heads, kv_heads, d, dtype)
    return q, k, v, stride, stride, stride


def _launch(
    te: Shim,
    stream: Stream,
    source: Places,
    target: Places,
    angles: int,
    tokens: int,
    s: int,
    heads: int,
    kv_heads: int,
    d: int,
    dtype: int,
    backward: bool,
    turn: Turn,
) -> None:
    name, vector = _NAMES[dtype]
    chunks, rest = divmod(d, 2 * vector)
    if rest or not 0 < chunks <= 256:
        raise ValueError(
            f"rotary embedding in {DType(dtype).name} needs a head size that is a multiple of {2 * vector}, got {d}"
        )
    turn.check(d, vector)
    function = kernel(name, "rope.cu", stream.capability, INTERLEAVED=int(turn.interleaved))
    block, sizes = chunks * (256 // chunks), (s, heads, kv_heads, *turn.parameters(d))
    te.launch(function, tokens, block, d * 4, stream, *source, *target, angles, *sizes, backward)
