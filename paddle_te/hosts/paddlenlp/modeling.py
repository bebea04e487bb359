"""The switch: PaddleNLP's models built with TE's decoder layers. Each family mixes these classes into PaddleNLP's."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any, Literal

import paddle
from paddle import Tensor
from paddle.distributed.collective import _c_concat
from paddle.distributed.fleet.meta_parallel import VocabParallelEmbedding
from paddle.distributed.fleet.utils.sequence_parallel_utils import GatherOp
from paddlenlp.peft import LoRAModel
from paddlenlp.transformers.model_outputs import CausalLMOutputWithCrossAttentions

from paddle_te.configs.families import family_of
from paddle_te.configs.spec import spec_of
from paddle_te.distributed import TensorParallel
from paddle_te.fp8 import ModuleScaling, bind_model
from paddle_te.host import HostClass, HostConfig, HostModel
from paddle_te.hosts.paddlenlp.capabilities import PADDLENLP
from paddle_te.hosts.paddlenlp.decoder import FROM_ZERO, TEDecoderLayer
from paddle_te.hosts.paddlenlp.tensor_parallel import layer_mappings, mappings_of_tied_head
from paddle_te.job import Door, Job, check
from paddle_te.job.rules import LAYER_RULES
from paddle_te.layers import linear_cross_entropy, parallel_cross_entropy
from paddle_te.layers.accuracy import Accuracy
from paddle_te.models.backend import backend_of_ours, is_native, ops_of
from paddle_te.models.context_parallel import context_parallel, rank_sequence_length
from paddle_te.models.decoder import MicroBatches, fp8_scope, move_activations, recipe_of
from paddle_te.models.in_16_bits import skip_outer_layers
from paddle_te.models.last_norm import LastNorm
from paddle_te.models.switch import replace_decoder_layers, take_over
from paddle_te.ops import documents
from paddle_te.ops.activations import soft_cap
from paddle_te.ops.embedding import adds_to_main_grad, embedding
from paddle_te.ops.projection import Projection
from paddle_te.options import FP8_RECIPES, LayerOptions
from paddle_te.options.layers import FuseWgrad

CONFIG = Door(mark="", between="=")  # of a model's configuration
_OF_THE_HEAD = [rule for rule in LAYER_RULES if rule.flag == "fp8_lm_head"]


def check_fp8_lm_head(config: HostConfig) -> None:
    """Raise ValueError for a configuration that asks for a head in fp8 which cannot be."""
    layers = LayerOptions.of(config)
    if not layers.fp8_lm_head:
        return
    check(Job.of(config), CONFIG, _OF_THE_HEAD)
    rows, rest = divmod(config.vocab_size, max(config.tensor_parallel_degree, 1))
    multiple = FP8_RECIPES[layers.fp8_recipe]
    if rest or rows % multiple:
        raise ValueError(
            f"fp8_lm_head: GEMMs with {layers.fp8_recipe} scaling need dimensions divisible by {multiple}, each rank "
            f"has {rows} of vocab_size={config.vocab_size}; pad the vocabulary, or leave fp8_lm_head out"
        )


def ignore_index(config: HostConfig) -> int:
    """Return the label that has no loss, as PaddleNLP's criteria read it."""
    return getattr(config, "ignore_index", -100)


