"""Models of families that PaddleNLP has no class for, on its PretrainedModel: configuration, plain and pipeline model.

A family's classes are made of its row in `configs.families` and its record in `configs.schema`; layers are those of its
`configs.spec.ModelSpec`. Embedding, head and criterion are PaddleNLP's of Llama, which `hosts.paddlenlp.modeling` takes
over as those of PaddleNLP's own models.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from functools import cache
from typing import Any

import paddle
from paddle import Tensor, nn
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer, SharedLayerDesc, VocabParallelEmbedding
from paddle.distributed.fleet.utils.sequence_parallel_utils import ScatterOp, mark_as_sequence_parallel_parameter
from paddlenlp.transformers import PretrainedConfig, PretrainedModel
from paddlenlp.transformers.llama import modeling, modeling_pp
from paddlenlp.transformers.model_utils import PipelinePretrainedModel

from paddle_te.configs.families import Family
from paddle_te.configs.schema import SAME, SCHEMAS, TRANSFORMERS, keys_of
from paddle_te.configs.spec import spec_of
from paddle_te.host import HostClass, HostConfig
from paddle_te.hosts.paddlenlp.decoder import TEDecoderLayer, TEDecoderLayerPipe
from paddle_te.hosts.paddlenlp.modeling import TEForCausalLMPipe
from paddle_te.hosts.paddlenlp.own_forward import OwnForwardForCausalLM
from paddle_te.hosts.paddlenlp.positions import positions_of
from paddle_te.hosts.paddlenlp.tensor_parallel import Action, vocabulary_mappings


class OwnConfig(PretrainedConfig):
    """A configuration in PaddleNLP's words, whose defaults are those of the family's record."""

    defaults: dict[str, object] = {}

    def __init__(self, **said: Any) -> None:
        super().__init__(**self.defaults | said)


@cache
def config_class(family: Family) -> Any:
    """Return the class for the configurations of a Family."""
    record = SCHEMAS[family.model_type]
    defaults: dict[str, object] = {}
    for entry in fields(record):
        key = keys_of(record)[entry.name]
        if key.written_by != TRANSFORMERS and entry.name not in ("model_type", "architectures", "dtype"):
            default = None if entry.default is MISSING else entry.default
            defaults[entry.name] = default if key.paddlenlp is SAME else key.paddlenlp
    return _of_family(family, "Config", OwnConfig, defaults=defaults)


@cache
def model_class(family: Family, pipeline: bool = False) -> Any:
    """Return the class for the models of a Family with our layers, plain or pipeline."""
    config = config_class(family)
    if pipeline:  # which PaddleNLP loads right only without a base_model_prefix
        return _of_family(family, "ForCausalLMPipe", _ForCausalLMPipe, config_class=config)
    return _of_family(family, "ForCausalLM", _ForCausalLM, config_class=config, base_model_prefix=family.model_type)


def _of_family(family: Family, kind: str, base: type, **attributes: Any) -> type:
    """Return the subclass for a Family; PaddleNLP writes its name into config.json."""
    return type(
        f"{family.title}{kind}", (base,), {"model_type": family.model_type, "__doc__": base.__doc__} | attributes
    )


def _embedding(config: HostConfig) -> Any:
    split = config.tensor_parallel_degree > 1 and config.vocab_size % config.tensor_parallel_degree == 0
    embedding = (VocabParallelEmbedding if split else nn.Embedding)(config.vocab_size, config.hidden_size)
    model = spec_of(config)
    scale = model.embedding_scale * model.layer.stream_scale
    rounded = _rounded if model.family.scaled else lambda number, _: number
    if scale != 1.0:  # a hook: whatever class computes the lookup, the scale comes behind it
        embedding.register_forward_post_hook(lambda _, ids, embedded: embedded * rounded(scale, embedded.dtype))
    return embedding


def _add_positions(layer: nn.Layer, config: HostConfig) -> None:
    """Give a layer `embed_positions` beside its `embed_tokens`, where the model learns positions."""
    if spec_of(config).learned_positions:
        layer.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)


def _last_norm(config: HostConfig) -> nn.Layer:
    """Make the norm after the last layer, which `models.last_norm` takes over."""
    norm = spec_of(config).norm
    if norm.kind == "RMSNorm":
        return modeling.LlamaRMSNorm(config)
    layer = nn.LayerNorm(config.hidden_size, epsilon=norm.eps)
    if config.sequence_parallel:  # each rank has other tokens
        for parameter in layer.parameters():
            mark_as_sequence_parallel_parameter(parameter)
    return layer


class _LastNormPipe(nn.Layer):
    """A pipeline's layer before the head."""

    def __init__(self, config: HostConfig) -> None:
        super().__init__()
        self.norm = _last_norm(config)

    def forward(self, args: Any) -> Tensor:
        """Norm hidden_states, or those of a tuple, whose masks end here."""
        return self.norm(args[0] if isinstance(args, tuple) else args)


@cache
def _rounded(number: float, dtype: Any) -> float:
    """Return a number as the weights' type has it, by which transformers multiplies Gemma's embedded tokens."""
    return float(paddle.to_tensor(number, dtype, place=paddle.CPUPlace()).astype("float32"))


class _OwnModel(HostClass):
    """What the models here share with PaddleNLP's Llama, and do not with its layers."""

    _tied_weights_keys = ["lm_head.weight"]
    _init_weights = modeling.LlamaPretrainedModel._init_weights
    _get_model_flops = modeling.LlamaPretrainedModel._get_model_flops
    _get_hardware_flops = modeling.LlamaPretrainedModel._get_hardware_flops

    @classmethod
    def _get_tensor_parallel_mappings(cls, config: HostConfig, is_split: bool = True) -> dict[str, Action]:
        return vocabulary_mappings(config, is_split)


