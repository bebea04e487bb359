"""The interface of a backend: the math of a decoder layer, as layers call it.

`Ops` is the one statement of it. `ops.pd` and `ops.te` are modules with these functions; mypy and a test compare them.

Common to all: activations are [b, s, h], or [tokens, h] with tokens = b·s (under sequence parallelism b·s/tp).
norm: before a GEMM; None: the GEMM reads x itself. `tp` is None for one rank. What GEMMs read besides x is in their
`Projection`, what attention reads besides q, k, v and a mask in an `Attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from paddle import Tensor
from paddle.distributed.communication.group import Group

from paddle_te.fp8 import StoredWeight
from paddle_te.ops.heads import Attention, Heads, LatentHeads
from paddle_te.ops.norms import Norm
from paddle_te.ops.projection import Projection
from paddle_te.ops.recompute import NOTHING_AGAIN, MLPRecompute


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
        projection: Projection,
        *,
        residual: Tensor | None = None,
        parallel_mode: str | None = None,
        tp: Ranks | None = None,
        transpose_y: bool = True,
    ) -> Tensor:
        """Return the projection of x (+ residual), [..., out].

        The weight is split by parallel_mode ("column", "row" or None) over tp. Without transpose_y the weight
        is [in, out], not one in fp8 only.
        """

    def layernorm_linear(
        self, x: Tensor, norm: Norm | None, projection: Projection, *, tp: Ranks | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (the projection of normalize(x), x again): column parallel.

        projection.low_rank has no x of its own. x is to be used as the residual: an implementation then adds both
        gradients of x in one kernel.
        """

    def layernorm_mlp(
        self,
        x: Tensor,
        norm: Norm | None,
        fc1: Projection,
        fc2: Projection,
        *,
        activation: str = "swiglu",
        add_residual: bool = True,
        recompute: MLPRecompute = NOTHING_AGAIN,
        tp: Ranks | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return x + fc2(activate(fc1(normalize(x)))), x's shape.

        fc1 is column parallel, a gated activation's gate and up stacked, fc2 row parallel. Without add_residual
        (the second summand, x again). recompute: what backward computes again, besides the norm where norm.recompute
        says so. With a low_rank, which has no x of its own, there are no chunks.
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
        self, q: Tensor, k: Tensor, v: Tensor, attention: Attention, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Return softmax(q·kᵀ·scale + mask)·v per head, [b, s, h·d].

        Query heads share kv heads in groups (GQA, Ainslie et al., 2023). q: [b, s, h, d]; k, v: [b, s_kv, h_kv,
        d], h a multiple of h_kv; s_kv may be more than s (a cache). Heads of v may be of another width than those of q
        and k, which the result then has.
        attention_mask: additive, [b or 1, 1, s, s_kv]; None: what attention.scores says.
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

    def rotary_attention(self, qkv: Tensor, freqs: Tensor | None, heads: Heads, attention: Attention) -> Tensor:
        """dot_product_attention(*rotary_qkv(qkv, freqs, heads), attention)."""

    def self_attention(
        self,
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
        """linear(rotary_attention(layernorm_linear(x, norm, qkv), freqs, heads, attention), proj) + x, without dropout.

        max_sequence_length: s, for x [tokens, hidden]. A low_rank has no x of its own.
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