class TELMHead(HostClass):
    """PaddleNLP's head, in fp8 (config.fp8_lm_head), or with its criterion in one.

    With config.fuse_wgrad_accumulation its weight's gradient is added up in the GEMM;
    config.use_fused_linear_cross_entropy asks for the criterion.

    Not built in PaddleNLP's place, as decoder layers are: its constructor calls its base through its own name, then
    ours. `take_over` makes one out of its.
    """

    fp8: ModuleScaling | None = None  # a ModuleScaling for a head in fp8
    accuracy: Accuracy | None = None  # an Accuracy, while one is counted
    smoothing = 0.0  # of labels, in training
    softcap = 0.0  # of the logits
    transpose_y = False  # the weight is [in, out], unless PaddleNLP's head says otherwise

    def taken_over(self) -> None:
        """Make what PaddleNLP's constructor does not."""
        self.softcap = spec_of(self.config).logit_softcap or 0.0
        if LayerOptions.of(self.config).fp8_lm_head:
            self.fp8 = ModuleScaling(1, ops_of(self.config).amax_and_scale_update)
            self.fp8_recipe = recipe_of(self.config)

    def forward(
        self, hidden_states: Tensor, tensor_parallel_output: bool | None = None, labels: Tensor | None = None
    ) -> Tensor:
        """Return PaddleNLP's logits, or with labels [b, s] the loss, with the logits of a chunk of tokens at a time.

        The loss is computed in here because sharding stage 3 has the weight only while its layer is called.
        """
        if labels is not None:
            return self._loss(hidden_states, labels)
        if self._theirs_gathers() and self.fp8 is None and not self._fuses_wgrad():
            return super().forward(hidden_states, tensor_parallel_output)
        return self._logits(hidden_states, tensor_parallel_output)

    def _theirs_gathers(self) -> bool:
        """Return whether PaddleNLP's own head of the family makes sequences of what sequence parallelism leaves."""
        theirs = PADDLENLP.get(family_of(self.config).model_type)
        if theirs is None:  # a model of ours
            return False
        return not self.config.sequence_parallel or theirs.sequence_parallel and theirs.segment_parallel

    def _with_ranks(self, hidden_states: Tensor) -> tuple[Tensor, TensorParallel | None]:
        """Return (hidden_states, the TensorParallel ranks that share the vocabulary).

        Where each rank has all of it: (hidden_states of all tokens, None).
        """
        tp = TensorParallel.from_fleet(self.config.sequence_parallel)
        if self.weight.is_distributed:
            return hidden_states, tp
        return GatherOp.apply(hidden_states) if self.config.sequence_parallel else hidden_states, None

    def _is_first_microbatch(self) -> bool | None:
        return None  # the trainer's fp8.microbatch says it

    def _fuses_wgrad(self) -> FuseWgrad:
        return LayerOptions.of(self.config).fuse_wgrad_accumulation

    def _quantizers(self) -> Any:
        if self.fp8 is None:
            return None
        with fp8_scope(self.fp8_recipe):
            quantizers = self.fp8.begin_forward(self.training, self._is_first_microbatch())
        return quantizers[0] if quantizers else None

    def _logits(self, hidden_states: Tensor, tensor_parallel_output: bool | None) -> Tensor:
        config = self.config
        hidden_states, tp = self._with_ranks(hidden_states)
        head = Projection(self.weight, quantizers=self._quantizers(), fuse_wgrad_accumulation=self._fuses_wgrad())
        logits = ops_of(config).linear(hidden_states, head, parallel_mode="column", tp=tp, transpose_y=self.transpose_y)
        logits = soft_cap(logits, self.softcap)
        if config.sequence_parallel:
            logits = logits.reshape([-1, rank_sequence_length(config), logits.shape[-1]])
        if tensor_parallel_output is None:
            tensor_parallel_output = config.tensor_parallel_output
        return logits if tp is None or tensor_parallel_output else _c_concat(logits, group=tp.group)

    def _loss(self, hidden_states: Tensor, labels: Tensor) -> Tensor:
        config = self.config
        hidden_states, tp = self._with_ranks(hidden_states)
        if tp is not None:
            hidden_states = tp.enter(hidden_states)
        return linear_cross_entropy(
            hidden_states.reshape([*labels.shape, config.hidden_size]),
            self.weight,
            labels,
            transpose_y=self.transpose_y,
            ignore_index=ignore_index(config),
            tp=tp,
            cp=context_parallel(config),
            backend=config.transformer_engine_backend,
            accuracy=self.accuracy,
            smoothing=smoothing_now(self),
            softcap=self.softcap,
        )


