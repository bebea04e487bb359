"""A mixture of experts in plain Paddle operations: the reference that te is tested against.

Interface, shapes and dtypes: `paddle_te.ops.moe`.
"""

from __future__ import annotations

import paddle
from paddle import Tensor
from paddle.distributed.fleet.utils import recompute as paddle_recompute

from paddle_te.ops.moe import GroupedProjection, Routed, Routing
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
    routed: Routed,
    fc1: GroupedProjection,
    fc2: GroupedProjection,
    *,
    residual: Tensor | None = None,
    activation: str = "swiglu",
    recompute_activation: bool = False,
) -> Tensor:
    """Return Σ_e probs_e · (fc2_e(activate(fc1_e(x)))) (+ residual) for each token. The pairs are counted here."""
    multiple = 1 if fc1.quantizers is None else fc1.quantizers.input.scaling.multiple
    places = rows_of(routed.routing_map, routed.topk, multiple)

    def second_half(hidden: Tensor, of_rows: Tensor) -> Tensor:
        act = scaled_activate(hidden, of_rows, activation)
        y = grouped_linear(act, fc2._replace(bias=None), places.counts)
        if fc2.bias is None:
            return y
        return y + (fc2.bias.index_select(places.experts, 0) * of_rows.unsqueeze(1)).astype(y.dtype)

    hidden = grouped_linear(permute(x, places), fc1, places.counts)
    of_rows = probabilities(routed.probs, places)
    if recompute_activation and paddle.is_grad_enabled() and not hidden.stop_gradient:
        rows = paddle_recompute(second_half, hidden, of_rows, preserve_rng_state=False)
    else:
        rows = second_half(hidden, of_rows)
    y = unpermute(rows, places)
    return y if residual is None else residual + y
