"""The attention half of a layer as one Op, of the functions of its three: fewer PyLayers, fewer allocations."""

from paddle_te.ops.te import program
from paddle_te.ops.te.attention import attention_settings, rotary_attention_backward, rotary_attention_forward
from paddle_te.ops.te.linear import (
    layernorm_linear_backward,
    layernorm_linear_forward,
    linear_backward,
    linear_forward,
)
from paddle_te.ops.te.program import Op


def _forward(rt, x, ln_weight, qkv_weight, freqs, proj_weight, of_qkv, of_proj, *arguments):
    *of_attention, tp, train, eps, s, num_heads, num_kv_heads, scale, backward_in_fp8, deterministic = arguments
    (qkv, residual), first = layernorm_linear_forward(rt, x, ln_weight, qkv_weight, of_qkv, tp, train, eps)
    frozen = x.stop_gradient and ln_weight.stop_gradient and qkv_weight.stop_gradient
    attends = train and not frozen
    *_, width = qkv.shape
    heads = num_heads, num_kv_heads, scale, backward_in_fp8, deterministic
    whole = qkv if s is None else qkv.reshaped([qkv.shape[0] // s, s, width])
    context, attention = rotary_attention_forward(rt, whole, freqs, *of_attention, None, attends, *heads)
    if s is not None:
        context = context.reshaped([qkv.shape[0], context.shape[-1]])
    context.stop_gradient = frozen
    row = None if tp is None else "row"
    out, last = linear_forward(rt, context, proj_weight, residual, of_proj, tp, train, row)
    return out, (first, attention, last, frozen)


def _backward(rt, saved, dy):
    first, attention, last, frozen = saved
    dcontext, dproj_weight, _ = linear_backward(rt, last, dy)
    if frozen:
        return None, None, None, None, dproj_weight
    dqkv, _ = rotary_attention_backward(rt, attention, dcontext)
    dx, dln_weight, dqkv_weight = layernorm_linear_backward(rt, first, dqkv, dy)
    return dx, dln_weight, dqkv_weight, None, dproj_weight


_SELF_ATTENTION = Op(_forward, _backward, weights=(2, 4))


def self_attention(
    x,
    ln_weight,
    qkv_weight,
    freqs,
    proj_weight,
    eps,
    num_heads,
    num_kv_heads,
    *,
    scale,
    max_sequence_length=None,
    tp=None,
    quantizers=(None, None),
    attention_quantizers=None,
    fuse_wgrad_accumulation=False,
):
    """linear(rotary_attention(layernorm_linear(x))) + x. quantizers: of the two GEMMs."""
    s = max_sequence_length if x.ndim == 2 else None
    settings = eps, s, num_heads, num_kv_heads, *attention_settings(scale, attention_quantizers)
    tensors = x, ln_weight, qkv_weight, freqs, proj_weight
    quantizers = *quantizers, *(attention_quantizers or ())
    return program.apply(_SELF_ATTENTION, tensors, quantizers, tp, fuse_wgrad_accumulation, settings)
