"""Give a forward to the families whose forwards in PaddleNLP would not do.

Those know no sequence parallelism, recompute no whole layers or not only attention, take no packed samples, or make a
mask [b, 1, s, s] whether one is needed or not.

Such a model goes through its layers by the forward here. Head, loss and generation are those of PaddleNLP's Llama.
"""

from collections.abc import Sequence
from typing import Any

from paddle import Tensor
from paddle.distributed.fleet.utils.sequence_parallel_utils import ScatterOp, mark_as_sequence_parallel_parameter
from paddlenlp.transformers.llama.modeling import LlamaForCausalLM, LlamaModel
from paddlenlp.transformers.model_outputs import BaseModelOutputWithPastAndCrossAttentions

from paddle_te.distributed import recompute
from paddle_te.host import HostClass, HostConfig
from paddle_te.hosts.paddlenlp.modeling import TEForCausalLM
from paddle_te.hosts.paddlenlp.positions import Positions, positions_of
from paddle_te.models.switch import take_over


def given(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
    """Return the one of the two that a model is called with. Raise ValueError where there is neither."""
    if (there := input_ids if inputs_embeds is None else inputs_embeds) is None:
        raise ValueError("give input_ids or inputs_embeds")
    return there


class OwnForward(HostClass):
    """Mixed into PaddleNLP's model, between embedding and head.

    stack: what has its layers and its last norm.
    """

    stack = property(lambda self: self)

    def taken_over(self) -> None:
        """Make what PaddleNLP's constructor does not."""
        if self.config.sequence_parallel:
            for parameter in self.stack.norm.parameters():
                mark_as_sequence_parallel_parameter(parameter)

    def embed(
        self, input_ids: Tensor | None, inputs_embeds: Tensor | None, position_ids: Positions, past: int
    ) -> Tensor:
        """Return what the first layer gets of input_ids [b, s], or of their embeddings, inputs_embeds [b, s, h].

        position_ids: [b, s], or None or FROM_ZERO for tokens that follow `past` others. Raises ValueError for more
        tokens than there are learned positions.
        """
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if "embed_positions" in self._sub_layers:
            hidden = hidden + self.embed_positions(positions_of(self.config, hidden.shape[:2], position_ids, past))
        if self.config.sequence_parallel:
            hidden = ScatterOp.apply(hidden.reshape([-1, hidden.shape[-1]]))
        return hidden

    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Positions = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = False,
        past_key_values: Sequence[Any] | None = None,
        output_attentions: bool | None = False,
        output_hidden_states: bool | None = False,
        return_dict: bool | None = False,
        attn_mask_startend_row_indices: Tensor | None = None,
    ) -> Any:
        """As PaddleNLP's LlamaModel's, but that sequences are causal without attention_mask.

        position_ids and attn_mask_startend_row_indices: as TEDecoderLayer's. What may be True or False is the
        configuration's if None. Raises ValueError for a cache under sequence parallelism.
        """
        use_cache = self._or_configured(use_cache, "use_cache")
        output_attentions = self._or_configured(output_attentions, "output_attentions")
        output_hidden_states = self._or_configured(output_hidden_states, "output_hidden_states")
        if self.config.sequence_parallel and use_cache:
            raise ValueError("sequence parallelism has no key-value cache: leave one of the two out")
        shape = given(input_ids, inputs_embeds).shape[:2]
        caches = list(past_key_values or [None] * len(self.stack.layers))
        past = 0 if caches[0] is None else caches[0][0].shape[1]
        hidden = self.embed(input_ids, inputs_embeds, position_ids, past)
        if attention_mask is not None:
            attention_mask = LlamaModel._prepare_decoder_attention_mask(attention_mask, shape, past, hidden.dtype)
        of_layers = dict(position_ids=position_ids, attention_mask=attention_mask, output_attentions=output_attentions)
        of_layers["attn_mask_startend_row_indices"] = attn_mask_startend_row_indices
        states, presents = [], []
        for number, layer in enumerate(self.stack.layers):
            if output_hidden_states:
                states.append(hidden)
            cache, caches[number] = caches[number], None  # a layer's cache is let go of when there is a longer one
            hidden = self._through(number, layer, hidden, past_key_value=cache, use_cache=use_cache, **of_layers)
            if use_cache:
                hidden, present = hidden
                presents.append(present)
        hidden = self.stack.norm(hidden)
        output = BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=hidden,
            past_key_values=tuple(presents) if use_cache else None,
            hidden_states=(*states, hidden) if output_hidden_states else None,
        )
        return output if self._or_configured(return_dict, "use_return_dict") else output.to_tuple()

    def _or_configured(self, given: bool | None, name: str) -> bool:
        """Return what the forward is called with; the configuration's value if None."""
        return getattr(self.config, name) if given is None else given

    def _through(self, number: int, layer: Any, hidden: Tensor, **settings: Any) -> Any:
        """Return what the layer of that number makes of hidden; backward computes it again where recompute asks."""
        again = self._is_recomputed(number, layer) and not hidden.stop_gradient
        return recompute(layer, hidden, **settings) if again else layer(hidden, **settings)

    def _is_recomputed(self, number: int, layer: Any) -> bool:
        """Return whether backward computes the whole layer of that number again."""
        kept = self.config.no_recompute_layers or ()
        return layer.enable_recompute and layer.recompute_granularity == "full" and number not in kept


class OwnForwardForCausalLM(TEForCausalLM):
    """See `TEForCausalLM`. base: the OwnForward of the model below the head."""

    base = OwnForward
    paddlenlps_forward = LlamaForCausalLM.forward
    prepare_inputs_for_generation = LlamaForCausalLM.prepare_inputs_for_generation
    update_model_kwargs_for_generation = staticmethod(LlamaForCausalLM.update_model_kwargs_for_generation)
    llama = property(lambda self: getattr(self, self.base_model_prefix))  # as Llama's forward calls it

    def __init__(self, config: HostConfig) -> None:
        super().__init__(config)
        take_over(self.llama, self.base)
