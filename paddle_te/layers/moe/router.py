"""TopKRouter: which experts a token gets, and with which probabilities."""

from __future__ import annotations

import math
from typing import NamedTuple

import paddle
import paddle.distributed as dist
from paddle import Tensor, nn
from paddle.distributed.communication.group import Group

from paddle_te.distributed import TensorParallel, sequence_group
from paddle_te.layers.base import ParallelLayer
from paddle_te.layers.moe.auxiliary import MoEAuxLossAutoScaler
from paddle_te.layers.moe.config import MoEConfig
from paddle_te.layers.settings import takes
from paddle_te.ops import routing
from paddle_te.ops.moe import MoEOps, get_moe_ops


class RouterStatistics(NamedTuple):
    """Hold what a router's last forward saw: tensors, for which nobody has waited.

    tokens_per_expert: float32 [E], before any are dropped. dropped: float32 [], pairs of a token and an expert.
    aux_loss, z_loss: float32 [], with their coefficients; None without such a loss.
    """

    tokens_per_expert: Tensor
    dropped: Tensor
    aux_loss: Tensor | None = None
    z_loss: Tensor | None = None


class TopKRouter(ParallelLayer):
    """Route as Megatron-Core's router, in float32: x -> (probs, routing_map), see `ops.moe`.

    Parameters: weight [num_moe_experts, hidden_size]; with moe_router_bias, bias [num_moe_experts], zeros at first.
    With moe_router_enable_expert_bias the buffer expert_bias, float32 [num_moe_experts], which gets no gradient but
    `update_expert_bias`.
    In training its losses are added to the gradients of probs (`MoEAuxLossAutoScaler`).
    Where ranks divide sequences tokens are this rank's, and the losses are those of all ranks' tokens.
    statistics: the RouterStatistics of the last forward.
    """

    @takes(MoEConfig)
    def __init__(self, config: MoEConfig) -> None:
        super().__init__(config, config.set_parallel_mode)
        self.moe_ops.check_experts(config.activation)
        self.config, self.routing = config, config.routing
        self.statistics: RouterStatistics | None = None
        self.sharing = _sharing(self.tp) if config.set_parallel_mode else ()
        if config.by_sequence and any(ranks is not self.tp for ranks in self.sharing):
            raise ValueError(
                "moe_router_load_balancing_type='seq_aux_loss' is of whole sequences, which ranks of sep or context "
                "parallelism divide; leave these out, or set moe_router_load_balancing_type='aux_loss'"
            )
        weight = self.create_parameter(
            [config.num_moe_experts, config.hidden_size],
            dtype=self.params_dtype,
            default_initializer=config.weight_init,
        )
        self.weight = self.mark_if_tokens_are_split(weight)
        has_bias = config.moe_router_bias
        self.bias = self.mark_if_tokens_are_split(self.create_bias(config.num_moe_experts)) if has_bias else None
        zeros = lambda: paddle.zeros([config.num_moe_experts], "float32")  # noqa: E731
        balances = config.moe_router_enable_expert_bias
        self.register_buffer("expert_bias", zeros() if balances else None)  # type: ignore[arg-type]  # Paddle takes None
        self.register_buffer("_tokens", zeros() if balances else None, persistable=False)  # type: ignore[arg-type]  # so

    @property
    def moe_ops(self) -> MoEOps:
        """Return the backend's `ops.moe.MoEOps`."""
        return get_moe_ops(self.backend)

    def forward(self, x: Tensor, sequences: int = 1) -> tuple[Tensor, Tensor]:
        """Route [..., hidden_size] -> (probs, float32 [tokens, E], routing_map, bool [tokens, E]).

        sequences: how many the tokens are, of equal length, one behind the other; the seq_aux_loss is of each.
        """
        logits = self.logits(x)
        if self.config.moe_router_force_load_balancing:
            logits = _balanced(logits, self.routing.topk)
        probs, routing_map = self.moe_ops.route(logits, self.routing, self.expert_bias)
        tokens = routing_map.astype("float32").sum(0)
        aux_loss, z_loss = self._losses(logits, sequences)
        for loss in aux_loss, z_loss:
            if loss is not None:  # of which each rank that shares sequences adds the gradient
                probs = MoEAuxLossAutoScaler.apply(probs, loss / math.prod(ranks.size for ranks in self.sharing))
        if self._tokens is not None and self.training and paddle.is_grad_enabled():  # not twice with recompute
            self._tokens.add_(tokens)
        probs, routing_map = self._limited(probs, routing_map)
        dropped = tokens.sum() - routing_map.astype("float32").sum()
        losses = [None if loss is None else loss.detach() for loss in (aux_loss, z_loss)]
        self.statistics = RouterStatistics(tokens, dropped, *losses)
        return probs, routing_map

    def logits(self, x: Tensor) -> Tensor:
        """Return float32 [tokens, E]."""
        x = x.reshape([-1, x.shape[-1]]).astype("float32")
        # transposed by the GEMM: a weight used through .T had its gradient copied as if it were contiguous
        logits = paddle.matmul(x, self.weight.astype("float32"), transpose_y=True)
        return logits if self.bias is None else logits + self.bias.astype("float32")

    def _losses(self, logits: Tensor, sequences: int) -> tuple[Tensor | None, Tensor | None]:
        """Return (auxiliary loss, z-loss), with their coefficients; None where there is none, as in evaluation."""
        config, aux_loss, z_loss = self.config, None, None
        balances = config.moe_router_load_balancing_type != "none" and config.moe_aux_loss_coeff
        if not self.training or not (balances or config.moe_z_loss_coeff):
            return None, None
        for ranks in self.sharing:
            logits = ranks.enter(logits)
        if balances:
            of_each = sequences if config.by_sequence else 1
            aux_loss = self.moe_ops.balance_loss(logits, self.routing, of_each) * config.moe_aux_loss_coeff
        if config.moe_z_loss_coeff:
            z_loss = routing.z_loss(logits) * config.moe_z_loss_coeff
        return aux_loss, z_loss

    def _limited(self, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor]:
        capacity = self.config.capacity(len(probs))
        if capacity is None:
            return probs, routing_map
        return self.moe_ops.limit_experts(probs, routing_map, capacity, self.config.moe_token_drop_policy)

    @paddle.no_grad()
    def move_expert_bias(self, tokens: Tensor) -> None:
        """Move the bias of each expert by moe_router_bias_update_rate, and count tokens from 0 again.

        Up where tokens [E] are fewer than their mean, and down where they are more.
        """
        step = paddle.sign(tokens.mean() - tokens) * self.config.moe_router_bias_update_rate
        self.expert_bias.set_value(self.expert_bias + step)
        self.forget_load()

    def forget_load(self) -> None:
        """Count the tokens of the experts from 0 again."""
        if self._tokens is not None:
            self._tokens.zero_()