class TELMHeadPipe(TELMHead):
    """A pipeline calls its loss function after its last layer: where that is the head's own, the head waits for it."""

    def taken_over(self) -> None:
        super().taken_over()
        self._micro_batches = MicroBatches()

    def _is_first_microbatch(self) -> bool | None:
        return self._micro_batches.is_first(self.training)

    def forward(
        self, hidden_states: Tensor, tensor_parallel_output: bool | None = None, labels: Tensor | None = None
    ) -> Tensor:
        if labels is None and self.config.use_fused_linear_cross_entropy:
            return hidden_states
        return super().forward(hidden_states, tensor_parallel_output, labels)


class TEEmbedding(HostClass):
    """PaddleNLP's embedding, with its gradient added to the float32 main gradient.

    It is plain or of a part of the vocabulary. On devices without a kernel for it the embedding stays as it is.
    """

    def taken_over(self) -> None:
        """PaddleNLP's constructor makes all."""

    def forward(self, x: Tensor) -> Tensor:
        forward = super().forward
        if not adds_to_main_grad(self.weight):
            return forward(x)
        if isinstance(self, VocabParallelEmbedding):
            return embedding(self.weight, x, forward, self.vocab_start_index if self.is_mp else 0)
        padding = self._padding_idx
        if padding is not None and padding < 0:
            padding += self._num_embeddings
        return embedding(self.weight, x, forward, padding=padding)


def _take_over_embeddings(model: HostModel) -> None:
    if LayerOptions.of(model.config).fuse_wgrad_accumulation is True:
        for layer in model.sublayers():
            if isinstance(layer, (paddle.nn.Embedding, VocabParallelEmbedding)):
                take_over(layer, TEEmbedding)


def _take_over_norms(model: HostModel) -> None:
    """Take over the norms that are left where our decoder layers have their own: the one before the head."""
    is_layer_norm = family_of(model.config).normalization == "LayerNorm"
    paddlenlps = paddle.nn.LayerNorm if is_layer_norm else model.part("RMSNorm")
    for layer in model.sublayers():
        if isinstance(layer, paddlenlps):
            layer.config = model.config  # Mistral's has none
            take_over(layer, LastNorm)


class TECriterion(HostClass):
    """PaddleNLP's criterion, whose mean is over all labels that count, without its wait for their number.

    In te it takes 16-bit logits. PaddleNLP's own models may have it, too (`count_labels`).
    """

    accuracy: Accuracy | None = None  # an Accuracy, while one is counted
    smoothing = 0.0  # of labels, in training

    def taken_over(self) -> None:
        """PaddleNLP's constructor makes all."""

    def forward(self, prediction_scores: Tensor, masked_lm_labels: Tensor) -> Tensor:
        """Return the mean loss: logits [b, s, vocab], or [b, s, vocab / tensor_parallel_degree], for labels [b, s]."""
        whole = prediction_scores.shape[-1] == self.config.vocab_size
        tp = None if whole else TensorParallel.from_fleet(self.config.sequence_parallel)
        if self.accuracy is not None:
            self.accuracy.add(prediction_scores, masked_lm_labels, tp)
        return parallel_cross_entropy(
            prediction_scores,
            masked_lm_labels,
            ignore_index=ignore_index(self.config),
            tp=tp,
            cp=context_parallel(self.config),
            backend=backend_of_ours(self.config),
            smoothing=smoothing_now(self),
        )


def smoothing_now(layer: TECriterion | TELMHead) -> float:
    """Return the smoothing of a layer where something is to learn from its loss: evaluation has no gradients."""
    return layer.smoothing if paddle.is_grad_enabled() else 0.0


def smooth_labels(model: HostModel, factor: float) -> None:
    """Let a model of ours, or one of PaddleNLP's own, smooth the labels that it learns from."""
    if not factor:
        return
    if is_native(model.config):
        count_labels(model)
    for layer in losses_of(model):
        layer.smoothing = factor


def losses_of(model: HostModel) -> list[TECriterion | TELMHead]:
    """Return the layers that compute the loss of a model of ours, or of one with `count_labels`."""
    base = getattr(model, "model", model) if isinstance(model, LoRAModel) else model
    layers = [*model.sublayers(), *getattr(base, "_loss_fn", ())]  # a pipeline's loss is none of its sublayers
    return [layer for layer in layers if isinstance(layer, (TECriterion, TELMHead))]


