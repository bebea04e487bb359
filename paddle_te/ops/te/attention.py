"""Rotary embedding and fused attention as PyLayers."""

import os

import paddle
from paddle.autograd import PyLayer

from paddle_te.native import Mask, QKVLayout, rope
from paddle_te.ops.te import runtime
from paddle_te.ops.te.runtime import DTYPES, check_dtype, dense, needs_grad

LAYOUT, CAUSAL = int(QKVLayout.BSHD_BSHD_BSHD), int(Mask.CAUSAL)


def _deterministic():
    """TE's own switch: NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 asks cuDNN for a backward without atomics."""
    return os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1") == "0"


class _RotaryQKV(PyLayer):
    @staticmethod
    def forward(ctx, qkv, freqs, num_heads, num_kv_heads):
        rt = runtime.current()
        b, s, width = qkv.shape
        d = width // (num_heads + 2 * num_kv_heads)
        q = rt.empty([b, s, num_heads, d], qkv.dtype)
        k, v = (rt.empty([b, s, num_kv_heads, d], qkv.dtype) for _ in range(2))
        ctx.sizes = b * s, s, num_heads, num_kv_heads, d, DTYPES[qkv.dtype]
        ctx.freqs, ctx.qkv_grad = freqs, not qkv.stop_gradient
        pointers = (tensor.data_ptr() for tensor in (qkv, q, k, v, freqs))
        rope.rope_split(rt.te, rt.stream, *pointers, *ctx.sizes)
        return q, k, v

    @staticmethod
    def backward(ctx, dq, dk, dv):
        if not ctx.qkv_grad:
            return None, None
        rt = runtime.current()
        tokens, s, num_heads, num_kv_heads, d, _ = ctx.sizes
        dqkv = rt.empty([tokens // s, s, (num_heads + 2 * num_kv_heads) * d], dq.dtype)
        grads = [dense(grad) for grad in (dq, dk, dv)]
        pointers = (tensor.data_ptr() for tensor in (*grads, dqkv, ctx.freqs))
        rope.rope_merge(rt.te, rt.stream, *pointers, *ctx.sizes)
        return dqkv, None


def rotary_qkv(qkv, freqs, num_heads, num_kv_heads):
    """Splits the fused projection into heads and rotates q and k by `freqs`, in one kernel.

    qkv: [b, s, (num_heads + 2·num_kv_heads)·d], q, k and v stacked; freqs: angles, float32 [≥ s, d].
    Returns q [b, s, num_heads, d], k and v [b, s, num_kv_heads, d].
    """
    check_dtype("qkv", qkv)
    check_dtype("rotary_pos_emb", freqs, (paddle.float32,))
    return _RotaryQKV.apply(dense(qkv), freqs, num_heads, num_kv_heads)


class _DotProductAttention(PyLayer):
    @staticmethod
    def forward(ctx, q, k, v, scale, train):
        rt = runtime.current()
        b, s, h, d = q.shape
        out = rt.empty([b, s, h * d], q.dtype)
        stats = rt.empty([b, h, s, 1], paddle.float32)
        views = [rt.view(tensor) for tensor in (q, k, v)]
        rt.te.attention_fwd(*views, rt.view(out, (b, s, h, d)), rt.view(stats), scale, LAYOUT, CAUSAL, train, rt.stream)
        if train:
            ctx.save_for_backward(q, k, v, out, stats)
            ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, dout):
        rt = runtime.current()
        q, k, v, out, stats = ctx.saved_tensor()
        grads = [rt.empty(tensor.shape, tensor.dtype) for tensor in (q, k, v)]
        shape = tuple(q.shape)
        rt.te.attention_bwd(
            *(rt.view(tensor) for tensor in (q, k, v)),
            rt.view(out, shape),
            rt.view(dense(dout), shape),
            rt.view(stats),
            *(rt.view(tensor) for tensor in grads),
            ctx.scale,
            LAYOUT,
            CAUSAL,
            rt.stream,
            deterministic=_deterministic(),
        )
        return tuple(None if tensor.stop_gradient else grad for tensor, grad in zip((q, k, v), grads, strict=True))


def dot_product_attention(q, k, v, *, scale, attention_mask=None):
    """Causal softmax(q·kᵀ·scale)·v per head through cuDNN's fused attention.

    q: [b, s, h, d]; k, v: [b, s, h_kv, d], h a multiple of h_kv. Returns [b, s, h·d].
    Raises NotImplementedError for a mask or for more keys than queries: use backend paddle for these.
    """
    if attention_mask is not None:
        raise NotImplementedError(
            "backend transformer_engine has causal attention over whole sequences only: leave attention_mask out, "
            "or use backend paddle"
        )
    if k.shape[1] != q.shape[1]:
        raise NotImplementedError(f"{q.shape[1]} queries for {k.shape[1]} keys: use backend paddle to generate text")
    check_dtype("query_layer", q)
    return _DotProductAttention.apply(dense(q), dense(k), dense(v), scale, needs_grad(q, k, v))
