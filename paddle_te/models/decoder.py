"""A decoder layer as every host has it: a TransformerLayer made from a model's configuration.

A host (`paddle_te.hosts`) has a class of its own around it, which takes what that host calls its decoder layers with.
Configurations are in PaddleNLP's words, which those of this package (`paddle_te.configs`) are written in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, fields
from functools import lru_cache, partial
from typing import Any

import paddle
from paddle import Tensor, nn
from paddle.distributed import fleet

from paddle_te.configs.spec import ExpertsSpec, LayerSpec, ModelSpec, spec_of
from paddle_te.distributed import fp8_group
from paddle_te.fp8 import RECIPES, DelayedScaling, fp8_autocast
from paddle_te.fp8.recipe import Recipe
from paddle_te.layers import MLASelfAttention, RotaryPositionEmbedding, TransformerLayer
from paddle_te.layers.base import check_blocks
from paddle_te.layers.context import ALONE, Context
from paddle_te.layers.moe import MoEConfig, MoELayer
from paddle_te.layers.settings import LayerSettings, part
from paddle_te.models.backend import is_te, ops_of
from paddle_te.models.context_parallel import cp_comm_type, sequence_ranks
from paddle_te.ops.kept import kept_on
from paddle_te.ops.te.offload import ActivationOffload
from paddle_te.options import LAYER_OPTIONS, LayerOptions


@lru_cache
def _rotary_on(
    device: str, dim: int, base: float, scaling: tuple[tuple[str, Any], ...], max_position_embeddings: int
) -> RotaryPositionEmbedding:
    """Make one table of angles for all layers alike; scaling is a tuple of items, to be hashable."""
    return RotaryPositionEmbedding(
        dim, base, rope_scaling=dict(scaling), max_position_embeddings=max_position_embeddings
    )


def rotary_embedding(model: ModelSpec, number: int = 0) -> RotaryPositionEmbedding | None:
    """Make the RotaryPositionEmbedding of a layer of a ModelSpec; None for attention without rotation."""
    attention = model.layers[number].attention
    rotation = attention.rotation
    if rotation is None:
        return None
    return _rotary_on(paddle.get_device(), attention.rotary_dim, rotation.theta, rotation.scaling, model.positions)


def layer_arguments(spec: LayerSpec, rope: RotaryPositionEmbedding | None, options: LayerOptions) -> dict[str, Any]:
    """Return TransformerLayer's arguments that say what a LayerSpec computes.

    rope: its attention's `rotary_embedding`. options: the run's, of which those for experts are read.
    """
    attention, feed_forward = spec.attention, spec.feed_forward
    experts = experts_arguments(feed_forward, options) if isinstance(feed_forward, ExpertsSpec) else None
    scale, factor = attention.scale or attention.head_dim**-0.5, rope.attention_factor if rope else 1.0
    in_part, norm = attention.rotation is not None and attention.rotary_dim < attention.head_dim, spec.norm
    latent = None if attention.latent is None else latent_arguments(spec, rope)
    return dict(
        num_attention_heads=attention.heads,
        num_gqa_groups=attention.groups,
        kv_channels=attention.head_dim,
        softmax_scale=scale if in_part else scale * factor**2,
        rotary_factor=factor if in_part else 1.0,
        attn_logit_softcapping=attention.softcap or 0.0,
        softmax_type="learnable" if attention.sinks else "vanilla",
        window_size=attention.window and (attention.window - 1, 0),  # config.json's counts a token itself, too
        attention_dropout=attention.dropout,
        add_qkv_bias=attention.qkv_bias,
        qk_norm_type=attention.qk_norm and "RMSNorm",
        qk_norm_before_rope=attention.qk_norm is not None,
        qk_norm_over=attention.qk_norm or "head",
        qk_norm_eps=norm.eps,
        qk_norm_zero_centered_gamma=norm.zero_centered,
        rotary_pos_interleaved=attention.rotation is not None and attention.rotation.interleaved,
        ffn_hidden_size=feed_forward.ffn,
        activation=feed_forward.activation,
        bias=feed_forward.bias,
        normalization=norm.kind,
        layernorm_epsilon=spec.input_eps,
        zero_centered_gamma=norm.zero_centered,
        norms=spec.norms,
        hidden_dropout=spec.dropout,
        attention_half=latent and MLASelfAttention.in_layer(**latent),
        feed_forward=experts and MoELayer.in_layer(**experts),
    )


def latent_arguments(spec: LayerSpec, rope: RotaryPositionEmbedding | None) -> dict[str, Any]:
    """Return MLAConfig's arguments that say what a LayerSpec's latent attention computes, as `layer_arguments`."""
    attention, latent = spec.attention, spec.attention.latent
    assert latent is not None and rope is not None
    return dict(
        kv_lora_rank=latent.kv_lora_rank,
        q_lora_rank=latent.q_lora_rank,
        qk_head_dim=attention.head_dim - latent.qk_rope_head_dim,
        qk_pos_emb_head_dim=latent.qk_rope_head_dim,
        v_head_dim=latent.v_head_dim,
        softmax_scale=attention.head_dim**-0.5 * rope.latent_factor**2,
        latent_layernorm_epsilon=latent.eps,
    )


def experts_arguments(spec: ExpertsSpec, options: LayerOptions) -> dict[str, Any]:
    """Return MoEConfig's arguments that say what an ExpertsSpec computes, without those that a TransformerLayer has."""
    coefficient, rate = options.moe_aux_loss_coeff, options.moe_router_bias_update_rate
    return dict(
        moe_ffn_hidden_size=spec.ffn,
        num_moe_experts=spec.experts,
        moe_router_topk=spec.topk,
        moe_router_score_function=spec.score,
        moe_router_pre_softmax=spec.pre_softmax,
        moe_router_bias=spec.router_bias,
        moe_router_num_groups=spec.groups,
        moe_router_group_topk=spec.group_topk,
        moe_router_group_best=spec.group_best,
        moe_router_topk_scaling_factor=spec.scaling,
        moe_router_enable_expert_bias=spec.expert_bias,
        moe_router_bias_update_rate=MoEConfig.moe_router_bias_update_rate if rate is None else rate,
        moe_router_load_balancing_type="seq_aux_loss" if spec.by_sequence else "aux_loss",
        moe_aux_loss_coeff=spec.aux_loss_coeff if coefficient is None else coefficient,
        moe_z_loss_coeff=options.moe_z_loss_coeff,
        moe_expert_capacity_factor=options.moe_expert_capacity_factor,
        moe_router_force_load_balancing=options.moe_router_force_load_balancing,
        moe_shared_expert_intermediate_size=spec.shared_ffn,
        moe_shared_expert_gate=spec.shared_gate,
        moe_token_dispatcher_type=options.moe_token_dispatcher_type,
        set_parallel_mode=True,  # over sharding's ranks, where they divide experts, too
    )


