"""Rotary embedding and fused attention.

Together they are an Op, as training runs them (see paddle_te.ops.te.recording). One by one they are PyLayers that call
the library directly: they serve masks, caches and generation, whose sizes change from call to call, so that a recorded
program would hardly ever be used again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_te.fp8 import has_fp8_backward
from paddle_te.ops.documents import check_cu_seqlens
from paddle_te.ops.heads import Attention, AttentionQuantizers, Heads, Scores
from paddle_te.ops.kept import kept_on
from paddle_te.ops.te import autograd, runtime
from paddle_te.ops.te.core_attention import (
    KEY_MULTIPLE,
    Attended,
    AttentionSizes,
    Bias,
    HeadSizes,
    Sequences,
    Softmax,
    Target,
    Views,
    additive,
    attend,
    attend_backward,
    check_offset,
    draw_rng_state,
    in_float32,
    sizes_of,
)
from paddle_te.ops.te.float8_attention import Float8Attention, deterministic
from paddle_te.ops.te.recording import Op, OpInputs, Placeholder, Recorder
from paddle_te.ops.te.rotation import Rotation, RotationSettings, check_norms, heads_of
from paddle_te.ops.te.runtime import (
    FLOAT32,
    check_tensor,
    dense,
    dtype_code,
    needs_grad,
)


def _backward_done(quantizers: AttentionQuantizers | None) -> None:
    if quantizers is not None:
        quantizers[0].forward_pass.backward_done()


class _DotProductAttention(PyLayer):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        offset: Tensor | None,
        softmax: Softmax,
        heads: AttentionSizes,
        train: bool,
        quantizers: AttentionQuantizers | None,
    ) -> Tensor:
        """offset: the softmax's, here for its gradient."""
        rt = runtime.current()
        views = heads.views_of(rt, q, k, v)
        memory = rt.empty(list(heads.stats), paddle.float32)
        stats = rt.tensor(memory.data_ptr(), heads.stats, FLOAT32)
        if quantizers is None:
            out = attend(rt, heads, views, stats, softmax, heads.separate, train)
        else:
            out = Float8Attention(rt, heads, heads.separate, softmax.scale, quantizers, stats).forward(rt, views, train)
        if train:
            # detached: with its graph the output would keep this ctx, and itself, alive
            ctx.saved = q, k, v, memory, Attended(views, out.detach(), stats), softmax, heads, quantizers
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        rt = runtime.current()
        (q, k, v, _memory, attended, softmax, heads, quantizers), ctx.saved = ctx.saved, None
        dq, dk, dv = (rt.empty(tensor.shape, heads.dtype) for tensor in (q, k, v))
        grads = heads.views_of(rt, dq, dk, dv)
        doffset = attend_backward(rt, heads, attended, dense(dout), grads, softmax, heads.separate)
        _backward_done(quantizers)
        pairs = (q, dq), (k, dk), (v, dv)
        found = tuple(None if tensor.stop_gradient else grad for tensor, grad in pairs)
        return found if softmax.offset is None else (*found, softmax.wanted(doffset))


class AttentionSettings(NamedTuple):
    """num_heads, num_kv_heads: of this rank.

    scores: a Scores. backward_in_fp8: attention's backward too. deterministic: as the environment asked for when
    the call was made; it decides on the calls too.
    """

    num_heads: int
    num_kv_heads: int
    rotation: RotationSettings
    scores: Scores
    backward_in_fp8: bool
    deterministic: bool

    @classmethod
    def of(cls, heads: Heads, attention: Attention) -> AttentionSettings:
        in_fp8, of_rotation = has_fp8_backward(attention.quantizers), RotationSettings.of(heads)
        return cls(heads.num_heads, heads.num_kv_heads, of_rotation, attention.scores, in_fp8, deterministic())


@dataclass(slots=True)
class _SavedAttention:
    """Hold what backward reads. in_fp8: the Float8Attention, if its backward is in fp8; else in_16_bits."""

    heads: AttentionSizes
    qkv: Placeholder
    rotation: Rotation
    softmax: Softmax
    in_fp8: Float8Attention | None = None
    in_16_bits: Attended | None = None


