"""The math of a mixture of experts: one interface, two implementations, as `paddle_te.ops`.

Tokens are [tokens, h]. A router gives each token `topk` of E experts: probs, float32 [tokens, E], 0 where an expert is
not chosen, and routing_map, bool [tokens, E], as Megatron-Core's. Experts' weights stand behind each other,
[E, out, in]. The rows of an expert are its tokens in their order; the experts' rows follow each other, and each
expert's are padded with zeros to a multiple of what its GEMMs need.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, Protocol

from paddle import Tensor

from paddle_te.fp8 import GemmQuantizers
from paddle_te.ops import BACKENDS
from paddle_te.options.layers import FuseWgrad

SMALL = 1e-20  # the least sum of sigmoids, as in DeepSeek-V3


class Routing(NamedTuple):
    """How a router's logits become probabilities of the chosen experts.

    topk: experts of a token.
    score_function: "softmax" or "sigmoid". Sigmoids of several experts are divided by their sum.
    pre_softmax: softmax over all experts instead of the chosen ones.
    num_groups: groups of experts; None: no groups.
    group_topk: a token's experts are chosen from so many groups, those with the highest scores.
    group_best: a group's score is the sum of so many of its best experts' scores: 2 in DeepSeek-V3, 1 in DeepSeek-V2;
        None: topk / group_topk.
    scaling_factor: multiplies the probabilities.
    """

    topk: int
    score_function: str = "softmax"
    pre_softmax: bool = False
    num_groups: int | None = None
    group_topk: int | None = None
    scaling_factor: float = 1.0
    group_best: int | None = None

    @property
    def best_of_group(self) -> int:
        """The scores that are added up for a group; 0 without groups."""
        return self.group_best or self.topk // (self.group_topk or self.topk + 1)


class GroupedLowRank(NamedTuple):
    """a [E, width, in], b [E, out, width]: x · aᵀ · bᵀ is added to x · weightᵀ of each expert's rows, as LoRA does.

    Both are in the dtype of x, and computed with in it where the weight's GEMM is in fp8.
    """

    a: Tensor
    b: Tensor


class GroupedProjection(NamedTuple):
    """x · weightᵀ (+ bias) (+ low_rank's product) of each expert's rows.

    weight: [E, out, in]. bias: [E, out]. quantizers: one set for all experts; they and the others as those of
    `ops.projection.Projection`.
    """

    weight: Tensor
    bias: Tensor | None = None
    quantizers: GemmQuantizers | None = None
    fuse_wgrad_accumulation: FuseWgrad = False
    low_rank: GroupedLowRank | None = None


class Routed(NamedTuple):
    """The experts of each token.

    probs, routing_map: as a router gives them. topk: the greatest number of a token's experts. pairs: of a token and an
    expert of it, at most; None: topk for each token. A backend for which the host waits for nothing makes room for as
    many rows.
    """

    probs: Tensor
    routing_map: Tensor
    topk: int
    pairs: int | None = None


def check_counts(counts: Sequence[int], rows: int, quantizers: GemmQuantizers | None) -> None:
    """Raise ValueError for counts, ints, that GEMMs cannot have. Nobody looks at those on the device."""
    if sum(counts) != rows:
        raise ValueError(f"the experts' rows, {counts}, do not sum up to the {rows} rows of the input")
    multiple = 1 if quantizers is None else quantizers.input.scaling.multiple
    if any(count % multiple for count in counts):
        raise ValueError(f"in fp8 each expert's rows must be a multiple of {multiple}, not {counts}")


class MoEOps(Protocol):
    """The functions that a backend implements."""

    def check_experts(self, activation: str = "swiglu") -> None:
        """Raise where the backend cannot compute such experts here, and say what is missing."""

    def fork(self, x: Tensor, count: int) -> tuple[Tensor, ...]:
        """Return x `count` times, for as many that read it; backward adds their gradients up."""

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x + y, of one shape and dtype."""

    def scaled_activate(self, x: Tensor, scales: Tensor, activation: str) -> Tensor:
        """Return activate(x) times float32 scales [tokens]."""

    def route(self, logits: Tensor, routing: Routing, expert_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (probs, routing_map) of float32 logits [tokens, E].

        expert_bias: float32 [E], added to the scores by which experts are chosen, but not to the probabilities; with
        sigmoid only.
        """

    def balance_loss(self, logits: Tensor, routing: Routing, sequences: int = 1) -> Tensor:
        """Return E · Σ_e share_e · score_e, float32 [], which is 1 where the experts are in balance.

        share_e: expert e's share of the tokens · topk, score_e: the mean of its scores, a token's scores summing up to
        1. Neither bias nor groups count (Fedus et al., "Switch Transformers", 2021, equations 4 to 6).
        sequences: the mean over as many of equal length, of each one's tokens.
        """

    def limit_experts(self, probs: Tensor, routing_map: Tensor, capacity: int, policy: str) -> tuple[Tensor, Tensor]:
        """Return (probs, routing_map) in which no expert has more than `capacity` tokens.

        policy: which tokens an expert keeps: "probs", those of the greatest probabilities, or "position", the first.
        """

    def grouped_linear(self, x: Tensor, projection: GroupedProjection, counts: Sequence[int] | Tensor) -> Tensor:
        """Return [rows, out], each expert's rows projected; without a low-rank product, which `experts_mlp` has.

        counts: rows of each expert, ints or an int64 tensor [E], which sum up to x's rows. In fp8 they are multiples
        of what the recipe needs.
        """

    def experts_mlp(
        self,
        x: Tensor,
        routed: Routed,
        fc1: GroupedProjection,
        fc2: GroupedProjection,
        *,
        residual: Tensor | None = None,
        activation: str = "swiglu",
        recompute_activation: bool = False,
    ) -> Tensor:
        """Return Σ_e probs_e · (fc2_e(activate(fc1_e(x)))) (+ residual) for each token, [tokens, h].

        The probability multiplies the activation, so that nothing of h columns is kept for its gradient.
        """


@cache
def get_moe_ops(backend: str) -> MoEOps:
    """Return the module that implements `backend`, one of `ops.BACKENDS`."""
    return importlib.import_module(f"{BACKENDS[backend]}.moe")
