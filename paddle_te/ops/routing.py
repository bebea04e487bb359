"""The part of routing that both backends compute in Paddle's operations, whose sizes the host knows."""

from __future__ import annotations

from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_te.ops.moe import SMALL, Routing


def among(x: Tensor, k: int, axis: int = -1) -> Tensor:
    """Say which numbers are among the k greatest along an axis, bool like x."""
    places = x.topk(k, axis)[1]
    ones = paddle.ones_like(places, dtype=x.dtype)  # a number would be copied from the host
    return paddle.put_along_axis(paddle.zeros_like(x), places, ones, axis) > 0


def route(logits: Tensor, routing: Routing, expert_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (probs, routing_map) of float32 logits [tokens, E]."""
    scores = _scores(logits, routing)
    choice = scores.detach() if expert_bias is None else scores.detach() + expert_bias
    routing_map = _chosen(choice, routing)
    return _probabilities(scores, routing_map, routing) * routing.scaling_factor, routing_map


def apply_routing(function: type[PyLayer], *arguments: Any) -> tuple[Tensor, Tensor]:
    """Apply a PyLayer that makes (probs, routing_map); the map gets no gradient.

    `ctx.mark_non_differentiable` would do the same, but ctx would then hold the map, and the map's graph holds ctx.
    If no backward followed, for example after an error, all tensors of the forward would stay in memory.
    """
    probs, routing_map = function.apply(*arguments)
    return probs, routing_map.detach()


def _scores(logits: Tensor, routing: Routing) -> Tensor:
    """Return what experts are chosen by."""
    if routing.score_function == "sigmoid":
        return F.sigmoid(logits)
    return F.softmax(logits, -1) if routing.pre_softmax else logits


@paddle.no_grad()
def _chosen(choice: Tensor, routing: Routing) -> Tensor:
    """Return the routing_map of the greatest numbers."""
    if routing.num_groups and routing.group_topk:
        best = _in_best_groups(choice, routing.best_of_group, routing.num_groups, routing.group_topk)
        choice = paddle.where(best, choice, paddle.full_like(choice, float("-inf")))
    return among(choice, routing.topk)


def _in_best_groups(choice: Tensor, of_each: int, groups: int, group_topk: int) -> Tensor:
    """Say whether each expert stands in one of a token's best groups, by the sum of so many of each group's numbers."""
    grouped = choice.reshape([choice.shape[0], groups, -1])
    of_groups = grouped.topk(of_each, -1)[0].sum(-1)
    best = among(of_groups, group_topk).unsqueeze(-1)
    return best.expand(grouped.shape).reshape(choice.shape)


def _probabilities(scores: Tensor, routing_map: Tensor, routing: Routing) -> Tensor:
    """Return those of the chosen experts, 0 for others."""
    zeros = paddle.zeros_like(scores)
    if routing.score_function == "softmax" and not routing.pre_softmax:
        return F.softmax(paddle.where(routing_map, scores, zeros - float("inf")), -1)
    probs = paddle.where(routing_map, scores, zeros)
    if routing.score_function == "sigmoid" and routing.topk > 1:
        probs = probs / (probs.sum(-1, keepdim=True) + SMALL)
    return probs


def shares_of(logits: Tensor, routing: Routing) -> Tensor:
    """Return scores of which a token's sum up to 1, [tokens, E]."""
    if routing.score_function == "softmax":
        return F.softmax(logits, -1)
    scores = F.sigmoid(logits)
    return scores / (scores.sum(-1, keepdim=True) + SMALL)


def balance_loss(scores: Tensor, routing_map: Tensor, topk: int, sequences: int) -> Tensor:
    """Return the balance loss of `shares_of`'s scores and the experts that were chosen by them."""
    tokens, experts = scores.shape
    by_sequence = [sequences, tokens // sequences, experts]
    chosen = routing_map.astype("float32").reshape(by_sequence).mean(1) / topk
    return (chosen * scores.reshape(by_sequence).mean(1)).sum(-1).mean() * experts


def z_loss(logits: Tensor) -> Tensor:
    """Return the mean of logsumexp(logits)² (Zoph et al., "ST-MoE", 2022, equation 5), float32 []."""
    greatest = logits.detach().max(-1, keepdim=True)
    return ((logits - greatest).exp().sum(-1).log() + greatest.squeeze(-1)).square().mean()


def limit_experts(probs: Tensor, routing_map: Tensor, capacity: int, policy: str) -> tuple[Tensor, Tensor]:
    """Let no expert keep more than `capacity` tokens."""
    with paddle.no_grad():
        if policy == "probs":
            order = paddle.where(routing_map, probs, paddle.full_like(probs, -1.0))
            kept = among(order, min(capacity, len(probs)), 0)
        else:
            kept = routing_map.astype("int64").cumsum(0) <= capacity
        routing_map = routing_map & kept
    return paddle.where(routing_map, probs, paddle.zeros_like(probs)), routing_map
