"""The math of a decoder layer: one interface, two implementations.

`get_ops("paddle")` is plain Paddle operations (`ops.pd`, the reference, runs anywhere), `get_ops("transformer_engine")`
is TE's kernels (`ops.te`). Layers hold parameters and parallelism and call nothing but this interface.

Common to all: activations are [b, s, h], or [tokens, h] with tokens = b·s (under sequence parallelism b·s/tp).
Weights are [out, in]; `linear`'s is [in, out] with transpose_y=False. `tp` is a `distributed.TensorParallel` or None
for one rank. `quantizers` is what `fp8.ModuleScaling.begin_forward` returned for that GEMM: None for a GEMM in the
activations' own precision.

| function | returns |
|---|---|
| check(fp8) | None; raises where the backend cannot run here, saying what is missing |
| normalize(x, norm) | x's shape |
| activate(x, activation) | x's shape, or where the activation is gated [..., half of it] |
| accumulate_wgrad(x, dy, out) | xᵀ·dy in float32, + out in place; of matrices [n, in], [n, out], no gradients |
| linear(x, weight, bias, residual, parallel_mode, tp, quantizers, …, transpose_y, low_rank) | [..., out] |
| layernorm_linear(x, norm, weight, bias, tp, quantizers, fuse_wgrad_accumulation, low_rank) | ([..., out], x again) |
| layernorm_mlp(x, norm, fc1_weight, fc2_weight, fc1_bias, fc2_bias, activation, …) | x's shape; see below |
| parallel_cross_entropy(logits, labels, ignore_index, tp) | loss [n, 1]; see below |
| cross_entropy(logits, labels, ignore_index, tp, train) | loss, dlogits; see below |
| rotary_qkv(qkv, freqs, num_heads, num_kv_heads, qk_norm) | q, k, v |
| dot_product_attention(q, k, v, scale, attention_mask, cu_seqlens, causal, window, …) | [b, s, heads·d]; see below |
| attention_with_lse(q, k, v, scale, causal) | out, lse; see below |
| attention_with_lse_backward(q, k, v, out, lse, dout, scale, causal) | dq, dk, dv |
| rotary_attention(qkv, freqs, num_heads, num_kv_heads, scale, cu_seqlens, causal, window, …) | the two in one |
| self_attention(x, norm, qkv_weight, freqs, proj_weight, num_heads, num_kv_heads, …) | x's shape; see below |
| amax_and_scale_update(history, scale, fp8_max, margin, algorithm, scale_inv) | new ones, or None: see `fp8` |
| quantize_weight(source, weight, stored, group) | None; see below |
| check_attention(head_dim, window, masked, dropout) | None; raises where there is no such attention, saying why |
| check_block_scaling() | None; raises where GEMMs have no block scaling, saying why |
| check_fp8_attention(head_dim, sequence, backward) | None; raises where attention takes no quantizers, saying why |
| check_packed_attention() | None; raises where attention takes no cu_seqlens, saying why |

A weight that exists in fp8 only is uint8, and its GEMM's quantizers.weight a `fp8.StoredWeight`; `linear` takes it
[out, in] alone, and it gets no gradient. quantize_weight fills both from a tensor `source`, whose one scale is that of
all the ranks of a group, and whose blocks, with block scaling, have their own.

parallel_cross_entropy: logits [n, vocab / tp.size] and labels [n, 1]; the loss is float32, 0 for ignore_index.
cross_entropy takes and gives the same, but that the logits are lost and no gradients flow: dlogits, None without
`train`, is the gradient of the sum of the losses above 0.

linear's and layernorm_linear's low_rank: a `low_rank.LowRankUpdate`, whose product is added, or None; layernorm_mlp has
one for each of its GEMMs, and then no chunks. Behind a norm, and in the MLP, it has no x of its own.
layernorm_linear's second value is x again, as the residual. norm: a `norms.Norm`. activation: one of `activations`.
layernorm_mlp also takes add_residual, without which it returns (what would be added to x, x again), tp, quantizers,
fuse_wgrad_accumulation, and recompute: what backward computes again instead of keeping it, "mlp_act" the activation,
"mlp" all from the norm to the activation, None nothing. So it does with the norm where its `recompute` says so. With
more than chunk_tokens tokens (0: with none) its GEMMs take so many at a time, and backward computes each chunk again.
fp8_input_store: the activation's input is kept in MXFP8, and backward computes what it computes again from that.
bias: [out of this rank], or None; of a row-parallel GEMM [out], and added once to the sum over the ranks. Then each
rank gets the bias's whole gradient, under sequence parallelism too.
Attention also takes dropout and quantizers.
causal: a query sees itself and the keys before it; without, all keys. A mask says by itself what is seen.
window: how many keys before its own a query sees, with a mask or without; -1: all of them.

dropout: the probability with which each number of the softmax becomes 0, before it meets v; the others are divided by
1 - dropout. Which ones follows from Paddle's random numbers. It is dropped whenever it is not 0: in evaluation, pass 0.

Attention with quantizers, three of them (`fp8.ModuleScaling.of_attention`), is in fp8: causal, without window
and dropout, as many keys as queries.

Attention with cu_seqlens is among the tokens of a document. They are int32 [documents + 1]: where the
documents begin and end in the b·s tokens in a row, from 0 to b·s; a document may be empty (`ops.documents` makes them).
Then there is no mask, no quantizers and no cache.

attention_with_lse is attention to some of the keys, whose results can be merged: out [b, s, h, d], and lse, float32
[b, h, s, 1], the logarithm of the sum of the exponentials of each query's scores. causal: as many keys as queries, of
which a query sees those up to its own; else all of them. No gradients flow. Its backward takes out, lse and dout of
attention to all keys, and gives what these queries and keys have of the gradients.

self_attention is layernorm_linear, rotary_attention and linear with the residual, in one. It also takes scale,
qkv_bias, proj_bias, cu_seqlens, causal, window, max_sequence_length (s, for x [tokens, hidden]), tp, quantizers (of the
two GEMMs), attention_quantizers and fuse_wgrad_accumulation.

qk_norm, which rotary_attention and self_attention take, too: a `norms.QKNorm` of the heads of q and k before they
are rotated, or None.
freqs are angles [s, d], or [b, s, d] for sequences with positions of their own, or None for no rotation; there may be
more keys than queries (a key-value cache).
"""

import importlib
from functools import cache

BACKENDS = {"paddle": "paddle_te.ops.pd", "transformer_engine": "paddle_te.ops.te"}


@cache
def get_ops(backend):
    """The module that implements `backend`, "paddle" or "transformer_engine".

    Raises ValueError for another name, and what the backend itself raises where it cannot run.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is not known; it may be {' or '.join(map(repr, BACKENDS))}")
    return importlib.import_module(BACKENDS[backend])
