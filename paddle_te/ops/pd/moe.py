"""A mixture of experts in plain Paddle operations: the reference that te is tested against.

Interface, shapes and dtypes: `paddle_te.ops.moe`.
"""

from __future__ import annotations

import paddle
from paddle import Tensor
from paddle.distributed.fleet.utils import recompute as paddle_recompute

from paddle_te.ops.moe import ExpertWeights, QuantizersOfTwo, Routing
from paddle_te.ops.pd.grouped import grouped_linear, permute, probabilities, rows_of, unpermute
from paddle_te.ops.pd.linear import activate
from paddle_te.ops.routing import among, limit_experts, route, shares_of
from paddle_te.ops.routing import balance_loss as of_shares

__all__ = [
    "add",
    "balance_loss",
    "check_experts",
    "experts_mlp",
    "fork",
    "grouped_linear",
    "limit_experts",
    "route",
    "scaled_activate",
]


def check_experts(activation: str = "swiglu") -> None:
    """Raise nothing: it runs wherever Paddle does; fp8 is emulated."""


def fork(x: Tensor, count: int) -> tuple[Tensor, ...]:
    """Return x `count` times; autograd adds the gradients up."""
    return (x,) * count


def add(x: Tensor, y: Tensor) -> Tensor:
    """Return x + y."""
    return x + y


def scaled_activate(x: Tensor, scales: Tensor, activation: str) -> Tensor:
    """Return activate(x) times scales, in float32, rounded once."""
    return (activate(x, activation).astype("float32") * scales.unsqueeze(1)).astype(x.dtype)


def balance_loss(logits: Tensor, routing: Routing, sequences: int = 1) -> Tensor:
    """Return 1 where the experts are in balance, more where they are not."""
    scores = shares_of(logits, routing)
    with paddle.no_grad():
        routing_map = among(scores, routing.topk)
    return of_shares(scores, routing_map, routing.topk, sequences)


def experts_mlp(
    x: Tensor,
    probs: Tensor,
    routing_map: Tensor,
    weights: ExpertWeights,
    *,
    topk: int,
    pairs: int | None = None,
    residual: Tensor | None = None,
    activation: str = "swiglu",
    recompute_activation: bool = False,
    quantizers: QuantizersOfTwo = (None, None),
    fuse_wgrad_accumulation: bool = False,
) -> Tensor:
    """Return Σ_e probs_e · (fc2_e(activate(fc1_e(x)))) (+ residual) for each token. The pairs are counted here."""
    multiple = 1 if quantizers[0] is None else quantizers[0].input.scaling.multiple
    places = rows_of(routing_map, topk, multiple)

    def linear(x: Tensor, gemm: int) -> Tensor:
        weight = weights.fc2_weight if gemm else weights.fc1_weight
        low_rank = weights.fc2_low_rank if gemm else weights.fc1_low_rank
        y = grouped_linear(
            x, weight, places.counts, quantizers=quantizers[gemm], fuse_wgrad_accumulation=fuse_wgrad_accumulation
        )
        if low_rank is None:
            return y
        return y + grouped_linear(grouped_linear(x, low_rank.a, places.counts), low_rank.b, places.counts)

    def biased(y: Tensor, bias: Tensor | None, of_rows: Tensor | None = None) -> Tensor:
        if bias is None:
            return y
        bias = bias.index_select(places.experts, 0)
        return y + (bias if of_rows is None else bias * of_rows.unsqueeze(1)).astype(y.dtype)

    def second_half(hidden: Tensor, of_rows: Tensor) -> Tensor:
        return biased(linear(scaled_activate(hidden, of_rows, activation), 1), weights.fc2_bias, of_rows)

    hidden = biased(linear(permute(x, places), 0), weights.fc1_bias)
    of_rows = probabilities(probs, places)
    if recompute_activation and paddle.is_grad_enabled() and not hidden.stop_gradient:
        rows = paddle_recompute(second_half, hidden, of_rows, preserve_rng_state=False)
    else:
        rows = second_half(hidden, of_rows)
    y = unpermute(rows, places)
    return y if residual is None else residual + y
