"""Rotary position embedding on packed q, k, v (kernels/rope.cu).

Addresses are ints, strides are elements a token. `angles`: float32 [s, turn.width], row t % s for token t, of which the
first half of each row is read, an angle for each pair; 0 for none: nothing is rotated. d must be a multiple of 16
(bfloat16, float16) or 8 (float32), and all addresses and strides of 16 bytes.
"""

from typing import NamedTuple

from paddle_te.native.kernels import ELEMENTS, kernel
from paddle_te.native.types import DType


class Turn(NamedTuple):
    """Which numbers of a head are rotated in pairs.

    width: so many from its beginning; None: all. interleaved: a pair is two neighbours, numbers 2i and 2i + 1, not
    numbers i and i + width / 2.
    """

    width: int | None = None
    interleaved: bool = False

    def widths(self, d):
        """The kernels' parameter, with the head's width d."""
        return d | (self.width or d) << 32

    def check(self, d, vector):
        """Raises ValueError for a width that the kernels do not take. vector: numbers of 16 bytes."""
        width, multiple = self.width or d, 2 if self.interleaved else 2 * vector
        if not 0 < width <= d or width % multiple:
            raise ValueError(
                f"rotary embedding of {width} of a head's {d} numbers: it must be a multiple of {multiple} up to {d}"
            )


WHOLE = Turn()


_NAMES = {dtype: (f"rope_{name}", vector) for dtype, (name, vector) in ELEMENTS.items()}


def rope_packed(te, stream, source, target, angles, tokens, s, heads, kv_heads, d, dtype, backward=False, turn=WHOLE):
    """Rotates q and k of the packed buffer `source` [tokens, (heads + 2 kv_heads) d] into `target`, laid out alike.

    source may be target: then v stays as it is, two thirds of the memory traffic. Backward: source holds gradients.
    """
    *from_, stride = packed(source, heads, kv_heads, d, dtype)
    *to, _ = packed(target, heads, kv_heads, d, dtype)
    strides = (stride, stride, stride)
    sizes = tokens, s, heads, kv_heads, d, dtype
    _launch(te, stream, (*from_, *strides), (*to, *strides), angles, *sizes, backward, turn)


def rope_split(te, stream, qkv, q, k, v, angles, tokens, s, heads, kv_heads, d, dtype, turn=WHOLE):
    """Packed qkv [tokens, (heads + 2 kv_heads) d] to rotated q [tokens, heads, d], k and v [tokens, kv_heads, d]."""
    *source, stride = packed(qkv, heads, kv_heads, d, dtype)
    source = (*source, stride, stride, stride)
    target = (q, k, v, heads * d, kv_heads * d, kv_heads * d)
    _launch(te, stream, source, target, angles, tokens, s, heads, kv_heads, d, dtype, False, turn)


def rope_merge(te, stream, dq, dk, dv, dqkv, angles, tokens, s, heads, kv_heads, d, dtype, turn=WHOLE):
    """Backward of `rope_split`: gradients dq, dk, dv to the packed dqkv."""
    *target, stride = packed(dqkv, heads, kv_heads, d, dtype)
    source = (dq, dk, dv, heads * d, kv_heads * d, kv_heads * d)
    sizes = tokens, s, heads, kv_heads, d, dtype
    _launch(te, stream, source, (*target, stride, stride, stride), angles, *sizes, True, turn)


def packed(qkv, heads, kv_heads, d, dtype):
    """Addresses of q, k, v in the packed buffer, and its stride."""
    head_bytes = d * (16 // _NAMES[dtype][1])
    return qkv, qkv + heads * head_bytes, qkv + (heads + kv_heads) * head_bytes, (heads + 2 * kv_heads) * d


def _launch(te, stream, source, target, angles, tokens, s, heads, kv_heads, d, dtype, backward, turn):
    name, vector = _NAMES[dtype]
    chunks, rest = divmod(d, 2 * vector)
    if rest or not 0 < chunks <= 256:
        raise ValueError(
            f"rotary embedding in {DType(dtype).name} needs a head size that is a multiple of {2 * vector}, got {d}"
        )
    turn.check(d, vector)
    function = kernel(name, "rope.cu", stream.capability, INTERLEAVED=int(turn.interleaved))
    block, sizes = chunks * (256 // chunks), (s, heads, kv_heads, turn.widths(d))
    te.launch(function, tokens, block, d * 4, stream, *source, *target, angles, *sizes, backward)