def recipe_of(config: Any) -> Recipe | None:
    """Return the fp8 recipe that a configuration's flags ask for, None without use_fp8.

    Raises ValueError for values that no recipe has.
    """
    layers = LayerOptions.of(config)
    if not layers.use_fp8:
        return None
    if layers.fp8_recipe not in RECIPES:
        raise ValueError(f"fp8_recipe={layers.fp8_recipe!r}; it must be {LAYER_OPTIONS['fp8_recipe'].kind.words}")
    recipe, options = RECIPES[layers.fp8_recipe], asdict(layers)
    # a field's option has its name, behind fp8_; None leaves it to the recipe
    given = {field.name: options.get(f"fp8_{field.name.removeprefix('fp8_')}") for field in fields(recipe)}
    return recipe(**{name: value for name, value in given.items() if value is not None})


def fp8_scope(recipe: Recipe | None) -> AbstractContextManager[None]:
    """Make the fp8_autocast in which a model computes; recipe: recipe_of's.

    For a layer's forward, not for the model's: a recomputed forward passes through the layer's again.
    """
    return fp8_autocast(recipe is not None, recipe, fp8_group() if recipe else None)


class MicroBatches:
    """Count the micro-batches of a pipeline's layer, which a schedule takes in an order of its own."""

    def __init__(self) -> None:
        # Paddle's type lacks some keys
        configs: Mapping[str, Any] = fleet.fleet._user_defined_strategy.pipeline_configs
        self._of_a_step = configs["accumulate_steps"]
        self._seen = 0

    def is_first(self, training: bool) -> bool | None:
        """Count, and say whether this is the first one of a step: its fp8 weights serve the others.

        None outside training.
        """
        if not training:
            return None
        first = self._seen % self._of_a_step == 0
        self._seen += 1
        return first


