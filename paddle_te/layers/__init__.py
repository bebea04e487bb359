"""Transformer Engine's layers for Paddle, under TE's public names.

Parameters and parallelism live here, the math in `paddle_te.ops`. Every layer takes `backend`,
"transformer_engine" or "paddle": the same parameters, names and shapes, another implementation of the math.
"""

from paddle_te.layers.attention import DotProductAttention, MultiHeadAttention
from paddle_te.layers.base import stored_weights
from paddle_te.layers.cross_entropy import linear_cross_entropy, parallel_cross_entropy
from paddle_te.layers.dropout import dropout_add
from paddle_te.layers.linear import LayerNormLinear, Linear
from paddle_te.layers.mla import MLAConfig, MLASelfAttention
from paddle_te.layers.mlp import LayerNormMLP
from paddle_te.layers.norm import LayerNorm, RMSNorm
from paddle_te.layers.replacement import replace_linear
from paddle_te.layers.rotary import RotaryPositionEmbedding
from paddle_te.layers.transformer import TransformerLayer

__all__ = [
    "DotProductAttention",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MLAConfig",
    "MLASelfAttention",
    "MultiHeadAttention",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "dropout_add",
    "linear_cross_entropy",
    "parallel_cross_entropy",
    "replace_linear",
    "stored_weights",
]
