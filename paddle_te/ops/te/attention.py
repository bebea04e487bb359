"""Rotary embedding and fused attention as PyLayers."""

import math
import os

import paddle
from paddle.autograd import PyLayer

from paddle_te.native import Mask, QKVLayout, rope
from paddle_te.ops.te import runtime
from paddle_te.ops.te.runtime import FLOAT32, dense, dtype_code, needs_grad

SEPARATE, PACKED, CAUSAL = int(QKVLayout.BSHD_BSHD_BSHD), int(QKVLayout.BS3HD), int(Mask.CAUSAL)


def _deterministic():
    """TE's own switch: NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 asks cuDNN for a backward without atomics."""
    return os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1") == "0"


class _Heads:
    """Sizes of one attention: q [b, s, h, d]; k and v [b, s, h_kv, d]; dtype and its code for TE."""

    __slots__ = ("q", "kv", "tokens", "rope", "dtype", "code")

    def __init__(self, b, s, h, h_kv, d, dtype, code):
        self.q, self.kv, self.tokens = (b, s, h, d), (b, s, h_kv, d), b * s
        self.rope = b * s, s, h, h_kv, d, code
        self.dtype, self.code = dtype, code

    @property
    def width(self):
        """Of q, k and v of one token, side by side."""
        (*_, h, d), h_kv = self.q, self.kv[2]
        return (h + 2 * h_kv) * d

    @property
    def packed(self):
        """Whether q, k and v may lie side by side: cuDNN through TE takes that with equal heads only."""
        return self.q == self.kv

    def views(self, rt, base):
        """(q, k, v) as native tensors in one buffer of tokens · width: packed per token, or one after another."""
        bytes_of = lambda shape: math.prod(shape) * 2  # noqa: E731 (bfloat16 or float16)
        first, second = bytes_of(self.q), bytes_of(self.kv)
        if self.packed:
            first, second = first // self.tokens, second // self.tokens
        return (
            rt.te.Tensor(base, self.q, self.code),
            rt.te.Tensor(base + first, self.kv, self.code),
            rt.te.Tensor(base + first + second, self.kv, self.code),
        )

    def q_view(self, rt, tensor):
        return rt.te.Tensor(tensor.data_ptr(), self.q, self.code)

    def kv_view(self, rt, tensor):
        return rt.te.Tensor(tensor.data_ptr(), self.kv, self.code)

    def new_buffer(self, rt):
        return rt.empty([self.tokens, self.width], self.dtype)


def _attend(rt, heads, qkv, scale, layout, train):
    """(out [b, s, h·d], softmax statistics float32 [b, h, s, 1]) from native q, k, v."""
    b, s, h, d = heads.q
    out, stats = rt.empty([b, s, h * d], heads.dtype), rt.empty([b, h, s, 1], paddle.float32)
    stats_view = rt.te.Tensor(stats.data_ptr(), (b, h, s, 1), FLOAT32)
    rt.te.attention_fwd(*qkv, heads.q_view(rt, out), stats_view, scale, layout, CAUSAL, train, rt.stream)
    return out, stats


def _attend_backward(rt, heads, qkv, out, stats, dout, dqkv, scale, layout):
    """Fills the native dq, dk, dv."""
    b, s, h, _ = heads.q
    rt.te.attention_bwd(
        *qkv,
        heads.q_view(rt, out),
        heads.q_view(rt, dout),
        rt.te.Tensor(stats.data_ptr(), (b, h, s, 1), FLOAT32),
        *dqkv,
        scale,
        layout,
        CAUSAL,
        rt.stream,
        deterministic=_deterministic(),
    )


class _RotaryQKV(PyLayer):
    @staticmethod
    def forward(ctx, qkv, freqs, heads):
        rt = runtime.current()
        q = rt.empty(list(heads.q), heads.dtype)
        k, v = (rt.empty(list(heads.kv), heads.dtype) for _ in range(2))
        pointers = (tensor.data_ptr() for tensor in (qkv, q, k, v, freqs))
        rope.rope_split(rt.te, rt.stream, *pointers, *heads.rope)
        ctx.saved = freqs, heads, not qkv.stop_gradient
        return q, k, v

    @staticmethod
    def backward(ctx, dq, dk, dv):
        freqs, heads, needs = ctx.saved
        if not needs:
            return None, None
        rt = runtime.current()
        b, s = heads.q[:2]
        dqkv = rt.empty([b, s, heads.width], heads.dtype)
        grads = [dense(grad) for grad in (dq, dk, dv)]
        pointers = (tensor.data_ptr() for tensor in (*grads, dqkv, freqs))
        rope.rope_merge(rt.te, rt.stream, *pointers, *heads.rope)
        return dqkv, None