def _softmax_of(inputs: OpInputs, settings: AttentionSettings, heads: AttentionSizes) -> Softmax:
    """Return the Softmax of `rotary_attention_forward`. Raise as `check_offset` for an offset that does not fit."""
    _, _, cu_seqlens, rng_state, _, _, softmax_offset = inputs.tensors
    scale, causal, window, dropout, _ = settings.scores  # `check_attention` refuses a soft cap
    check_offset(heads, softmax_offset)
    seen = Sequences.of(cu_seqlens, causal, window, heads.longest)
    return Softmax(scale, seen, dropout, rng_state, softmax_offset)


def rotary_attention_forward(
    rt: Recorder, inputs: OpInputs, settings: AttentionSettings
) -> tuple[Placeholder, _SavedAttention]:
    """Return (out, _SavedAttention). q, k and v stay in one buffer; in fp8 they take one cast.

    inputs: its tensors are qkv and, each of them or None, the angles, the documents' cu_seqlens, the random numbers'
    state (`draw_rng_state`), the weights of the norms of q and k, and softmax_offset in float32; its quantizers are
    attention's three, or none; its tp those that norm over all heads.
    """
    qkv, freqs, cu_seqlens, _, q_weight, k_weight, _ = inputs.tensors
    quantizers, scale = [each for each in inputs.quantizers if each], settings.scores.scale
    heads = heads_of(qkv, freqs, settings.num_heads, settings.num_kv_heads, cu_seqlens)
    softmax = _softmax_of(inputs, settings, heads)
    check_norms(heads, q_weight, k_weight, settings.rotation)
    rotation = Rotation(freqs, q_weight, k_weight, settings.rotation, inputs.tp)
    saved = _SavedAttention(heads, qkv, rotation, softmax)
    stays, stats = rotation.stays(heads), None
    if settings.backward_in_fp8 and rotation.casts(heads, quantizers):
        saved.in_fp8 = Float8Attention(rt, heads, heads.layout, scale, quantizers)
        rotation.forward_in_fp8(rt, heads, qkv, saved.in_fp8.qkv)
        return saved.in_fp8.forward(rt, None, inputs.train), saved
    if settings.backward_in_fp8:
        memory = qkv if stays else heads.new_buffer(rt)
    elif stays:
        memory, stats = qkv, heads.new_stats(rt)
    else:
        memory, stats = heads.new_buffer_and_stats(rt)
    views = heads.views(rt, memory.data_ptr())
    if not stays:
        rotation.forward(rt, heads, qkv, _addresses(heads, views))
    whole = heads.whole_view(rt, memory.data_ptr())
    if settings.backward_in_fp8:
        saved.in_fp8 = Float8Attention(rt, heads, heads.layout, scale, quantizers)
        return saved.in_fp8.forward(rt, (whole,), inputs.train), saved
    if quantizers:
        out = Float8Attention(rt, heads, heads.layout, scale, quantizers, stats).forward(rt, (whole,), inputs.train)
    else:
        out = attend(rt, heads, views, stats, softmax, heads.layout, inputs.train)
    saved.in_16_bits = Attended(views, out, stats)
    return out, saved


def rotary_attention_backward(
    rt: Recorder, saved: _SavedAttention, dout: Placeholder
) -> tuple[Placeholder, None, None, None, Any, Any, Any]:
    """Return (dqkv, None for angles, documents and random state, the gradients of norms' weights and offset)."""
    heads, attention, doffset = saved.heads, saved.in_16_bits, ()
    dqkv = rt.empty(saved.qkv.shape, heads.dtype)
    buffer = dqkv if heads.packed else heads.new_buffer(rt)
    grads = heads.views(rt, buffer.data_ptr())
    if saved.in_fp8:
        saved.in_fp8.backward(rt, dout, (heads.whole_view(rt, buffer.data_ptr()),))
    else:
        assert attention is not None  # where the backward is not in fp8
        doffset = attend_backward(rt, heads, attention, dout, grads, saved.softmax, heads.layout)
    of_weights = None, None
    if not saved.rotation.stays(heads):
        of_weights = saved.rotation.backward(rt, heads, _addresses(heads, grads), saved.qkv, dqkv)
    return dqkv, None, None, None, *of_weights, saved.softmax.wanted(doffset)


