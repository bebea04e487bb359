"""The attention half of a layer."""

from __future__ import annotations

from paddle import Tensor

from paddle_te.ops.heads import Heads, Scores
from paddle_te.ops.interface import AttentionQuantizers, QuantizersOfTwo, Ranks
from paddle_te.ops.low_rank import LowRankUpdate
from paddle_te.ops.norms import Norm
from paddle_te.ops.pd.attention import rotary_attention
from paddle_te.ops.pd.linear import layernorm_linear, linear


def self_attention(
    x: Tensor,
    norm: Norm,
    qkv_weight: Tensor,
    freqs: Tensor | None,
    proj_weight: Tensor,
    heads: Heads,
    scores: Scores,
    *,
    qkv_bias: Tensor | None = None,
    proj_bias: Tensor | None = None,
    softmax_offset: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_sequence_length: int | None = None,
    tp: Ranks | None = None,
    quantizers: QuantizersOfTwo = (None, None),
    attention_quantizers: AttentionQuantizers | None = None,
    fuse_wgrad_accumulation: bool = False,
    low_rank: tuple[LowRankUpdate | None, LowRankUpdate | None] = (None, None),
) -> Tensor:
    """linear(rotary_attention(layernorm_linear(x))) + x: see `ops.interface`."""
    (of_qkv, of_proj), (beside_qkv, beside_proj) = quantizers, low_rank
    fuse, row = fuse_wgrad_accumulation, None if tp is None else "row"
    qkv, residual = layernorm_linear(
        x,
        norm,
        qkv_weight,
        bias=qkv_bias,
        tp=tp,
        quantizers=of_qkv,
        fuse_wgrad_accumulation=fuse,
        low_rank=beside_qkv,
    )
    flat = qkv.ndim == 2
    if flat:
        qkv = qkv.reshape([-1, max_sequence_length, qkv.shape[-1]])
    context = rotary_attention(
        qkv,
        freqs,
        heads,
        scores,
        softmax_offset=softmax_offset,
        cu_seqlens=cu_seqlens,
        quantizers=attention_quantizers,
    )
    if flat:
        context = context.reshape([-1, context.shape[-1]])
    return linear(
        context,
        proj_weight,
        bias=proj_bias,
        residual=residual,
        parallel_mode=row,
        tp=tp,
        quantizers=of_proj,
        fuse_wgrad_accumulation=fuse,
        low_rank=beside_proj,
    )
