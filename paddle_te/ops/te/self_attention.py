"""The attention half of a layer as one Op, of the functions of its three: fewer PyLayers, fewer allocations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from paddle import Tensor

from paddle_te.ops.heads import Heads, Scores
from paddle_te.ops.interface import AttentionQuantizers, QuantizersOfTwo, Ranks
from paddle_te.ops.norms import Norm
from paddle_te.ops.te import autograd
from paddle_te.ops.te.attention import (
    AttentionSettings,
    in_float32,
    rotary_attention_backward,
    rotary_attention_forward,
)
from paddle_te.ops.te.gemm import drop_data
from paddle_te.ops.te.linear import (
    Wanted,
    layernorm_linear_backward,
    layernorm_linear_forward,
    linear_backward,
    linear_forward,
)
from paddle_te.ops.te.norm import NormSettings
from paddle_te.ops.te.quantized import quantized_together
from paddle_te.ops.te.recording import Op, OpInputs, Placeholder, Recorder
from paddle_te.ops.te.runtime import dtype_code


class SelfAttentionSettings(NamedTuple):
    """norm: its NormSettings. sequence: tokens of a sequence where x is [tokens, hidden], else None."""

    norm: NormSettings
    sequence: int | None
    attention: AttentionSettings


@dataclass(slots=True)
class _Saved:
    """What the three parts' backwards read. frozen: nothing before the projection wants a gradient."""

    qkv: Any
    attention: Any
    proj: Any
    frozen: bool


def _forward(rt: Recorder, inputs: OpInputs, settings: SelfAttentionSettings) -> tuple[Placeholder, _Saved]:
    x, ln_weight, ln_bias, qkv_weight, qkv_bias, freqs, proj_weight, proj_bias, cu_seqlens, *others = inputs.tensors
    q_weight, k_weight, softmax_offset = others
    of_qkv, of_proj, *of_attention = inputs.quantizers
    tp, train, s = inputs.tp, inputs.train, settings.sequence
    before = x, ln_weight, ln_bias, qkv_weight, qkv_bias
    weights, quantizers = (qkv_weight, proj_weight), (of_qkv, of_proj)
    w_qkv, w_proj = quantized_together(rt, weights, dtype_code("x", x), quantizers, train)
    given = *before, of_qkv, tp, train, settings.norm, w_qkv
    (qkv, residual), saved_qkv = layernorm_linear_forward(rt, *given, copies=True)
    if train:
        drop_data(rt, w_qkv)
    frozen = all([tensor is None or tensor.stop_gradient for tensor in (*before, *others)])
    *_, width = qkv.shape
    whole = qkv if s is None else qkv.reshaped([qkv.shape[0] // s, s, width])
    in_fp8 = [quantizers for quantizers in of_attention if quantizers]
    of_heads = whole, freqs, cu_seqlens, None, q_weight, k_weight, softmax_offset, in_fp8
    context, saved_attention = rotary_attention_forward(rt, *of_heads, train and not frozen, settings.attention, tp)
    if s is not None:
        context = context.reshaped([qkv.shape[0], context.shape[-1]])
    context.stop_gradient = frozen
    row = None if tp is None else "row"
    of_row = context, proj_weight, proj_bias, residual, of_proj, tp, train, row
    out, saved_proj = linear_forward(rt, *of_row, copy=saved_qkv.norm.copy, w=w_proj)
    return out, _Saved(saved_qkv, saved_attention, saved_proj, frozen)


def _backward(rt: Recorder, saved: _Saved, dy: Placeholder) -> tuple[Wanted, ...]:
    dcontext, dproj_weight, dproj_bias, _ = linear_backward(rt, saved.proj, dy)
    of_proj = None, dproj_weight, dproj_bias, None
    if saved.frozen or dcontext is None:
        return *[None] * 5, *of_proj, None, None, None
    dqkv, _, _, _, *of_others = rotary_attention_backward(rt, saved.attention, dcontext)
    return *layernorm_linear_backward(rt, saved.qkv, dqkv, dy), *of_proj, *of_others


_SELF_ATTENTION = Op(_forward, _backward, weights=(3, 6))


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
) -> Tensor:
    """linear(rotary_attention(layernorm_linear(x))) + x: see `ops.interface`."""
    sequence, qk_norm = max_sequence_length if x.ndim == 2 else None, heads.qk_norm
    others = *((None, None) if qk_norm is None else qk_norm[:2]), in_float32(softmax_offset)
    attention = AttentionSettings.of(heads, scores, attention_quantizers)
    return autograd.apply(
        _SELF_ATTENTION,
        (x, norm.weight, norm.bias, qkv_weight, qkv_bias, freqs, proj_weight, proj_bias, cu_seqlens, *others),
        SelfAttentionSettings(NormSettings.of(norm), sequence, attention),
        quantizers=(*quantizers, *(attention_quantizers or ())),
        tp=tp,
        fuse_wgrad_accumulation=fuse_wgrad_accumulation,
    )
