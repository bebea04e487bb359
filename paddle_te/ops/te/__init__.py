"""The decoder layer's math on Transformer Engine's kernels, in bfloat16, float16 and fp8.

Interface, shapes and dtypes: `paddle_te.ops.interface`. Everything is enqueued on Paddle's current stream.
"""

from paddle_te import native
from paddle_te.ops.te.activation import activate
from paddle_te.ops.te.attention import (
    attention_with_lse,
    attention_with_lse_backward,
    dot_product_attention,
    rotary_attention,
)
from paddle_te.ops.te.attention_support import check_attention, check_packed_attention
from paddle_te.ops.te.cross_entropy import cross_entropy, parallel_cross_entropy
from paddle_te.ops.te.float8_attention import check_fp8_attention
from paddle_te.ops.te.latent import latent_qkv
from paddle_te.ops.te.linear import accumulate_wgrad, layernorm_linear, linear
from paddle_te.ops.te.mlp import layernorm_mlp
from paddle_te.ops.te.newton_schulz import newton_schulz
from paddle_te.ops.te.norm import normalize
from paddle_te.ops.te.quantized import amax_and_scale_update, check_block_scaling, quantize_weight
from paddle_te.ops.te.rotation import rotary_qkv
from paddle_te.ops.te.self_attention import self_attention


def check(fp8: bool = False) -> None:
    """Raise native.BackendUnavailable, listing every missing condition and its remedy, where TE cannot run."""
    native.load(fp8)
