"""Mixtures of experts, under Transformer Engine's and Megatron-Core's names."""

from paddle_te.layers.moe.auxiliary import MoEAuxLossAutoScaler
from paddle_te.layers.moe.config import MoEConfig
from paddle_te.layers.moe.experts import GroupedLinear, GroupedMLP, SharedExpertMLP
from paddle_te.layers.moe.layer import MoELayer
from paddle_te.layers.moe.router import TopKRouter, update_expert_bias

__all__ = [
    "GroupedLinear",
    "GroupedMLP",
    "MoEAuxLossAutoScaler",
    "MoEConfig",
    "MoELayer",
    "SharedExpertMLP",
    "TopKRouter",
    "update_expert_bias",
]
