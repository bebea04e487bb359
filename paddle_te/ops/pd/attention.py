"""Rotary embedding and attention."""

from __future__ import annotations

import paddle
import paddle.nn.functional as F
from paddle import Tensor

from paddle_te.fp8.emulation import emulated_fp8_attention
from paddle_te.ops.activations import soft_cap
from paddle_te.ops.documents import check_cu_seqlens
from paddle_te.ops.heads import Attention, Heads, LatentHeads
from paddle_te.ops.norms import Norm, QKNorm
from paddle_te.ops.pd.linear import normalize


def _rotate(x: Tensor, angles: Tensor, heads: Heads | LatentHeads) -> Tensor:
    """Rotate the first numbers of x [b, s, heads, d], in float32; angles: [b or 1, s, 1, numbers], halves alike."""
    width, interleaved = angles.shape[-1], heads.interleaved
    angles = angles[..., : width // 2]
    x, kept = x[..., :width].astype("float32"), x[..., width:].astype("float32")
    pairs = x.reshape([*x.shape[:-1], *((-1, 2) if interleaved else (2, -1))])
    first, second = pairs.unbind(-1 if interleaved else -2)
    cos, sin = (heads.rotary_factor * part for part in (angles.cos(), angles.sin()))
    halves = [first * cos - second * sin, second * cos + first * sin]
    turned = paddle.stack(halves, -1 if interleaved else -2).reshape(x.shape)
    return turned if not kept.shape[-1] else paddle.concat([turned, kept], -1)


def rotary_qkv(qkv: Tensor, freqs: Tensor | None, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Split the fused projection into heads, norm and rotate q and k, in float32: see `ops.interface`."""
    num_heads, num_kv_heads, qk_norm, *_ = heads
    b, s, width = qkv.shape
    d = width // (num_heads + 2 * num_kv_heads)
    q, k, v = qkv.reshape([b, s, -1, d]).split([num_heads, num_kv_heads, num_kv_heads], 2)
    if qk_norm is not None:
        q, k = (_normed(x, weight, qk_norm) for x, weight in zip((q, k), qk_norm[:2], strict=True))
    if freqs is None:
        return q, k, v
    q, k = (_rotate(t, _of_heads(freqs, s), heads).astype(t.dtype) for t in (q, k))
    return q, k, v


def _of_heads(freqs: Tensor, s: int) -> Tensor:
    """Return angles as [b or 1, s, 1, numbers]."""
    return freqs.unsqueeze(2) if freqs.ndim == 3 else freqs[:s].unsqueeze([0, 2])


def latent_qkv(
    q: Tensor, kv: Tensor, position: Tensor, freqs: Tensor, heads: LatentHeads
) -> tuple[Tensor, Tensor, Tensor]:
    """Split the projections of latent attention into heads and rotate, in float32: see `ops.interface`."""
    b, s, turned = position.shape
    angles = _of_heads(freqs, s)
    q = q.reshape([b, s, heads.num_heads, heads.plain + turned])
    key, v = kv.reshape([b, s, heads.num_heads, -1]).split([heads.plain, heads.value], -1)
    shared = _rotate(position.unsqueeze(2), angles, heads).astype(q.dtype)
    of_q = _rotate(q[..., heads.plain :], angles, heads).astype(q.dtype)
    k = paddle.concat([key, shared.expand([b, s, heads.num_heads, turned])], -1)
    return paddle.concat([q[..., : heads.plain], of_q], -1), k, v


def _normed(x: Tensor, weight: Tensor, norm: QKNorm) -> Tensor:
    """Norm q or k [b, s, heads, d] by a QKNorm."""
    if not norm.over_all:
        return normalize(x, Norm(weight, norm.eps, zero_centered_gamma=norm.zero_centered_gamma))
    z = x.astype("float32").flatten(2)
    squares, count = z.square().sum(-1, keepdim=True), z.shape[-1]
    if norm.ranks is not None:
        squares, count = norm.ranks.sum_gradient(norm.ranks.sum_over(squares)), count * norm.ranks.size
    z = (z * paddle.rsqrt(squares / count + norm.eps)).astype(weight.dtype)
    return (z * (1 + weight if norm.zero_centered_gamma else weight)).reshape(x.shape)


def dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, attention: Attention, attention_mask: Tensor | None = None
) -> Tensor:
    """Attend: see `ops.interface`. The softmax is float32; fp8 is emulated.

    Raises ValueError for cu_seqlens that do not cover all tokens.
    """
    scale, causal, window, dropout, softcap = attention.scores
    if attention.quantizers is not None:
        return emulated_fp8_attention(q, k, v, scale, attention.quantizers).flatten(2)
    if attention.cu_seqlens is not None:
        return _attend_in_documents(q, k, v, attention.cu_seqlens, attention._replace(cu_seqlens=None))
    b, s, h, d = q.shape
    s_kv, h_kv = k.shape[1:3]
    q = (q * scale).transpose([0, 2, 1, 3]).reshape([b, h_kv, h // h_kv, s, d])
    k, v = (t.transpose([0, 2, 1, 3]).unsqueeze(2) for t in (k, v))
    products = soft_cap(paddle.matmul(q, k, transpose_y=True).astype("float32"), softcap)
    if attention_mask is not None:
        products = products + attention_mask.astype(products.dtype).unsqueeze(2)
    elif causal:
        hidden = paddle.full([s, s_kv], paddle.finfo(products.dtype).min, products.dtype)
        products = products + paddle.triu(hidden, diagonal=1 + s_kv - s)
    if window >= 0:
        position = paddle.arange(s_kv)
        near = position >= position[s_kv - s :].unsqueeze(1) - window
        products = paddle.where(near, products, paddle.full([], paddle.finfo(products.dtype).min, products.dtype))
    probabilities = F.dropout(_softmax(products, attention.softmax_offset), dropout)
    out = paddle.matmul(probabilities.astype(v.dtype), v)
    return out.reshape([b, h, s, -1]).transpose([0, 2, 1, 3]).reshape([b, s, -1])


def _softmax(products: Tensor, offset: Tensor | None) -> Tensor:
    """Return the softmax of [b, h_kv, queries to each, s, keys]; an offset [h] stands beside each head's keys."""
    if offset is None:
        return F.softmax(products, -1)
    beside = offset.astype(products.dtype).reshape([1, *products.shape[1:3], 1, 1]).expand([*products.shape[:-1], 1])
    return F.softmax(paddle.concat([products, beside], -1), -1)[..., :-1]


def _attend_in_documents(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, attention: Attention) -> Tensor:
    """Attend in each document alone, one after another."""
    check_cu_seqlens(cu_seqlens)
    (b, s), ends = q.shape[:2], cu_seqlens.numpy().tolist()
    lengths = [end - start for start, end in zip(ends, ends[1:], strict=False)]
    if ends[0] != 0 or ends[-1] != b * s or min(lengths) < 0:
        raise ValueError(f"cu_seqlens must rise from 0 to {b * s}, the number of tokens: {ends}")
    lengths = [length for length in lengths if length]
    of_each = [t.reshape([1, b * s, *t.shape[2:]]).split(lengths, 1) for t in (q, k, v)]
    outputs = [dot_product_attention(q, k, v, attention) for q, k, v in zip(*of_each, strict=True)]
    return paddle.concat(outputs, 1).reshape([b, s, -1])


def attention_with_lse(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Return (softmax(q·kᵀ·scale)·v, the logarithm of the sum of the scores' exponentials), in float32 inside."""
    q_heads, k_heads, v_heads = (_per_head(tensor, q.shape[2]) for tensor in (q, k, v))
    scores = _scores(q_heads, k_heads, scale, causal)
    lse = scores.logsumexp(-1, keepdim=True)
    return paddle.matmul((scores - lse).exp(), v_heads).transpose([0, 2, 1, 3]).astype(q.dtype), lse


def attention_with_lse_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, *, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv), by Dao et al., 2022 (arXiv 2205.14135), algorithm 4, in float32 inside."""
    q_heads, k_heads, v_heads, out, dout = (_per_head(tensor, q.shape[2]) for tensor in (q, k, v, out, dout))
    p = (_scores(q_heads, k_heads, scale, causal) - lse).exp()
    ds = p * (paddle.matmul(dout, v_heads, transpose_y=True) - (dout * out).sum(-1, keepdim=True)) * scale
    dq = _per_token(paddle.matmul(ds, k_heads), q)
    dk = _per_token(paddle.matmul(ds, q_heads, transpose_x=True), k)
    return dq, dk, _per_token(paddle.matmul(p, dout, transpose_x=True), v)


def _per_head(x: Tensor, heads: int) -> Tensor:
    """Return [b, s, h, d] as float32 [b, heads, s, d], the heads repeated."""
    b, s, h, d = x.shape
    x = x.astype("float32").transpose([0, 2, 1, 3])
    return x if h == heads else x.unsqueeze(2).expand([b, h, heads // h, s, d]).flatten(1, 2)


def _per_token(gradient: Tensor, like: Tensor) -> Tensor:
    """Undo `_per_head`: summed over the heads that are the same, with the shape and dtype of another tensor."""
    b, s, h, d = like.shape
    return gradient.reshape([b, h, -1, s, d]).sum(2).transpose([0, 2, 1, 3]).astype(like.dtype)


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    """Return [b, h, s, keys]."""
    scores = paddle.matmul(q, k, transpose_y=True) * scale
    return scores + paddle.triu(paddle.full(scores.shape[2:], -float("inf")), diagonal=1) if causal else scores


def rotary_attention(qkv: Tensor, freqs: Tensor | None, heads: Heads, attention: Attention) -> Tensor:
    """Return dot_product_attention(*rotary_qkv(qkv, freqs, heads), attention)."""
    return dot_product_attention(*rotary_qkv(qkv, freqs, heads), attention)


def check_attention(
    head_dim: int,
    window: int,
    masked: bool,
    dropout: float,
    softcap: float = 0.0,
    softmax_type: str = "vanilla",
    value_dim: int | None = None,
) -> None:
    """Raise nothing: there is all of it here."""


def check_fp8_attention(head_dim: int, sequence: int = 16, backward: bool = True) -> None:
    """Raise nothing: the emulation takes all."""


def check_packed_attention(softmax_type: str = "vanilla") -> None:
    """Raise nothing: documents are computed one by one, which all devices can."""
