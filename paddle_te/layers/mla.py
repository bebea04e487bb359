"""MLASelfAttention: multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), in its training form."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from paddle import Tensor

from paddle_te.distributed import recompute
from paddle_te.fp8 import fp8_autocast, get_autocast_state
from paddle_te.fp8.scaling import BLOCK
from paddle_te.layers.attention import DotProductAttention
from paddle_te.layers.base import ParallelLayer, local_size
from paddle_te.layers.checks import check_length, refuse
from paddle_te.layers.context import Context, KeyValue, takes_context
from paddle_te.layers.dropout import add_to_residual
from paddle_te.layers.linear import LayerNormLinear, Linear
from paddle_te.layers.settings import (
    CoreOptions,
    CoreSettings,
    HalfOptions,
    LayerNormLinearSettings,
    LayerSettings,
    LinearSettings,
    part,
    takes,
)
from paddle_te.ops.heads import LatentHeads
from paddle_te.ops.moe import get_moe_ops
from paddle_te.ops.norms import Norm

_NO_SUCH_OPTION = "{}: latent attention has no such option; leave it out"


@dataclass(frozen=True)
class MLAConfig(CoreOptions, HalfOptions):
    """The settings of a MLASelfAttention, under the names that they have in Megatron-Core's MLATransformerConfig.

    hidden_size, num_attention_heads: of the whole layer, not of one rank.
    kv_lora_rank, q_lora_rank: width of what keys and values, and queries, are made of; None: queries are made of the
        hidden states.
    qk_head_dim, qk_pos_emb_head_dim: numbers of a head of the queries and keys without rotation, and those with it,
        which all heads of the keys share. v_head_dim: width of a head of the values.
    softmax_scale: None is 1 / √(qk_head_dim + qk_pos_emb_head_dim).
    rotary_pos_interleaved, rotary_factor: as TransformerLayer's, of the rotated numbers.
    layernorm_epsilon: of the norm of the hidden states; latent_layernorm_epsilon: of those of the latent vectors.
    max_sequence_length: s; needed under sequence parallelism.
    Raises ValueError for what latent attention does not have.
    """

    hidden_size: int
    num_attention_heads: int
    kv_lora_rank: int = 512
    q_lora_rank: int | None = None
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128
    rotary_pos_interleaved: bool = True
    rotary_factor: float = 1.0
    layernorm_epsilon: float = 1e-5
    latent_layernorm_epsilon: float = 1e-6
    max_sequence_length: int | None = None
    attn_mask_type: str = "causal"

    def __post_init__(self) -> None:
        super().__post_init__()
        lacking = {
            "bias": self.bias,
            f"normalization={self.normalization!r}": self.normalization != "RMSNorm",
            f"norms={self.norms!r}": self.norms != "before",
            "zero_centered_gamma": self.zero_centered_gamma,
        }
        refuse(lacking, _NO_SUCH_OPTION)
        self.check_norm_kept("latent attention")
        check_length(self.sequence_parallel, self.max_sequence_length)

    @property
    def key_dim(self) -> int:
        """The size of a head of the queries and keys."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim

    @property
    def core(self) -> CoreSettings:
        """The arguments of attention itself."""
        return part(CoreSettings, self, kv_channels=(self.key_dim, self.v_head_dim))

    @property
    def proj(self) -> LinearSettings:
        """The arguments of the projection behind attention."""
        sizes = dict(in_features=self.num_attention_heads * self.v_head_dim, out_features=self.hidden_size)
        return part(LinearSettings, self, **sizes, parallel_mode=self.mode("row"), init_method=self.output_init)

    @property
    def q(self) -> LinearSettings:
        """The arguments of the projection from the hidden states to the queries."""
        sizes = dict(in_features=self.hidden_size, out_features=self.num_attention_heads * self.key_dim)
        return part(LinearSettings, self, **sizes, parallel_mode=self.mode("column"))

    @property
    def kv_down(self) -> LinearSettings:
        """The arguments of the projection from hidden states to k's and v's latent vector and the rotated numbers."""
        return self.down(self.kv_lora_rank + self.qk_pos_emb_head_dim)

    @property
    def kv_up(self) -> LayerNormLinearSettings:
        """The arguments of that latent vector's norm and of its projection to keys and values."""
        return self.up(self.kv_lora_rank, self.qk_head_dim + self.v_head_dim)

    def down(self, rank: int) -> LinearSettings:
        """Return the arguments of a projection from hidden states to a latent vector, which each rank has whole."""
        return part(LinearSettings, self, in_features=self.hidden_size, out_features=rank, parallel_mode=None)

    def up(self, rank: int, head: int) -> LayerNormLinearSettings:
        """Return the arguments of a latent vector's norm and of its projection to heads of that size."""
        sizes = dict(in_features=rank, out_features=self.num_attention_heads * head)
        return part(LayerNormLinearSettings, self, **sizes, eps=self.latent_layernorm_epsilon)

    def mode(self, parallel: str) -> str | None:
        """Return a parallel_mode."""
        return parallel if self.set_parallel_mode else None