@contextmanager
def counting_accuracy(model: HostModel) -> Iterator[Accuracy]:
    """Count the labels that a model of ours, or one with `count_labels`, finds while it lasts."""
    accuracy = Accuracy(ignore_index(model.config))
    layers = losses_of(model)
    for layer in layers:
        layer.accuracy = accuracy
    try:
        yield accuracy
    finally:
        for layer in layers:
            layer.accuracy = None


def count_labels(model: HostModel) -> None:
    """Let a model of PaddleNLP's own, or one with LoRA around it, divide its loss by the labels that count.

    PaddleNLP's criteria divide it by the tokens whose loss is above 0. That leaves out those that a model is sure of,
    and is no number, in some families, where no label counts.
    """
    model = getattr(model, "model", model) if isinstance(model, LoRAModel) else model
    losses = getattr(model, "_loss_fn", None)
    criterion = losses[0] if losses else model.criterion
    take_over(criterion, TECriterion)


@contextmanager
def causal_mask_only() -> Iterator[None]:
    """Keep PaddleNLP's models from making a [b, 1, s, s] mask: its layers get None, which means causal."""
    kept = os.environ.get("USE_CASUAL_MASK")
    os.environ["USE_CASUAL_MASK"] = "True"
    try:
        yield
    finally:
        os.environ.pop("USE_CASUAL_MASK")
        if kept is not None:
            os.environ["USE_CASUAL_MASK"] = kept


class _TEModel(HostClass):
    """What the plain and the pipeline model share.

    host_module, decoder_class: as `replace_decoder_layers` reads them. A model of ours has neither, as it makes its
    layers itself. parts_module, parts_title: where PaddleNLP's classes are that it makes the rest of, and what their
    names begin with; None: host_module, the family's title.
    """

    host_module: ModuleType | None = None
    decoder_class: type[TEDecoderLayer] | None = None
    parts_module: ModuleType | None = None
    parts_title: str | None = None

    def part(self, name: str) -> Any:
        """Return PaddleNLP's class of that name, without its family's title, which this model is made of."""
        title = self.parts_title or family_of(self.config).title
        return getattr(self.parts_module or self.host_module, title + name)

    def making(self) -> AbstractContextManager[None]:
        """Return the context in which PaddleNLP's constructor makes our layers."""
        return replace_decoder_layers(type(self)) if self.decoder_class else nullcontext()

    @classmethod
    def _get_tensor_parallel_mappings(cls, config: HostConfig, is_split: bool = True) -> dict[str, Any]:
        mappings = super()._get_tensor_parallel_mappings(config, is_split)
        kept = {name: action for name, action in mappings.items() if not name.startswith("layers.")}
        return kept | mappings_of_tied_head(config, is_split) | layer_mappings(config, is_split)

    @classmethod
    def _get_fuse_or_split_param_mappings(cls, config: HostConfig, is_fuse: bool = False) -> dict[str, Any]:
        return {}  # the layout is always fused