def _addresses(heads: AttentionSizes, views: Views) -> Target:
    """Return where native q, k and v lie: the address of the buffer that they share, or those of three."""
    q, k, v = (view.data_ptr for view in views)
    return q if heads.packed else (q, k, v)


def _rotary_attention_backward(
    rt: Recorder, saved: _SavedAttention, dout: Placeholder
) -> tuple[Placeholder | None, ...]:
    dqkv, *others = rotary_attention_backward(rt, saved, dout)
    return None if saved.qkv.stop_gradient else dqkv, *others  # norms' weights and offset may want gradients then


_ROTARY_ATTENTION = Op(rotary_attention_forward, _rotary_attention_backward)


class _Float8DotProductAttention(PyLayer):
    """_DotProductAttention in fp8, backward too."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax: Softmax,
        heads: AttentionSizes,
        train: bool,
        quantizers: AttentionQuantizers,
    ) -> Tensor:
        rt = runtime.current()
        views = heads.views_of(rt, q, k, v)
        attention = Float8Attention(rt, heads, heads.separate, softmax.scale, quantizers)
        out = attention.forward(rt, views, train)
        if train:
            ctx.saved = attention, [not tensor.stop_gradient for tensor in (q, k, v)]
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        rt = runtime.current()
        (attention, needs), ctx.saved = ctx.saved, None
        heads = attention.heads
        dq, dk, dv = (rt.empty(list(shape), heads.dtype) for shape in (heads.q, heads.kv, heads.v))
        views = heads.views_of(rt, dq, dk, dv)
        attention.backward(rt, dense(dout), views)
        _backward_done(attention.quantizers)
        return tuple(grad if needed else None for grad, needed in zip((dq, dk, dv), needs, strict=True))


def rotary_attention(qkv: Tensor, freqs: Tensor | None, heads: Heads, attention: Attention) -> Tensor:
    """dot_product_attention(*rotary_qkv(qkv, freqs, heads), attention) without q, k and v in between."""
    scores, softmax_offset, cu_seqlens, quantizers = attention
    weights = (None, None) if heads.qk_norm is None else heads.qk_norm[:2]
    tensors = qkv, freqs, cu_seqlens, draw_rng_state(scores.dropout), *weights, in_float32(softmax_offset)
    settings = AttentionSettings.of(heads, attention)
    tp = heads.qk_norm and heads.qk_norm.ranks
    return autograd.apply(_ROTARY_ATTENTION, tensors, settings, quantizers=quantizers or (), tp=tp)


def dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, attention: Attention, attention_mask: Tensor | None = None
) -> Tensor:
    """See `ops.interface`; through cuDNN's fused attention.

    What a mask becomes is kept on it for the next layers: one that changes in place must do so by an operation that
    Paddle counts (`inplace_version`; set_value and copy_ are none). It gets no gradient: ValueError if it wants one.
    Raises TypeError and ValueError for tensors that do not fit each other.
    A mask, or s_kv ≠ s, costs memory of b·s·s_kv numbers (twice that in backward), which other attention spares.
    In fp8 (quantizers) there is neither.
    """
    scores, softmax_offset, cu_seqlens, quantizers = attention
    scale, causal, window, dropout, _ = scores  # `check_attention` refuses a soft cap
    (b, s, h, d), (_, keys, h_kv, _), value_dim = q.shape, k.shape, v.shape[-1]
    code = dtype_code("query_layer", q)
    check_cu_seqlens(cu_seqlens)
    if softmax_offset is not None and s == 1 and cu_seqlens is None:
        return _attend_twice(q, k, v, attention, attention_mask)
    for name, tensor, width in ("key_layer", k, d), ("value_layer", v, value_dim):
        check_tensor(name, tensor, [b, keys if cu_seqlens is None else s, h_kv, width], q.dtype)
    if cu_seqlens is not None or quantizers is not None or attention_mask is None and keys == s:
        seen = Sequences.of(cu_seqlens, causal, window, q.shape[1] if cu_seqlens is None else q.shape[0] * q.shape[1])
    else:
        padding = -keys % KEY_MULTIPLE
        seen = Bias(additive(attention_mask, s, keys, padding, q.dtype, causal, window))
        k, v = (_longer(tensor, padding) for tensor in (k, v))
    heads = sizes_of(b, s, HeadSizes(h, h_kv, d, value_dim), code, k.shape[1], s, cu_seqlens is not None)
    offset = in_float32(softmax_offset)
    check_offset(heads, offset)
    softmax, of_heads = Softmax(scale, seen, dropout, draw_rng_state(dropout), offset), (dense(q), dense(k), dense(v))
    if has_fp8_backward(quantizers):
        return _Float8DotProductAttention.apply(*of_heads, softmax, heads, needs_grad(q, k, v), quantizers)
    wanted = needs_grad(*of_heads, *([] if offset is None else [offset]))
    return _DotProductAttention.apply(*of_heads, offset, softmax, heads, wanted, quantizers)


def _attend_twice(q: Tensor, k: Tensor, v: Tensor, attention: Attention, attention_mask: Tensor | None) -> Tensor:
    """Attend with an offset for one token, as generation with a cache has it: TE's library takes it for two or more.

    The token is there twice. The second of them, the last query, sees what one would.
    """
    mask = None if attention_mask is None else kept_on(attention_mask, _of_two_queries)
    q = paddle.concat([q, q], 1)
    return dot_product_attention(q, k, v, attention, mask)[:, 1:]


def _of_two_queries(mask: Tensor) -> Tensor:
    """Return the mask of a query for two."""
    return paddle.concat([mask, mask], 2)


def attention_with_lse(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """(softmax(q·kᵀ·scale)·v, the logarithm of the sum of the scores' exponentials): see `ops`."""
    rt, heads = runtime.current(), _heads_of_three(q, k)
    q, k, v = (dense(tensor) for tensor in (q, k, v))
    lse = rt.empty(list(heads.stats), paddle.float32)
    views = heads.views_of(rt, q, k, v)
    stats = rt.tensor(lse.data_ptr(), heads.stats, FLOAT32)
    softmax = Softmax(scale, Sequences(causal))
    return attend(rt, heads, views, stats, softmax, heads.separate, True).reshape(q.shape), lse


def attention_with_lse_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, *, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv): cuDNN's backward, for which it is one whether out and lse are of these keys or of more."""
    rt, heads = runtime.current(), _heads_of_three(q, k)
    q, k, v, out, lse, dout = (dense(tensor) for tensor in (q, k, v, out, lse, dout))
    dq, dk, dv = (rt.empty(tensor.shape, heads.dtype) for tensor in (q, k, v))
    grads = heads.views_of(rt, dq, dk, dv)
    stats, softmax = rt.tensor(lse.data_ptr(), heads.stats, FLOAT32), Softmax(scale, Sequences(causal))
    attended = Attended(heads.views_of(rt, q, k, v), out, stats)
    attend_backward(rt, heads, attended, dout, grads, softmax, heads.separate)
    return dq, dk, dv


def _heads_of_three(q: Tensor, k: Tensor) -> AttentionSizes:
    (b, s, h, d), (_, keys, h_kv, _) = q.shape, k.shape
    return sizes_of(b, s, HeadSizes(h, h_kv, d), dtype_code("query_layer", q), keys, s)


def _longer(tensor: Tensor, n: int) -> Tensor:
    """Return [b, keys, h, d] with n keys of zeros appended."""
    if n == 0:
        return tensor
    b, _, h, d = tensor.shape
    return paddle.concat([tensor, paddle.zeros([b, n, h, d], tensor.dtype)], 1)
