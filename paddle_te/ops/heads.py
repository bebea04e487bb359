"""The records that attention takes."""

from __future__ import annotations

from typing import NamedTuple

from paddle import Tensor

from paddle_te.fp8 import GemmQuantizers
from paddle_te.ops.norms import QKNorm

AttentionQuantizers = tuple[GemmQuantizers, ...]  # of `fp8.ModuleScaling.of_attention`, three


class Heads(NamedTuple):
    """How to split the fused projection's output into q, k and v.

    num_heads, num_kv_heads: of this rank; q's, k's and v's stand one after another. qk_norm: of q and k before they are
    rotated, or None. interleaved: numbers 2i and 2i + 1 of a head are rotated together (GPT-J, GLM), not numbers i and
    i + half (NeoX, Llama). rotary_factor: what the rotated numbers of a head are multiplied by (LongRoPE).
    """

    num_heads: int
    num_kv_heads: int
    qk_norm: QKNorm | None = None
    interleaved: bool = False
    rotary_factor: float = 1.0


class LatentHeads(NamedTuple):
    """The heads of multi-head latent attention (DeepSeek-V2).

    num_heads: of this rank, of the queries, keys and values. plain: numbers of a head of the queries and keys that are
    not rotated; those that are stand behind them. value: numbers of a head of the values. interleaved, rotary_factor:
    as Heads'.
    """

    num_heads: int
    plain: int
    value: int
    interleaved: bool = True
    rotary_factor: float = 1.0


class Scores(NamedTuple):
    """How attention turns the scores q · kᵀ into the softmax.

    scale: multiplies the scores.
    causal: a query sees itself and the keys before it; False: all keys. A mask overrides this.
    window: the number of keys before its own that a query sees, with a mask or without; -1: all of them.
    dropout: the probability with which each number of the softmax becomes 0 before it multiplies v; the others are
        divided by 1 - dropout. Paddle's random numbers choose them. Pass 0 in evaluation.
    softcap: c: scores become c · tanh(scores / c) before anything is hidden (Gemma 2); 0: no cap.
    """

    scale: float
    causal: bool = True
    window: int = -1
    dropout: float = 0.0
    softcap: float = 0.0


class Attention(NamedTuple):
    """What attention reads besides q, k, v and a mask.

    softmax_offset: [h], a further score of each head, which counts in the softmax's denominator and has no value (the
        sinks of Xiao et al., 2023, arXiv 2309.17453, learned as in gpt-oss). None: there is none.
    cu_seqlens: attention is among the tokens of a document; int32 [documents + 1]: where the documents begin and end in
        the b·s tokens in a row, from 0 to b·s; a document may be empty (`ops.documents` makes them). Then there is no
        mask, no quantizers and no cache.
    quantizers: attention is in fp8: causal, without window and dropout, as many keys as queries.
    """

    scores: Scores
    softmax_offset: Tensor | None = None
    cu_seqlens: Tensor | None = None
    quantizers: AttentionQuantizers | None = None