class TEForCausalLM(_TEModel):
    """PaddleNLP's model with TE's decoder layers, chosen by config.transformer_engine_backend."""

    def __init__(self, config: HostConfig) -> None:
        check_fp8_lm_head(config)
        with self.making():
            super().__init__(config)
        take_over(self.lm_head, TELMHead)
        take_over(self.criterion, TECriterion)
        _take_over_embeddings(self)
        _take_over_norms(self)
        move_activations(self)
        bind_model(self)
        skip_outer_layers(self)

    def paddlenlps_forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Call PaddleNLP's forward of the model, the head and the criterion."""
        return super().forward(*arguments, **keywords)

    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        attn_mask_startend_row_indices: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return what PaddleNLP's does. Without attention_mask sequences are causal, without position_ids from 0 on.

        cu_seqlens: int32 [documents + 1], where the documents begin and end that are packed into the b·s tokens
        (`ops.documents` makes them); each is causal and sees no other. attn_mask_startend_row_indices, int32 [b, 1, s],
        is PaddleNLP's word for it: the host waits for its numbers; NotImplementedError for other patterns in it.

        Raises ValueError for more than one of the three that say what tokens see, and under sequence parallelism for
        another length than config.seq_length: there layers see tokens in a row, and would take parts of two sequences
        for one. Where ranks share sequences (config's sep_ or context_parallel_degree), input_ids and labels are this
        rank's tokens, and all else is of whole sequences.
        """
        if self.config.sequence_parallel and input_ids is not None:
            length = rank_sequence_length(self.config)
            if input_ids.shape[1] != length:
                raise ValueError(f"sequences of {input_ids.shape[1]} tokens: with sequence_parallel all have {length}")
        given = [attention_mask, cu_seqlens, attn_mask_startend_row_indices]
        if sum(tensor is not None for tensor in given) > 1:
            raise ValueError("attention_mask, cu_seqlens, attn_mask_startend_row_indices: give one of them")
        if cu_seqlens is None:
            cu_seqlens = documents.boundaries(attn_mask_startend_row_indices)
        kwargs["attn_mask_startend_row_indices"] = cu_seqlens  # the name under which PaddleNLP's model passes it on
        positions = FROM_ZERO if position_ids is None else position_ids
        fused = self.config.use_fused_linear_cross_entropy and kwargs.get("labels") is not None
        forward = self._forward_to_loss if fused else self.paddlenlps_forward
        if attention_mask is not None:
            return forward(input_ids, positions, attention_mask, **kwargs)
        with causal_mask_only():
            return forward(input_ids, positions, **kwargs)

    def _forward_to_loss(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | Literal[False],
        attention_mask: Tensor | None = None,
        *,
        labels: Tensor,
        **kwargs: Any,
    ) -> Any:
        """Return PaddleNLP's outputs of its forward with None instead of the logits."""
        defaults = dict(use_cache=False, output_attentions=None, return_dict=None)
        model = getattr(self, self.base_model_prefix)
        outputs = model(input_ids, position_ids, attention_mask, **defaults | kwargs)
        loss = self.lm_head(outputs[0], labels=labels)
        if isinstance(outputs, tuple):
            return (loss, None, *outputs[1:])
        return CausalLMOutputWithCrossAttentions(
            loss=loss,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    @staticmethod
    def prepare_attention_mask_for_generation(
        input_ids: Tensor, pad_token_id: int | None, eos_token_id: int | None
    ) -> Tensor:
        """Return the mask [b, s] of a `generate` without one: padding is hidden where it has a token of its own.

        PaddleNLP's own is additive and [b, 1, 1, s], which its models do not read.
        """
        if pad_token_id is None or pad_token_id == eos_token_id:
            return paddle.ones_like(input_ids)
        return (input_ids != pad_token_id).astype(input_ids.dtype)

    def adjust_logits_during_generation(self, logits: Tensor) -> Tensor:
        """Choose tokens in float32 whatever the model computes in: bfloat16 has near ties, and lacks kernels."""
        return logits.astype("float32")


def _loss_of_head(head: TELMHead, hidden_states: Tensor, labels: Tensor) -> Tensor:
    """Compute the loss of a pipeline in its last stage's head."""
    return head(hidden_states, labels=labels)


class TEForCausalLMPipe(_TEModel):
    """PaddleNLP's pipeline model with TE's decoder layers."""

    def __init__(self, config: HostConfig) -> None:
        check_fp8_lm_head(config)
        with self.making():
            super().__init__(config)
        paddlenlps_head = self.part("LMHeadPipe")
        for head in self.sublayers():
            if isinstance(head, paddlenlps_head):  # the last stage's
                take_over(head, TELMHeadPipe)
                if config.use_fused_linear_cross_entropy:
                    self._loss_fn[0] = partial(_loss_of_head, head)
        if not config.use_fused_linear_cross_entropy and getattr(config, "dpo_config", None) is None:
            take_over(self._loss_fn[0], TECriterion)
        _take_over_embeddings(self)
        _take_over_norms(self)
        bind_model(self)
        skip_outer_layers(self)
