"""The interface of a backend: the math of a decoder layer, as layers call it.

`Ops` is the one statement of it. `ops.pd` and `ops.te` are modules with these functions; mypy and a test compare them.

Common to all: activations are [b, s, h], or [tokens, h] with tokens = b·s (under sequence parallelism b·s/tp).
Weights are [out, in]; a weight that exists in fp8 only is uint8, and its GEMM's quantizers.weight a `fp8.StoredWeight`.
bias: [out of this rank], or None; of a row-parallel GEMM [out], and added once to the sum over the ranks. Then each
rank gets the bias's whole gradient, under sequence parallelism too.
norm: before a GEMM; None: the GEMM reads x itself. `tp` is None for one rank. `quantizers` is what
`fp8.ModuleScaling.begin_forward` returned for that GEMM: None for a GEMM in the activations' own precision.
fuse_wgrad_accumulation: the weight's gradient is added to its main_grad.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from paddle import Tensor
from paddle.distributed.communication.group import Group

from paddle_te.fp8 import GemmQuantizers, StoredWeight
from paddle_te.ops.heads import Heads, LatentHeads, Scores
from paddle_te.ops.low_rank import LowRankUpdate
from paddle_te.ops.norms import Norm

AttentionQuantizers = tuple[GemmQuantizers, ...]  # of `fp8.ModuleScaling.of_attention`, three
QuantizersOfTwo = tuple[GemmQuantizers | None, GemmQuantizers | None]


class Ranks(Protocol):
    """The part of a `distributed.TensorParallel` that ops use."""

    @property
    def group(self) -> Any: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def sequence_parallel(self) -> bool: ...
    def all_reduce(self, x: Tensor) -> Tensor: ...
    def enter(self, x: Tensor) -> Tensor: ...
    def leave(self, y: Tensor) -> Tensor: ...
    def sum_gradient(self, parameter: Tensor) -> Tensor: ...
    def sum_over(self, x: Tensor) -> Tensor: ...


class Ops(Protocol):
    """The functions of a backend. Those that check raise, saying what is missing and what to do."""

    def check(self, fp8: bool = False) -> None:
        """Raise where the backend cannot run here, with every missing condition."""

    def check_attention(
        self,
        head_dim: int,
        window: int,
        masked: bool,
        dropout: float,
        softcap: float = 0.0,
        softmax_type: str = "vanilla",
        value_dim: int | None = None,
    ) -> None:
        """Raise where there is no such attention.

        softmax_type: "learnable" with a softmax_offset, else "vanilla". value_dim: of the values' heads, None:
        head_dim.
        """

    def check_block_scaling(self) -> None:
        """Raise where GEMMs have no block scaling."""

    def check_fp8_attention(self, head_dim: int, sequence: int = 16, backward: bool = True) -> None:
        """Raise where attention takes no quantizers."""

    def check_packed_attention(self, softmax_type: str = "vanilla") -> None:
        """Raise where attention takes no cu_seqlens."""

    def normalize(self, x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
        """x normed over its last axis, in float32 inside (+ residual)."""

    def activate(self, x: Tensor, activation: str) -> Tensor:
        """x activated by one of `ops.activations`; of a gated one [..., 2·f] becomes [..., f]."""

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        *,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        parallel_mode: str | None = None,
        tp: Ranks | None = None,
        quantizers: GemmQuantizers | None = None,
        fuse_wgrad_accumulation: bool = False,
        transpose_y: bool = True,
        low_rank: LowRankUpdate | None = None,
    ) -> Tensor:
        """Return x · weightᵀ (+ bias) (+ residual) (+ low_rank's product), [..., out].

        The weight is split by parallel_mode ("column", "row" or None) over tp. Without transpose_y the weight
        is [in, out], not one in fp8 only.
        """

    def layernorm_linear(
        self,
        x: Tensor,
        norm: Norm | None,
        weight: Tensor,
        *,
        bias: Tensor | None = None,
        tp: Ranks | None = None,
        quantizers: GemmQuantizers | None = None,
        fuse_wgrad_accumulation: bool = False,
        low_rank: LowRankUpdate | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (normalize(x) · weightᵀ (+ bias) (+ low_rank's product), x again): column parallel.

        low_rank has no x of its own. x is to be used as the residual: an implementation then adds both
        gradients of x in one kernel.
        """

    def layernorm_mlp(
        self,
        x: Tensor,
        norm: Norm | None,
        fc1_weight: Tensor,
        fc2_weight: Tensor,
        *,
        fc1_bias: Tensor | None = None,
        fc2_bias: Tensor | None = None,
        activation: str = "swiglu",
        add_residual: bool = True,
        recompute: str | None = None,
        chunk_tokens: int = 0,
        fp8_input_store: bool = False,
        tp: Ranks | None = None,
        quantizers: QuantizersOfTwo = (None, None),
        fuse_wgrad_accumulation: bool = False,
        low_rank: tuple[LowRankUpdate | None, LowRankUpdate | None] = (None, None),
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return x + activate(normalize(x) · fc1ᵀ (+ fc1_bias)) · fc2ᵀ (+ fc2_bias), x's shape.

        fc1 is column parallel, a gated activation's gate and up stacked, fc2 row parallel. Without add_residual
        (the second summand, x again).

        recompute: what backward computes again instead of keeping it, "mlp_act" the activation, "mlp" all from the norm
        to the activation, None nothing. So it does with the norm where norm.recompute says so.
        chunk_tokens: with more tokens the GEMMs take so many at a time, and backward computes each chunk again; 0:
        never. fp8_input_store: the activation's input is kept in MXFP8, and backward computes what it computes again
        from that; with recompute "mlp" and in chunks nothing is kept.
        quantizers, low_rank: of each GEMM. With a low_rank, which has no x of its own, there are no chunks.
        """

    def accumulate_wgrad(self, x: Tensor, dy: Tensor, out: Tensor | None = None) -> Tensor:
        """xᵀ · dy in float32, added to `out` in place where that is given; of matrices [n, in], [n, out].

        No gradients flow.
        """

    def rotary_qkv(self, qkv: Tensor, freqs: Tensor | None, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [b, s, num_heads, d], k and v [b, s, num_kv_heads, d] of the fused projection's output [b, s, …].

        q and k are normed and rotated (Su et al., 2021). freqs: angles, float32 [≥ s, r], or [b, s, r] for
        sequences with positions of their own, both halves alike; the first r numbers of a head are rotated.
        None: nothing is rotated.
        """

    def latent_qkv(
        self, q: Tensor, kv: Tensor, position: Tensor, freqs: Tensor, heads: LatentHeads
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q and k [b, s, num_heads, plain + r], v [b, s, num_heads, value] of multi-head latent attention.

        q: [b, s, num_heads (plain + r)]. kv: [b, s, num_heads (plain + value)], each head's plain numbers of its key
        and its value. position: [b, s, r], the rotated numbers of the keys, which all heads share. freqs: angles as
        rotary_qkv's, by which position and the last r numbers of each head of q are rotated (DeepSeek-V2,
        arXiv:2405.04434, section 2.1).
        """

    def dot_product_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scores: Scores,
        *,
        softmax_offset: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        quantizers: AttentionQuantizers | None = None,
    ) -> Tensor:
        """Return softmax(q·kᵀ·scale + mask)·v per head, [b, s, h·d].

        Query heads share kv heads in groups (GQA, Ainslie et al., 2023). q: [b, s, h, d]; k, v: [b, s_kv, h_kv,
        d], h a multiple of h_kv; s_kv may be more than s (a cache). Heads of v may be of another width than those of q
        and k, which the result then has.

        softmax_offset: [h], a further score of each head, which counts in the softmax's denominator and has no value
        (the sinks of Xiao et al., 2023, arXiv 2309.17453, learned as in gpt-oss). None: there is none.
        attention_mask: additive, [b or 1, 1, s, s_kv]; None: what `scores` says.
        cu_seqlens: attention is among the tokens of a document; int32 [documents + 1]: where the documents begin and
        end in the b·s tokens in a row, from 0 to b·s; a document may be empty (`ops.documents` makes them). Then there
        is no mask, no quantizers and no cache.
        quantizers: attention is in fp8: causal, without window and dropout, as many keys as queries.
        """

    def attention_with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Attend to some of the keys, with results that can be merged: (out [b, s, h, d]; lse).

        lse, float32 [b, h, s, 1]: the logarithm of the sum of the exponentials of each query's scores. causal:
        as many keys as queries, of which a query sees those up to its own; else all of them. No gradients flow.
        """

    def attention_with_lse_backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, *, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv): the part of the gradients that comes from these queries and keys.

        out, lse and dout are of attention to all keys.
        """

    def rotary_attention(
        self,
        qkv: Tensor,
        freqs: Tensor | None,
        heads: Heads,
        scores: Scores,
        *,
        softmax_offset: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        quantizers: AttentionQuantizers | None = None,
    ) -> Tensor:
        """dot_product_attention(*rotary_qkv(qkv, …), …)."""

    def self_attention(
        self,
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
        """linear(rotary_attention(layernorm_linear(x))) + x, without dropout.

        max_sequence_length: s, for x [tokens, hidden]. quantizers, low_rank: of the two GEMMs; a low_rank has no x of
        its own.
        """

    def parallel_cross_entropy(
        self, logits: Tensor, labels: Tensor, ignore_index: int, *, tp: Ranks | None = None
    ) -> Tensor:
        """Return the loss [n, 1], float32, of logits [n, vocab / tp.size] and labels [n, 1]; 0 for ignore_index."""

    def cross_entropy(
        self, logits: Tensor, labels: Tensor, ignore_index: int, *, tp: Ranks | None = None, train: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Return (parallel_cross_entropy's loss, dlogits); the logits are lost, and no gradients flow.

        dlogits, None without `train`, is the gradient of the sum of the losses above 0.
        """

    def amax_and_scale_update(
        self,
        history: Tensor,
        scale: Tensor,
        fp8_max: float,
        margin: int,
        amax_compute_algo: str,
        scale_inv: Tensor | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """New ones, or None where they are updated in place: see `fp8.amax_and_scale_update`."""

    def quantize_weight(self, source: Tensor, weight: Tensor, stored: StoredWeight, group: Group | None = None) -> None:
        """Fill a weight that exists in fp8 only from a tensor.

        Its one scale is that of all the ranks of a group; with block scaling blocks have their own.
        """

    def newton_schulz(self, matrices: Sequence[Tensor], steps: int, factor: float) -> Tensor:
        """Return matrices, each made nearly orthogonal and times a factor, one behind the other: [N, out, in].

        matrices: single ones [out, in] and stacks [n, out, in], all with the same out and in. The dtype is theirs, in
        which te has 16 bits. See `ops.newton_schulz`.
        """
