"""Rotary embedding and causal attention."""

import paddle
import paddle.nn.functional as F

from paddle_te.fp8.emulation import emulated_fp8_attention


def _rotate(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + paddle.concat([-second, first], -1) * sin


def rotary_qkv(qkv, freqs, num_heads, num_kv_heads):
    """Splits the fused projection into heads and rotates q and k by `freqs` (Su et al., 2021; halves convention).

    qkv: [b, s, (num_heads + 2·num_kv_heads)·d], q, k and v stacked; freqs: angles, float32 [≥ s, d], or [b, s, d] for
    sequences with positions of their own.
    Returns q [b, s, num_heads, d], k and v [b, s, num_kv_heads, d]. The rotation is done in float32.
    """
    b, s, width = qkv.shape
    d = width // (num_heads + 2 * num_kv_heads)
    heads = qkv.reshape([b, s, -1, d])
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], 2)
    angles = freqs.unsqueeze(2) if freqs.ndim == 3 else freqs[:s].unsqueeze([0, 2])
    cos, sin = angles.cos(), angles.sin()
    return tuple(_rotate(t.astype("float32"), cos, sin).astype(t.dtype) for t in (q, k)) + (v,)


def dot_product_attention(q, k, v, *, scale, attention_mask=None, quantizers=None):
    """softmax(q·kᵀ·scale + mask)·v per head; query heads share kv heads in groups (GQA, Ainslie et al., 2023).

    q: [b, s, h, d]; k, v: [b, s_kv, h_kv, d], h a multiple of h_kv. attention_mask: additive, [b or 1, 1, s, s_kv];
    None is causal. Returns [b, s, h·d]. The softmax is float32. quantizers: fp8 emulated; without a mask then.
    """
    if quantizers is not None:
        return emulated_fp8_attention(q, k, v, scale, quantizers).flatten(2)
    b, s, h, d = q.shape
    s_kv, h_kv = k.shape[1:3]
    q = (q * scale).transpose([0, 2, 1, 3]).reshape([b, h_kv, h // h_kv, s, d])
    k, v = (t.transpose([0, 2, 1, 3]).unsqueeze(2) for t in (k, v))
    scores = paddle.matmul(q, k, transpose_y=True).astype("float32")
    if attention_mask is None:
        hidden = paddle.full([s, s_kv], paddle.finfo(scores.dtype).min, scores.dtype)
        scores = scores + paddle.triu(hidden, diagonal=1 + s_kv - s)
    else:
        scores = scores + attention_mask.astype(scores.dtype).unsqueeze(2)
    out = paddle.matmul(F.softmax(scores, -1).astype(v.dtype), v)
    return out.reshape([b, h, s, d]).transpose([0, 2, 1, 3]).reshape([b, s, h * d])


def rotary_attention(qkv, freqs, num_heads, num_kv_heads, *, scale, quantizers=None):
    """dot_product_attention(*rotary_qkv(qkv, …)), causal."""
    q, k, v = rotary_qkv(qkv, freqs, num_heads, num_kv_heads)
    return dot_product_attention(q, k, v, scale=scale, quantizers=quantizers)


def check_fp8_attention(head_dim, sequence=16, backward=True):
    """The emulation takes all."""