class _Decoder(nn.Layer):
    """Embedding, layers and last norm; `own_forward.OwnForward` goes through them."""

    def __init__(self, config: HostConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = _embedding(config)
        _add_positions(self, config)
        self.layers = nn.LayerList(
            TEDecoderLayer(config, number not in (config.no_recompute_layers or ()), number=number)
            for number in range(config.num_hidden_layers)
        )
        self.norm = _last_norm(config)


class _Whole(_OwnModel, PretrainedModel):
    """A decoder with head and criterion, as PaddleNLP's Llama has them."""

    get_input_embeddings = modeling.LlamaForCausalLM.get_input_embeddings
    get_output_embeddings = modeling.LlamaForCausalLM.get_output_embeddings

    def __init__(self, config: HostConfig) -> None:
        super().__init__(config)
        decoder = _Decoder(config)
        setattr(self, self.base_model_prefix, decoder)
        if config.tie_word_embeddings:
            self.lm_head = modeling.LlamaLMHead(config, decoder.embed_tokens.weight, transpose_y=True)
            self.tie_weights()
        else:
            self.lm_head = modeling.LlamaLMHead(config)
        self.criterion = modeling.LlamaPretrainingCriterion(config)


class _ForCausalLM(OwnForwardForCausalLM, _Whole):
    """See `OwnForwardForCausalLM`."""

    parts_module, parts_title = modeling, "Llama"

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, use_cache: bool = False, past_key_values: Any = None, **others: Any
    ) -> Any:
        """Do what PaddleNLP's Llama does; make all keys again where longrope's angles change with the next token."""
        rope = self.llama.layers[0].rope
        if (
            past_key_values
            and rope is not None
            and rope.switches_at is not None
            and input_ids.shape[1] == rope.switches_at + 1
        ):
            past_key_values = None
        return super().prepare_inputs_for_generation(input_ids, use_cache, past_key_values, **others)


class _EmbeddingPipe(nn.Layer):
    """A pipeline's first layer."""

    embedding_weight = property(lambda self: self.embed_tokens.weight)

    def __init__(self, config: HostConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = _embedding(config)
        _add_positions(self, config)

    def forward(self, args: Any) -> Any:
        """Return what the first layer gets.

        args: input_ids [b, s], or a tuple of them with what the layers get: a mask [b, s], where packed documents end,
        and position_ids, each of which may be None.
        """
        input_ids, mask, *others = args if isinstance(args, tuple) else (args, None)
        position_ids = others[1] if len(others) > 1 else None
        hidden = self.embed_tokens(input_ids)
        if "embed_positions" in self._sub_layers:
            hidden = hidden + self.embed_positions(positions_of(self.config, input_ids.shape, position_ids))
        if mask is not None:
            mask = modeling.LlamaModel._prepare_decoder_attention_mask(mask, input_ids.shape, 0, hidden.dtype)
        if self.config.sequence_parallel:
            hidden = ScatterOp.apply(hidden.reshape([-1, hidden.shape[-1]]))
        others = [tensor for tensor in (mask, *others) if tensor is not None]
        return (hidden, *others) if others else hidden


class _Stages(_OwnModel, PipelinePretrainedModel, PipelineLayer):
    """The layers of a pipeline, which Paddle divides over its stages."""

    _prepare_pipeline_inputs_func: Any = classmethod(
        modeling_pp.LlamaForCausalLMPipe._prepare_pipeline_inputs_func.__func__
    )

    def __init__(self, config: HostConfig) -> None:
        self.config = config
        ranks = fleet.get_hybrid_communicate_group()
        config.tensor_parallel_degree = max(ranks.get_model_parallel_world_size(), 1)
        config.tensor_parallel_rank = max(ranks.get_model_parallel_rank(), 0)
        self._describe(config)
        whole = config.num_hidden_layers % ranks.topology().get_dim_size("pipe") == 0
        PipelineLayer.__init__(
            self,
            layers=self.get_sequential_layers(),
            loss_fn=modeling.LlamaPretrainingCriterion(config),
            topology=ranks.topology(),
            seg_method="layer:TEDecoderLayerPipe" if whole else "uniform",
            num_virtual_pipeline_stages=config.virtual_pp_degree,
        )

    def _describe(self, config: HostConfig) -> None:
        """Name each layer as the whole model does."""
        prefix, kept = self.model_type, config.no_recompute_layers or ()
        self.add_sequential_layer(self._of_the_vocabulary(_EmbeddingPipe), prefix)
        for number in range(config.num_hidden_layers):
            layer = LayerDesc(TEDecoderLayerPipe, config, number not in kept, number=number)
            self.add_sequential_layer(layer, f"{prefix}.layers.{number}")
        self.add_sequential_layer(LayerDesc(_LastNormPipe, config), prefix)
        head = dict(transpose_y=True) if config.tie_word_embeddings else {}
        self.add_sequential_layer(self._of_the_vocabulary(modeling_pp.LlamaLMHeadPipe, **head), "lm_head")

    def _of_the_vocabulary(self, layer: type, **arguments: Any) -> Any:
        """Describe embedding or head, which share a weight where the head is tied."""
        if not self.config.tie_word_embeddings:
            return LayerDesc(layer, self.config, **arguments)
        name = f"{self.model_type}_shared_weight"
        return SharedLayerDesc(name, layer, shared_weight_attr="embedding_weight", config=self.config, **arguments)


class _ForCausalLMPipe(TEForCausalLMPipe, _Stages):
    """See `TEForCausalLMPipe`."""

    parts_module, parts_title = modeling_pp, "Llama"
