"""MoELayer: the feed-forward half of a decoder layer, of experts."""

from paddle_te.distributed import recompute
from paddle_te.fp8 import bind_model
from paddle_te.layers.dropout import dropout_add
from paddle_te.layers.linear import _Layer
from paddle_te.layers.moe.config import MoEConfig
from paddle_te.layers.moe.experts import GroupedMLP, SharedExpertMLP
from paddle_te.layers.moe.router import TopKRouter
from paddle_te.layers.settings import takes
from paddle_te.ops.norms import Norm


class MoELayer(_Layer):
    """y = x + dropout(experts(norm(x)) (+ shared_experts(norm(x)))), the residual included.

    Parameters: ln_weight [hidden_size], LayerNorm's ln_bias, router.weight, the buffer router.expert_bias,
    experts.{fc1_weight, fc2_weight}, shared_experts.{fc1_weight, fc2_weight, gate_weight}; see TopKRouter, GroupedMLP
    and SharedExpertMLP. Arguments: MoEConfig's.
    """

    @takes(MoEConfig)
    def __init__(self, config: MoEConfig):
        super().__init__(config)
        self.config = config
        self.dropout_in_training = config.hidden_dropout
        self.ln_weight, self.ln_bias = self.create_norm(
            config.hidden_size, config.normalization, config.zero_centered_gamma
        )
        self.router, self.experts = TopKRouter(config), GroupedMLP(config)
        self.shared_experts = SharedExpertMLP(config) if config.moe_shared_expert_intermediate_size else None
        bind_model(self)

    def forward(self, x, is_first_microbatch=None):
        """[..., hidden_size] -> the same shape and dtype. is_first_microbatch: as TransformerLayer's."""

        def added(x):
            return self._added(x, is_first_microbatch)

        again = "moe" in self.config.recompute_modules and self.training and not x.stop_gradient
        y = recompute(added, x) if again else added(x)
        return dropout_add(y, x, self.dropout, None) if self.dropout else x + y

    def _added(self, x, is_first_microbatch):
        """What is added to x."""
        config = self.config
        norm = Norm(self.ln_weight, config.layernorm_epsilon, self.ln_bias, config.zero_centered_gamma)
        z = self.ops.normalize(x, norm)
        z = z.reshape([-1, z.shape[-1]])
        probs, routing_map = self.router(z)
        y = self.experts(z, probs, routing_map, is_first_microbatch)
        if self.shared_experts is not None:
            y = y + self.shared_experts(z, is_first_microbatch)
        return y.reshape(x.shape)
