"""The attention half of a layer."""

from __future__ import annotations

from paddle import Tensor

from paddle_te.ops.heads import Attention, Heads
from paddle_te.ops.interface import Ranks
from paddle_te.ops.norms import Norm
from paddle_te.ops.pd.attention import rotary_attention
from paddle_te.ops.pd.linear import layernorm_linear, linear
from paddle_te.ops.projection import Projection


def self_attention(
    x: Tensor,
    norm: Norm,
    qkv: Projection,
    freqs: Tensor | None,
    heads: Heads,
    attention: Attention,
    proj: Projection,
    *,
    max_sequence_length: int | None = None,
    tp: Ranks | None = None,
) -> Tensor:
    """linear(rotary_attention(layernorm_linear(x))) + x: see `ops.interface`."""
    projected, residual = layernorm_linear(x, norm, qkv, tp=tp)
    flat = x.ndim == 2
    if flat:
        projected = projected.reshape([-1, max_sequence_length, projected.shape[-1]])
    context = rotary_attention(projected, freqs, heads, attention)
    if flat:
        context = context.reshape([-1, context.shape[-1]])
    return linear(context, proj, residual=residual, parallel_mode="row", tp=tp)