class _DotProductAttention(PyLayer):
    @staticmethod
    def forward(ctx, q, k, v, scale, heads, train):
        rt = runtime.current()
        views = heads.q_view(rt, q), heads.kv_view(rt, k), heads.kv_view(rt, v)
        out, stats = _attend(rt, heads, views, scale, SEPARATE, train)
        if train:
            # detached: with its graph the output would keep this ctx, and itself, alive
            ctx.saved = q, k, v, views, out.detach(), stats, scale, heads
        return out

    @staticmethod
    def backward(ctx, dout):
        rt = runtime.current()
        (q, k, v, views, out, stats, scale, heads), ctx.saved = ctx.saved, None
        dq, dk, dv = (rt.empty(tensor.shape, heads.dtype) for tensor in (q, k, v))
        grads = heads.q_view(rt, dq), heads.kv_view(rt, dk), heads.kv_view(rt, dv)
        _attend_backward(rt, heads, views, out, stats, dense(dout), grads, scale, SEPARATE)
        pairs = (q, dq), (k, dk), (v, dv)
        return tuple(None if tensor.stop_gradient else grad for tensor, grad in pairs)


class _RotaryAttention(PyLayer):
    """Both in one: q, k and v stay in one buffer, packed as cuDNN takes them where it does."""

    @staticmethod
    def forward(ctx, qkv, freqs, scale, heads, train):
        rt = runtime.current()
        rotated = heads.new_buffer(rt)
        views = heads.views(rt, rotated.data_ptr())
        source, angles = qkv.data_ptr(), freqs.data_ptr()
        if heads.packed:
            rope.rope_packed(rt.te, rt.stream, source, rotated.data_ptr(), angles, *heads.rope)
        else:
            rope.rope_split(rt.te, rt.stream, source, *(view.data_ptr for view in views), angles, *heads.rope)
        out, stats = _attend(rt, heads, views, scale, PACKED if heads.packed else SEPARATE, train)
        if train:
            ctx.saved = rotated, views, freqs, out.detach(), stats, scale, heads, qkv.shape
        return out

    @staticmethod
    def backward(ctx, dout):
        rt = runtime.current()
        (_rotated, views, freqs, out, stats, scale, heads, shape), ctx.saved = ctx.saved, None
        dqkv = rt.empty(shape, heads.dtype)
        buffer = dqkv if heads.packed else heads.new_buffer(rt)
        grads = heads.views(rt, buffer.data_ptr())
        layout = PACKED if heads.packed else SEPARATE
        _attend_backward(rt, heads, views, out, stats, dense(dout), grads, scale, layout)
        target, angles = dqkv.data_ptr(), freqs.data_ptr()
        if heads.packed:
            rope.rope_packed(rt.te, rt.stream, target, target, angles, *heads.rope, backward=True)
        else:
            rope.rope_merge(rt.te, rt.stream, *(grad.data_ptr for grad in grads), target, angles, *heads.rope)
        return dqkv, None


def _heads_of(qkv, freqs, num_heads, num_kv_heads):
    code = dtype_code("qkv", qkv)
    dtype_code("rotary_pos_emb", freqs, (paddle.float32,))
    b, s, width = qkv.shape
    if freqs.ndim != 2 or freqs.shape[0] < s:
        raise NotImplementedError(
            f"backend transformer_engine takes angles [s, d] of positions 0 to {s - 1} for all sequences, not "
            f"{list(freqs.shape)}; use backend paddle for others"
        )
    return _Heads(b, s, num_heads, num_kv_heads, width // (num_heads + 2 * num_kv_heads), qkv.dtype, code)


def rotary_qkv(qkv, freqs, num_heads, num_kv_heads):
    """Splits the fused projection into heads and rotates q and k by `freqs`, in one kernel.

    qkv: [b, s, (num_heads + 2·num_kv_heads)·d], q, k and v stacked; freqs: angles, float32 [≥ s, d].
    Returns q [b, s, num_heads, d], k and v [b, s, num_kv_heads, d].
    """
    return _RotaryQKV.apply(dense(qkv), freqs, _heads_of(qkv, freqs, num_heads, num_kv_heads))


def rotary_attention(qkv, freqs, num_heads, num_kv_heads, *, scale):
    """dot_product_attention(*rotary_qkv(qkv, …)), causal, without q, k and v in between."""
    heads = _heads_of(qkv, freqs, num_heads, num_kv_heads)
    if qkv.stop_gradient:
        return _RotaryAttention.apply(dense(qkv.detach()), freqs, scale, heads, False)
    return _RotaryAttention.apply(dense(qkv), freqs, scale, heads, needs_grad(qkv))


def dot_product_attention(q, k, v, *, scale, attention_mask=None):
    """Causal softmax(q·kᵀ·scale)·v per head through cuDNN's fused attention.

    q: [b, s, h, d]; k, v: [b, s, h_kv, d], h a multiple of h_kv. Returns [b, s, h·d].
    Raises NotImplementedError for a mask or for more keys than queries.
    """
    if attention_mask is not None:
        raise NotImplementedError(
            "backend transformer_engine has causal attention over whole sequences only: leave attention_mask out, "
            "or use backend paddle"
        )
    b, s, h, d = q.shape
    if k.shape[1] != s:
        raise NotImplementedError(f"{s} queries for {k.shape[1]} keys: use backend paddle to generate text")
    heads = _Heads(b, s, h, k.shape[2], d, q.dtype, dtype_code("query_layer", q))
    return _DotProductAttention.apply(dense(q), dense(k), dense(v), scale, heads, needs_grad(q, k, v))