class DecoderLayer(nn.Layer):
    """Compute a decoder layer of a model's configuration; config.transformer_engine_backend says which backend.

    number: the layer's place in the model; a host whose models have all layers alike need not say it.

    Parameters: transformer.self_attention.layernorm_qkv.{ln_weight, weight} and, where the model has it, bias,
    transformer.self_attention.proj.weight, or those of MLASelfAttention; transformer.layernorm_mlp.{ln_weight,
    fc1_weight, fc2_weight}, or those of MoELayer; initialised as PaddleNLP's.
    """

    def __init__(self, config: Any, number: int = 0) -> None:
        super().__init__()
        self.config, self.number = config, number
        model = spec_of(config)
        spec = model.layers[number]
        self.rope = rotary_embedding(model, number)
        self.fp8_recipe = recipe_of(config)
        # makes the context of its forward, in which its activations are moved
        self.keeping: Callable[[], AbstractContextManager[None]] = nullcontext
        if self.fp8_recipe:
            fp8_group()  # collective: here, where all ranks are
        if isinstance(self.fp8_recipe, DelayedScaling) and self.fp8_recipe.fp8_dpa:
            if window := spec.attention.window:
                raise ValueError(f"fp8_dpa: attention in fp8 has no sliding_window={window}; leave fp8_dpa out")
            ops = ops_of(config)
            ops.check_fp8_attention(spec.attention.head_dim, backward=self.fp8_recipe.fp8_dpa_bwd)
        in_blocks = self.fp8_recipe is not None and self.fp8_recipe.kind == "block"
        if in_blocks:  # before weights that exist in fp8 only are quantized
            ops_of(config).check_block_scaling()
        std, layers = model.initializer_range, LayerOptions.of(config)
        settings = part(
            LayerSettings,
            layers,
            hidden_size=model.hidden,
            max_sequence_length=config.seq_length,
            set_parallel_mode=config.tensor_parallel_degree > 1,
            sequence_parallel=config.sequence_parallel,
            init_method=nn.initializer.Normal(0.0, std),
            output_layer_init_method=nn.initializer.Normal(0.0, std / (2 * len(model.layers)) ** 0.5),
            cp_comm_type=cp_comm_type(config),
            backend=config.transformer_engine_backend,
            **layer_arguments(spec, self.rope, layers),
        )
        self.transformer = TransformerLayer(settings)  # type: ignore[call-arg, arg-type]  # of a whole record: see `takes`
        if in_blocks:
            check_blocks(self.transformer)

    def compute(self, hidden_states: Tensor, context: Context = ALONE) -> Tensor:
        """Compute hidden_states [b, s, h] ([b·s/tp, h] under sequence parallelism) -> the same shape.

        Where ranks share sequences (config's sep_ or context_parallel_degree), they have this rank's tokens, and all
        else is of whole sequences. The context has position_ids; the angles are made here.
        """
        context = context._replace(rotary_pos_emb=self._angles(hidden_states, context))
        with fp8_scope(self.fp8_recipe), self.keeping():
            return self.transformer(hidden_states, context)

    def _angles(self, hidden_states: Tensor, context: Context) -> Tensor | None:
        """Return rotary embedding's angles: float32 [s, d], or [b, s, d] with position_ids; None for no rotation."""
        if self.rope is None:
            return None
        position_ids, past_key_value = context.position_ids, context.past_key_value
        past = 0 if past_key_value is None else past_key_value[0].shape[1]
        length = self.config.seq_length
        if hidden_states.ndim == 3:
            length = past + hidden_states.shape[1] * sequence_ranks(self.config)
        if position_ids is not None or past:
            self.rope.check_any_position(length, past)
        if position_ids is None:
            return self.rope(length)[past:]
        return kept_on(position_ids, self.rope.at, length, context.cu_seqlens is not None)


def move_activations(model: nn.Layer) -> None:
    """Let the first decoder layers of a model keep their activations in host memory, as its configuration says.

    Raises ValueError for more layers than can.
    """
    count = LayerOptions.of(model.config).offload_activations
    if not count or not is_te(model.config):
        return
    layers = [layer for layer in model.sublayers() if isinstance(layer, DecoderLayer)]
    offload = ActivationOffload(len(layers), count)
    for number, layer in enumerate(layers):
        layer.keeping = partial(offload.forward_of, number)
