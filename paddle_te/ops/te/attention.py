"""Rotary embedding and fused attention as PyLayers."""

import os

import paddle
from paddle.autograd import PyLayer

from paddle_te.native import Mask, QKVLayout, rope
from paddle_te.ops.te import runtime
from paddle_te.ops.te.runtime import FLOAT32, dense, dtype_code, needs_grad

LAYOUT, CAUSAL = int(QKVLayout.BSHD_BSHD_BSHD), int(Mask.CAUSAL)


def _deterministic():
    """TE's own switch: NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 asks cuDNN for a backward without atomics."""
    return os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1") == "0"


class _RotaryQKV(PyLayer):
    @staticmethod
    def forward(ctx, qkv, freqs, num_heads, num_kv_heads, code):
        rt = runtime.current()
        b, s, width = qkv.shape
        d = width // (num_heads + 2 * num_kv_heads)
        q = rt.empty([b, s, num_heads, d], qkv.dtype)
        k, v = (rt.empty([b, s, num_kv_heads, d], qkv.dtype) for _ in range(2))
        ctx.sizes = b * s, s, num_heads, num_kv_heads, d, code
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
    dtype_code("rotary_pos_emb", freqs, (paddle.float32,))
    return _RotaryQKV.apply(dense(qkv), freqs, num_heads, num_kv_heads, dtype_code("qkv", qkv))


class _DotProductAttention(PyLayer):
    @staticmethod
    def forward(ctx, q, k, v, scale, train, code):
        rt = runtime.current()
        b, s, h, d = q.shape
        out = rt.empty([b, s, h * d], q.dtype)
        stats = rt.empty([b, h, s, 1], paddle.float32)
        views = _Views(rt, (b, s, h, d), (b, s, k.shape[2], d), code)
        stats_view = rt.te.Tensor(stats.data_ptr(), (b, h, s, 1), FLOAT32)
        rt.te.attention_fwd(
            views.q(q), views.kv(k), views.kv(v), views.q(out), stats_view, scale, LAYOUT, CAUSAL, train, rt.stream
        )
        if train:
            # detached: with its graph the output would keep this ctx, and itself, alive
            ctx.saved = q, k, v, out.detach(), stats, stats_view, views, scale
        return out

    @staticmethod
    def backward(ctx, dout):
        rt = runtime.current()
        (q, k, v, out, _stats, stats_view, views, scale), ctx.saved = ctx.saved, None
        dq, dk, dv = (rt.empty(tensor.shape, tensor.dtype) for tensor in (q, k, v))
        dout = dense(dout)
        rt.te.attention_bwd(
            views.q(q),
            views.kv(k),
            views.kv(v),
            views.q(out),
            views.q(dout),
            stats_view,
            views.q(dq),
            views.kv(dk),
            views.kv(dv),
            scale,
            LAYOUT,
            CAUSAL,
            rt.stream,
            deterministic=_deterministic(),
        )
        grads = (q, dq), (k, dk), (v, dv)
        return tuple(None if tensor.stop_gradient else grad for tensor, grad in grads)


class _Views:
    """Native tensors of q's and of k's shape."""

    __slots__ = ("rt", "q_shape", "kv_shape", "code")

    def __init__(self, rt, q_shape, kv_shape, code):
        self.rt, self.q_shape, self.kv_shape, self.code = rt, q_shape, kv_shape, code

    def q(self, tensor):
        return self.rt.te.Tensor(tensor.data_ptr(), self.q_shape, self.code)

    def kv(self, tensor):
        return self.rt.te.Tensor(tensor.data_ptr(), self.kv_shape, self.code)


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
    code = dtype_code("query_layer", q)
    return _DotProductAttention.apply(dense(q), dense(k), dense(v), scale, needs_grad(q, k, v), code)