def _sharing(tp: TensorParallel | None) -> tuple[TensorParallel, ...]:
    """Return the ranks that have other tokens of the same sequences: of sequence parallelism, and fleet's sep group."""
    sharing = (tp,) if tp is not None and tp.sequence_parallel else ()
    group = sequence_group()
    if group is None:
        return sharing
    return (*sharing, TensorParallel(group, group.rank, group.nranks, sequence_parallel=True))


@paddle.no_grad()
def update_expert_bias(model: nn.Layer, *groups: Group) -> None:
    """Update the expert_bias of all routers in a model (Wang et al., "Auxiliary-Loss-Free Load Balancing", 2024).

    The bias of a router with a frozen weight stays, as with LoRA, whose adapters have no bias. Call it once a step,
    after the last backward. groups: groups of ranks with different sequences of a step, such as data parallelism's and
    sharding's; each sums the results of the one before. Ranks that share sequences are summed without naming them.
    """
    layers = model.sublayers(include_self=True)
    routers = [layer for layer in layers if isinstance(layer, TopKRouter) and layer.expert_bias is not None]
    routers = [router for router in routers if not router.weight.stop_gradient]
    if not routers:
        return
    tokens = paddle.stack([router._tokens for router in routers])
    for group in (*groups, *(ranks.group for ranks in routers[0].sharing)):
        dist.all_reduce(tokens, group=group)
    for router, seen in zip(routers, tokens, strict=True):
        router.move_expert_bias(seen)


def _balanced(logits: Tensor, topk: int) -> Tensor:
    """Return logits by which token t gets the experts from t · topk on, whose gradient is that of the logits."""
    tokens, experts = logits.shape
    first = (paddle.arange(tokens) * topk).unsqueeze(1)
    forced = -((paddle.arange(experts).unsqueeze(0) - first) % experts).astype("float32") / experts
    return logits - logits.detach() + forced
