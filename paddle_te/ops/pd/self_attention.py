"""The attention half of a layer."""

from paddle_te.ops.pd.attention import rotary_attention
from paddle_te.ops.pd.linear import layernorm_linear, linear


def self_attention(
    x,
    norm,
    qkv_weight,
    freqs,
    proj_weight,
    num_heads,
    num_kv_heads,
    *,
    scale,
    qkv_bias=None,
    proj_bias=None,
    cu_seqlens=None,
    causal=True,
    window=-1,
    max_sequence_length=None,
    tp=None,
    quantizers=(None, None),
    attention_quantizers=None,
    fuse_wgrad_accumulation=False,
    qk_norm=None,
):
    """linear(rotary_attention(layernorm_linear(x))) + x. quantizers: of the two GEMMs."""
    of_qkv, of_proj = quantizers
    shared = dict(tp=tp, fuse_wgrad_accumulation=fuse_wgrad_accumulation)
    qkv, residual = layernorm_linear(x, norm, qkv_weight, bias=qkv_bias, quantizers=of_qkv, **shared)
    flat = qkv.ndim == 2
    if flat:
        qkv = qkv.reshape([-1, max_sequence_length, qkv.shape[-1]])
    options = dict(scale=scale, cu_seqlens=cu_seqlens, causal=causal, window=window, quantizers=attention_quantizers)
    options["qk_norm"] = qk_norm
    context = rotary_attention(qkv, freqs, num_heads, num_kv_heads, **options)
    if flat:
        context = context.reshape([-1, context.shape[-1]])
    row = None if tp is None else "row"
    options = dict(bias=proj_bias, residual=residual, parallel_mode=row, quantizers=of_proj)
    return linear(context, proj_weight, **options, **shared)
