"""MoELayer: the feed-forward half of a decoder layer, of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paddle import Tensor

from paddle_te.distributed import ExpertParallel, recompute
from paddle_te.fp8 import bind_model
from paddle_te.layers.base import ParallelLayer
from paddle_te.layers.dropout import dropout_add
from paddle_te.layers.moe.config import MoEConfig, of_layer
from paddle_te.layers.moe.experts import GroupedMLP, SharedExpertMLP
from paddle_te.layers.moe.router import TopKRouter
from paddle_te.layers.moe.token_dispatcher import make_dispatcher
from paddle_te.layers.settings import LayerSettings, takes
from paddle_te.ops.norms import Norm


class MoELayer(ParallelLayer):
    """Compute y = x + dropout(experts(norm(x)) (+ shared_experts(norm(x)))), the residual included.

    Parameters: ln_weight [hidden_size], LayerNorm's ln_bias, router.weight, the buffer router.expert_bias,
    experts.{fc1_weight, fc2_weight}, shared_experts.{fc1_weight, fc2_weight, gate_weight}; see TopKRouter, GroupedMLP
    and SharedExpertMLP. With set_parallel_mode ranks divide the experts. Arguments: MoEConfig's.
    """

    slot = "moe_layer"  # its name in a TransformerLayer

    @classmethod
    def in_layer(cls, **options: Any) -> Callable[[LayerSettings], MoELayer]:
        """Return what a TransformerLayer takes as feed_forward. options: MoEConfig's; see `config.of_layer`."""
        return lambda settings: cls.of(of_layer(settings, **options))

    @takes(MoEConfig)
    def __init__(self, config: MoEConfig) -> None:
        super().__init__(config, config.set_parallel_mode)
        self.config = config
        self.dropout_in_training = config.hidden_dropout
        self.ln_weight, self.ln_bias = self.create_norm(
            config.hidden_size, config.normalization, config.zero_centered_gamma
        )
        self.router, self.experts = TopKRouter.of(config), GroupedMLP.of(config)
        if config.moe_shared_expert_intermediate_size:
            self.shared_experts = SharedExpertMLP.of(config)
        ep = ExpertParallel.from_fleet(self.tp) if config.set_parallel_mode else None
        kind = config.moe_token_dispatcher_type if self.tp is None else "allgather"
        self.dispatcher = None if ep is None else make_dispatcher(kind, ep)
        bind_model(self)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """Compute [..., hidden_size] -> the same shape and dtype; under sequence parallelism this rank's tokens.

        is_first_microbatch: as TransformerLayer's.
        """

        def whole(x: Tensor) -> Tensor:
            return self._forward(x, is_first_microbatch)

        again = self.config.recomputes("moe") and self.training and not x.stop_gradient
        return recompute(whole, x) if again else whole(x)

    def _sequences(self, x: Tensor) -> int:
        """Return the number of sequences that the tokens form, under sequence parallelism on all ranks together."""
        if x.ndim > 2:
            return x.shape[0]
        tp, length = self.router.tp, self.config.max_sequence_length
        ranks = tp.size if tp is not None and tp.sequence_parallel else 1
        return 1 if length is None else x.shape[0] * ranks // length

    def _forward(self, x: Tensor, is_first_microbatch: bool | None) -> Tensor:
        config, layers, fork = self.config, self._sub_layers, self.router.moe_ops.fork
        inputs, residual = fork(x, 2)
        norm = Norm(self.ln_weight, config.layernorm_epsilon, self.ln_bias, config.zero_centered_gamma)
        z = self.ops.normalize(inputs.reshape([-1, x.shape[-1]]), norm)
        of_router, of_experts, *of_shared = fork(z, 3 if "shared_experts" in layers else 2)
        probs, routing_map = layers["router"](of_router, self._sequences(x))
        base = None if self.dropout else residual.reshape(z.shape)
        if of_shared:
            base = layers["shared_experts"](*of_shared, base, is_first_microbatch)
        if self.dispatcher is None:
            y = layers["experts"](of_experts, probs, routing_map, base, is_first_microbatch)
        else:
            arrived = self.dispatcher.dispatch(of_experts, probs, routing_map)
            given = arrived.tokens, arrived.probs, arrived.routing_map
            y = layers["experts"](*given, None, is_first_microbatch, arrived.pairs)
            y = self.dispatcher.combine(y, arrived)
            y = y if base is None else self.router.moe_ops.add(base, y)
        y = y.reshape(x.shape)
        return dropout_add(y, residual, self.dropout, self.tp) if self.dropout else y
