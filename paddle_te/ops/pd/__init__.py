"""The decoder layer's math in plain Paddle operations: the reference that te is tested against.

Interface, shapes and dtypes: `paddle_te.ops.interface`.
"""

from paddle_te.fp8 import amax_and_scale_update
from paddle_te.fp8.emulation import quantize_weight
from paddle_te.ops.pd.attention import (
    attention_with_lse,
    attention_with_lse_backward,
    check_attention,
    check_fp8_attention,
    check_packed_attention,
    dot_product_attention,
    latent_qkv,
    rotary_attention,
    rotary_qkv,
)
from paddle_te.ops.pd.cross_entropy import cross_entropy, parallel_cross_entropy
from paddle_te.ops.pd.linear import accumulate_wgrad, activate, layernorm_linear, layernorm_mlp, linear, normalize
from paddle_te.ops.pd.newton_schulz import newton_schulz
from paddle_te.ops.pd.self_attention import self_attention


def check(fp8: bool = False) -> None:
    """Raise nothing: it runs wherever Paddle does; fp8 is emulated."""


def check_block_scaling() -> None:
    """Raise nothing: it is emulated wherever Paddle runs."""
