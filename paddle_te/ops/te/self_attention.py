"""The attention half of a layer as one Op, of the functions of its three: fewer PyLayers, fewer allocations.

With low-rank products beside its GEMMs it is another Op, of the functions that these have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from paddle import Tensor

from paddle_te.ops.heads import Attention, Heads
from paddle_te.ops.interface import Ranks
from paddle_te.ops.norms import Norm
from paddle_te.ops.projection import Projection
from paddle_te.ops.te import autograd
from paddle_te.ops.te.attention import (
    AttentionSettings,
    rotary_attention_backward,
    rotary_attention_forward,
)
from paddle_te.ops.te.core_attention import in_float32
from paddle_te.ops.te.gemm import Gemm, SavedColumn, drop_data
from paddle_te.ops.te.linear import (
    ROW,
    NormedLowRankLinear,
    RecordedLowRank,
    SavedLowRankLinear,
    Wanted,
    layernorm_linear_backward,
    layernorm_linear_forward,
    linear_backward,
    linear_forward,
    low_rank_linear_forward,
)
from paddle_te.ops.te.low_rank import LowRankSettings, factors_and_settings
from paddle_te.ops.te.norm import NormSettings
from paddle_te.ops.te.quantized import quantized_together
from paddle_te.ops.te.recording import Op, OpInputs, Placeholder, Recorder
from paddle_te.ops.te.runtime import dtype_code


class SelfAttentionSettings(NamedTuple):
    """norm: its NormSettings. sequence: tokens of a sequence where x is [tokens, hidden], else None.

    qkv, proj: of the products beside the GEMMs, None where there is none.
    """

    norm: NormSettings
    sequence: int | None
    attention: AttentionSettings
    qkv: LowRankSettings | None = None
    proj: LowRankSettings | None = None


@dataclass(slots=True)
class _Saved:
    """Hold what the three parts' backwards read. frozen: nothing before the projection wants a gradient."""

    qkv: Any
    attention: Any
    proj: Any
    frozen: bool


def _forward(rt: Recorder, inputs: OpInputs, settings: SelfAttentionSettings) -> tuple[Placeholder, _Saved]:
    before, others, weights = inputs.tensors[:5], inputs.tensors[9:], (inputs.tensors[3], inputs.tensors[6])
    code = dtype_code("x", before[0])
    w_qkv, w_proj = quantized_together(rt, weights, code, inputs.quantizers[:2], inputs.train)
    (qkv, residual), saved_qkv = layernorm_linear_forward(rt, inputs, settings.norm, w_qkv, copies=True)
    if inputs.train:
        drop_data(rt, w_qkv)
    frozen = all([tensor is None or tensor.stop_gradient for tensor in (*before, *others)])
    context, saved_attention = _attended(rt, inputs, settings, qkv, frozen)
    proj, copy = Gemm.of(inputs, 1, 6, w_proj), saved_qkv.norm.copy
    out, saved_proj = linear_forward(rt, context, proj, residual, ROW, copy=copy)
    return out, _Saved(saved_qkv, saved_attention, saved_proj, frozen)


