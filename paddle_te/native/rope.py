"""Rotary position embedding on packed q, k, v (kernels/rope.cu).

Addresses are ints, strides are elements a token. `angles`: float32 [s, d], row t % s for token t, of which the first
half of each row is read (both halves are equal in the half-split convention); 0 for none: nothing is rotated. d must be
a multiple of 16 (bfloat16, float16) or 8 (float32), and all addresses and strides of 16 bytes.
"""

from paddle_te.native.kernels import ELEMENTS, kernel
from paddle_te.native.types import DType

_NAMES = {dtype: (f"rope_{name}", vector) for dtype, (name, vector) in ELEMENTS.items()}


def rope_packed(te, stream, source, target, angles, tokens, s, heads, kv_heads, d, dtype, backward=False):
    """Rotates q and k of the packed buffer `source` [tokens, (heads + 2 kv_heads) d] into `target`, laid out alike.

    source may be target: then v stays as it is, two thirds of the memory traffic. Backward: source holds gradients.
    """
    *from_, stride = packed(source, heads, kv_heads, d, dtype)
    *to, _ = packed(target, heads, kv_heads, d, dtype)
    strides = (stride, stride, stride)
    _launch(te, stream, (*from_, *strides), (*to, *strides), angles, tokens, s, heads, kv_heads, d, dtype, backward)


def rope_split(te, stream, qkv, q, k, v, angles, tokens, s, heads, kv_heads, d, dtype):
    """Packed qkv [tokens, (heads + 2 kv_heads) d] to rotated q [tokens, heads, d], k and v [tokens, kv_heads, d]."""
    *source, stride = packed(qkv, heads, kv_heads, d, dtype)
    source = (*source, stride, stride, stride)
    target = (q, k, v, heads * d, kv_heads * d, kv_heads * d)
    _launch(te, stream, source, target, angles, tokens, s, heads, kv_heads, d, dtype, False)


def rope_merge(te, stream, dq, dk, dv, dqkv, angles, tokens, s, heads, kv_heads, d, dtype):
    """Backward of `rope_split`: gradients dq, dk, dv to the packed dqkv."""
    *target, stride = packed(dqkv, heads, kv_heads, d, dtype)
    source = (dq, dk, dv, heads * d, kv_heads * d, kv_heads * d)
    _launch(te, stream, source, (*target, stride, stride, stride), angles, tokens, s, heads, kv_heads, d, dtype, True)


def packed(qkv, heads, kv_heads, d, dtype):
    """Addresses of q, k, v in the packed buffer, and its stride."""
    head_bytes = d * (16 // _NAMES[dtype][1])
    return qkv, qkv + heads * head_bytes, qkv + (heads + kv_heads) * head_bytes, (heads + 2 * kv_heads) * d


def _launch(te, stream, source, target, angles, tokens, s, heads, kv_heads, d, dtype, backward):
    name, vector = _NAMES[dtype]
    chunks, rest = divmod(d, 2 * vector)
    if rest or not 0 < chunks <= 256:
        raise ValueError(
            f"rotary embedding in {DType(dtype).name} needs a head size that is a multiple of {2 * vector}, got {d}"
        )
    function = kernel(name, "rope.cu", stream.capability)
    block = chunks * (256 // chunks)
    te.launch(function, tokens, block, d * 4, stream, *source, *target, angles, s, heads, kv_heads, d, backward)