def of_layer(settings: LayerSettings, **options: Any) -> MLAConfig:
    """Return the MLAConfig of a TransformerLayer, with MLAConfig's `options` beside what both have.

    Raises ValueError for MultiHeadAttention's settings that latent attention lacks.
    """
    lacking = {
        "cp_comm_type": settings.cp_comm_type is not None,
        "attn_input_format='sbhd'": settings.attn_input_format != "bshd",
        "add_qkv_bias": settings.add_qkv_bias,
        "qk_norm_type": settings.qk_norm_type is not None,
    }
    refuse(lacking, _NO_SUCH_OPTION)
    return part(MLAConfig, settings, attn_mask_type=settings.self_attn_mask_type, **options)


class MLASelfAttention(ParallelLayer):
    """Compute x + dropout(proj(attention(q, k, v))) with keys and values from one latent vector of a token.

    Parameters: ln_weight [hidden_size]; linear_q_proj.weight [heads · d, hidden_size], or with q_lora_rank
    linear_q_down_proj.weight [q_lora_rank, hidden_size] and linear_q_up_proj.{ln_weight, weight [heads · d,
    q_lora_rank]}; linear_kv_down_proj.weight [kv_lora_rank + qk_pos_emb_head_dim, hidden_size],
    linear_kv_up_proj.{ln_weight, weight [heads · (qk_head_dim + v_head_dim), kv_lora_rank]}, of each head the rows of
    the key before those of the value; proj.weight [hidden_size, heads · v_head_dim]. d is qk_head_dim and, behind it,
    qk_pos_emb_head_dim. Ranks divide what has heads; each has the other weights whole.

    Attention is in 16 bits: fp8_dpa is refused. Under block scaling linear_kv_down_proj computes in 16 bits where 128
    does not divide its rows, as in DeepSeek's models. Arguments: MLAConfig's.
    """

    @classmethod
    def in_layer(cls, **options: Any) -> Callable[[LayerSettings], MLASelfAttention]:
        """Return what a TransformerLayer takes as attention_half. options: MLAConfig's; see `of_layer`."""
        return lambda settings: cls.of(of_layer(settings, **options))

    @takes(MLAConfig)
    def __init__(self, config: MLAConfig) -> None:
        super().__init__(config, config.set_parallel_mode)
        self.config, self.dropout_in_training = config, config.hidden_dropout
        self.ln_weight, _ = self.create_norm(config.hidden_size, "RMSNorm", False)
        if config.q_lora_rank is None:
            self.linear_q_proj = Linear.of(config.q)
        else:
            self.linear_q_down_proj = self._whole(config.down(config.q_lora_rank))
            self.linear_q_up_proj = LayerNormLinear.of(config.up(config.q_lora_rank, config.key_dim))
        self.linear_kv_down_proj = self._whole(config.kv_down)
        self.linear_kv_down_proj.outside_blocks = config.kv_down.out_features % BLOCK > 0
        self.linear_kv_up_proj = LayerNormLinear.of(config.kv_up)
        self.proj = Linear.of(config.proj)
        self.core_attention = DotProductAttention.of(config.core)
        heads = local_size(config.num_attention_heads, self.tp, "num_attention_heads")
        turn = config.rotary_pos_interleaved, config.rotary_factor
        self.heads = LatentHeads(heads, config.qk_head_dim, config.v_head_dim, *turn)

    def _whole(self, settings: LinearSettings) -> Linear:
        """Make a projection that each rank has whole; under sequence parallelism it computes the rank's tokens.

        Its gradient is then summed over the ranks by the trainer, which sees gradients, and no main gradients.
        """
        if self.tp is not None and self.tp.sequence_parallel:
            settings = part(LinearSettings, settings, fuse_wgrad_accumulation=False)
        linear = Linear.of(settings)
        self.mark_if_tokens_are_split(linear.weight)
        return linear

    @takes_context("rotary_pos_emb", "attention_mask")
    def forward(self, x: Tensor, context: Context) -> Tensor | tuple[Tensor, KeyValue | None]:
        """Compute the attention half of a layer: x -> the same shape.

        x: [b, s, h], or under sequence parallelism [b·s/tp, h]. The other arguments are Context's; rotary_pos_emb has
        angles for qk_pos_emb_head_dim numbers. With use_cache the result is (output, (k, v)), k and v of all heads.
        """
        layers, first, config = self._sub_layers, context.is_first_microbatch, self.config
        self._check(x, context)
        fork, dropout = get_moe_ops(self.backend).fork, self.dropout
        inputs, residual = fork(x, 2)
        of_q, of_kv = fork(self.ops.normalize(inputs, Norm(self.ln_weight, config.layernorm_epsilon)), 2)
        q = self._batch_first(self._queries(of_q, first))
        kv, position = map(self._batch_first, self._keys(of_kv, first))
        attended, key_value = self._attended(q, kv, position, context)
        flat = attended.reshape([-1, attended.shape[-1]]) if x.ndim == 2 else attended
        out = layers["proj"](flat, None if dropout else residual, first)
        if dropout:
            out = add_to_residual(out, residual, None, dropout, layers["proj"].tp)
        return (out, key_value) if context.use_cache else out

    def _attended(self, q: Tensor, kv: Tensor, position: Tensor, context: Context) -> tuple[Tensor, KeyValue | None]:
        """Return (attention's output [b, s, h·d], (k, v) of all tokens so far where there is a cache)."""
        if context.with_cache:
            return self._attend_with_cache(q, kv, position, context)
        if self.training and (context.recompute_core_attention or self.config.core_again):
            return recompute(self._attend, q, kv, position, context), None
        return self._attend(q, kv, position, context), None

    def _check(self, x: Tensor, context: Context) -> None:
        """Raise ValueError where attention cannot be computed so, before the first kernel."""
        if context.rotary_pos_emb is None:
            raise ValueError("latent attention needs rotary_pos_emb: all heads of the keys share the rotated numbers")
        core, s = self.core_attention, self.config.max_sequence_length
        sequence = x.shape[1] if x.ndim == 3 else s or 0
        masked, packed = context.attention_mask is not None, context.cu_seqlens is not None
        if core.begin_forward(sequence, masked, context.with_cache, context.is_first_microbatch, packed) is not None:
            raise ValueError("fp8_dpa: latent attention computes its scores in 16 bits; leave fp8_dpa out")

    def _queries(self, z: Tensor, first: bool | None) -> Tensor:
        """Return the queries of this rank's heads, before their rotation."""
        layers = self._sub_layers
        if self.config.q_lora_rank is None:
            return layers["linear_q_proj"](z, None, first)
        return layers["linear_q_up_proj"](layers["linear_q_down_proj"](z, None, first), first)[0]

    def _keys(self, z: Tensor, first: bool | None) -> tuple[Tensor, Tensor]:
        """Return (keys and values of this rank's heads, the numbers of the keys that are to be rotated)."""
        layers, config = self._sub_layers, self.config
        with self._precision_of_kv_down():
            down = layers["linear_kv_down_proj"](z, None, first)
        latent, position = down.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], -1)
        if self.tp is not None:  # each rank's heads have a part of its gradient, or its tokens a part of the sequence
            position = self.tp.enter(position.contiguous())
        return layers["linear_kv_up_proj"](latent, first)[0], position

    def _precision_of_kv_down(self) -> AbstractContextManager[None]:
        recipe, outside = get_autocast_state().recipe, self.linear_kv_down_proj.outside_blocks
        return fp8_autocast(False, recipe) if outside and recipe.kind == "block" else nullcontext()

    def _batch_first(self, x: Tensor) -> Tensor:
        """Return a projection's output as [b, s, …]."""
        return x if x.ndim == 3 else x.reshape([-1, self.config.max_sequence_length, x.shape[-1]])

    def _attend(self, q: Tensor, kv: Tensor, position: Tensor, context: Context) -> Tensor:
        core, heads = self.core_attention, self._heads(q, kv, position, context)
        mask = core.additive_mask(context.attention_mask, context.cu_seqlens, q.shape[1])
        return core.attend(*heads, core.attention(context.cu_seqlens), mask)

    def _heads(self, q: Tensor, kv: Tensor, position: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        assert context.rotary_pos_emb is not None  # `_check` has made sure
        return self.ops.latent_qkv(q, kv, position, context.rotary_pos_emb, self.heads)

    def _attend_with_cache(self, q: Tensor, kv: Tensor, position: Tensor, context: Context) -> tuple[Tensor, KeyValue]:
        """Return (attention's output, (k, v) of all tokens so far)."""
        core, (q, k, v) = self.core_attention, self._heads(q, kv, position, context)
        mask = core.additive_mask(context.attention_mask, None, q.shape[1])
        k, v = context.behind_past(k, v)
        return core.attend(q, k, v, core.attention(), mask), (k, v)