def _attended(
    rt: Recorder, inputs: OpInputs, settings: SelfAttentionSettings, qkv: Placeholder, frozen: bool
) -> tuple[Placeholder, Any]:
    """Compute (attention's output as the projection takes it, what attention's backward reads)."""
    freqs, cu_seqlens, q_weight, k_weight, softmax_offset = (inputs.tensors[i] for i in (5, 8, 9, 10, 11))
    s, (rows, *_, width) = settings.sequence, qkv.shape
    whole = qkv if s is None else qkv.reshaped([rows // s, s, width])
    of_heads = whole, freqs, cu_seqlens, None, q_weight, k_weight, softmax_offset
    inside = OpInputs(of_heads, inputs.quantizers[2:], inputs.tp, inputs.train and not frozen)
    context, saved = rotary_attention_forward(rt, inside, settings.attention)
    if s is not None:
        context = context.reshaped([rows, context.shape[-1]])
    context.stop_gradient = frozen
    return context, saved


def _backward(rt: Recorder, saved: _Saved, dy: Placeholder) -> tuple[Wanted, ...]:
    dcontext, dproj_weight, dproj_bias, _ = linear_backward(rt, saved.proj, dy)
    of_proj = None, dproj_weight, dproj_bias, None
    if saved.frozen or dcontext is None:
        return *[None] * 5, *of_proj, None, None, None
    dqkv, _, _, _, *of_others = rotary_attention_backward(rt, saved.attention, dcontext)
    return *layernorm_linear_backward(rt, saved.qkv, dqkv, dy), *of_proj, *of_others


@dataclass(slots=True)
class _SavedAdapted:
    """Hold what the three parts' backwards read, with low-rank products. factors: how many of qkv's there are."""

    qkv: NormedLowRankLinear | SavedColumn
    attention: Any
    proj: SavedLowRankLinear
    frozen: bool
    factors: int


def _adapted_forward(
    rt: Recorder, inputs: OpInputs, settings: SelfAttentionSettings
) -> tuple[Placeholder, _SavedAdapted]:
    before, others, factors = inputs.tensors[:5], inputs.tensors[9:_FACTORS], inputs.tensors[_FACTORS:]
    count = 2 * len(settings.qkv.sizes) if settings.qkv else 0
    beside_qkv, beside_proj = factors[:count], factors[count:]
    saved_qkv: NormedLowRankLinear | SavedColumn
    if settings.qkv is None:
        (qkv, _), saved_qkv = layernorm_linear_forward(rt, inputs, settings.norm, copies=True)
    else:
        low_rank = RecordedLowRank(settings.qkv, beside_qkv)
        qkv, saved_qkv = NormedLowRankLinear.forward(rt, inputs, settings.norm, low_rank, copies=True)
    frozen = all([tensor is None or tensor.stop_gradient for tensor in (*before, *others, *beside_qkv)])
    context, saved_attention = _attended(rt, inputs, settings, qkv, frozen)
    given = Gemm.of(inputs, 1, 6), RecordedLowRank(settings.proj, beside_proj), before[0], ROW
    out, saved_proj = low_rank_linear_forward(rt, context, *given, copy=saved_qkv.norm.copy)
    return out, _SavedAdapted(saved_qkv, saved_attention, saved_proj, frozen, count)


def _adapted_backward(rt: Recorder, saved: _SavedAdapted, dy: Placeholder) -> tuple[Wanted, ...]:
    (dcontext, dproj_weight, dproj_bias, _), _, pending = saved.proj.backward(rt, dy)
    beside_proj = saved.proj.factor_gradients(rt, pending)
    of_proj = None, dproj_weight, dproj_bias, None
    if saved.frozen or dcontext is None:
        return *[None] * 5, *of_proj, None, None, None, *[None] * saved.factors, *beside_proj
    dqkv, _, _, _, *of_others = rotary_attention_backward(rt, saved.attention, dcontext)
    if isinstance(saved.qkv, NormedLowRankLinear):
        dx, dln_weight, dln_bias, dw, dbias, *beside_qkv = saved.qkv.backward(rt, dqkv, dy)
    else:
        dx, dln_weight, dln_bias, dw, dbias, *beside_qkv = layernorm_linear_backward(rt, saved.qkv, dqkv, dy)
    return dx, dln_weight, dln_bias, dw, dbias, *of_proj, *of_others, *beside_qkv, *beside_proj


_FACTORS = 12  # where those of low-rank products begin among the tensors
_SELF_ATTENTION = Op(_forward, _backward, weights=(3, 6))
_ADAPTED = Op(_adapted_forward, _adapted_backward, weights=(3, 6))


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
    sequence, qk_norm = max_sequence_length if x.ndim == 2 else None, heads.qk_norm
    others = *((None, None) if qk_norm is None else qk_norm[:2]), in_float32(attention.softmax_offset)
    weights = norm.weight, norm.bias, qkv.weight, qkv.bias, freqs, proj.weight, proj.bias
    adapted = qkv.low_rank or proj.low_rank
    factors, low_ranks = factors_and_settings(qkv.low_rank, proj.low_rank) if adapted else ((), ())
    return autograd.apply(
        _ADAPTED if adapted else _SELF_ATTENTION,
        (x, *weights, attention.cu_seqlens, *others, *factors),
        SelfAttentionSettings(NormSettings.of(norm), sequence, AttentionSettings.of(heads, attention), *low_ranks),
        quantizers=(qkv.quantizers, proj.quantizers, *(attention.quantizers or ())),
        tp=tp,
        fuse_wgrad_accumulation=(qkv.fuse_wgrad_accumulation, proj.fuse_wgrad_accumulation),
    )
