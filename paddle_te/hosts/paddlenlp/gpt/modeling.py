"""GPT's models, plain and pipeline.

PaddleNLP's GPTModel makes a mask [b, 1, s, s] whether one is needed or not, and recomputes no whole layers: ours goes
through the layers itself.
"""

import paddle
from paddlenlp.transformers.gpt import modeling, modeling_pp
from paddlenlp.transformers.llama.modeling import LlamaForCausalLM as OfLlama
from paddlenlp.transformers.model_outputs import BaseModelOutputWithPastAndCrossAttentions

from paddle_te.distributed import recompute
from paddle_te.hosts.paddlenlp.decoder import FROM_ZERO
from paddle_te.hosts.paddlenlp.families import check_positions
from paddle_te.hosts.paddlenlp.gpt.decoder import LAYERNORM_EPSILON, TEGPTDecoderLayer, TEGPTDecoderLayerPipe
from paddle_te.hosts.paddlenlp.modeling import TEForCausalLM, TEForCausalLMPipe
from paddle_te.models.switch import take_over
from paddle_te.ops import get_ops
from paddle_te.ops.norms import Norm


class _OurNorm:
    """Mixed into PaddleNLP's GPTLayerNorm and its pipeline's, the last norm: Paddle's own runs on nvgpu's host."""

    def taken_over(self):
        """PaddleNLP's constructor makes all."""

    def forward(self, args):
        """As PaddleNLP's: a pipeline's masks end here."""
        hidden = args[0] if isinstance(args, tuple) else args
        if self.weight.dtype is not hidden.dtype:  # Paddle's O2 keeps it in float32 beside float16
            return super().forward(args)
        norm = Norm(self.weight, LAYERNORM_EPSILON, self.bias)
        return get_ops(self.config.transformer_engine_backend).normalize(hidden, norm)


class _WithOurLayers:
    """Mixed into PaddleNLP's GPTModel."""

    def taken_over(self):
        """PaddleNLP's constructor makes all, and a mask [1, 1, positions, positions] that nobody wants."""
        self.bias = None
        take_over(self.decoder.norm, _OurNorm)

    def forward(
        self,
        input_ids=None,
        position_ids=None,
        attention_mask=None,
        inputs_embeds=None,
        use_cache=False,
        past_key_values=None,
        output_attentions=False,
        output_hidden_states=False,
        return_dict=False,
        attn_mask_startend_row_indices=None,
    ):
        """As PaddleNLP's, but that sequences are causal without attention_mask. attn_mask_startend_row_indices: as
        TEDecoderLayer's. Raises ValueError for more tokens than learned positions."""
        layers = self.decoder.layers
        shape = (input_ids if inputs_embeds is None else inputs_embeds).shape[:2]
        caches = past_key_values or [None] * len(layers)
        past = 0 if caches[0] is None else caches[0][0].shape[1]
        check_positions(self.config, past + shape[1])
        if position_ids is None or position_ids is FROM_ZERO:
            position_ids = paddle.arange(past, past + shape[1], dtype="int64").unsqueeze(0).expand(shape)
        hidden = self.embeddings(input_ids=input_ids, position_ids=position_ids, inputs_embeddings=inputs_embeds)
        if attention_mask is not None:
            attention_mask = self._prepare_decoder_attention_mask(attention_mask, shape, past, hidden.dtype)
        of_layers = dict(attention_mask=attention_mask, output_attentions=output_attentions)
        of_layers["attn_mask_startend_row_indices"] = attn_mask_startend_row_indices
        states, presents = (), ()
        for layer, cache in zip(layers, caches, strict=True):
            states += (hidden,)
            full = layer.enable_recompute and layer.recompute_granularity == "full" and not hidden.stop_gradient
            if full:
                hidden = recompute(layer, hidden, **of_layers)
            else:
                hidden = layer(hidden, past_key_value=cache, use_cache=use_cache, **of_layers)
            if use_cache:
                hidden, present = hidden
                presents += (present,)
        hidden = self.decoder.norm(hidden)
        output = BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=hidden,
            past_key_values=presents if use_cache else None,
            hidden_states=(*states, hidden) if output_hidden_states else None,
        )
        return output if return_dict else output.to_tuple()


class GPTForCausalLM(TEForCausalLM, modeling.GPTForCausalLM):
    """See `TEForCausalLM`."""

    host_module, decoder_class = modeling, TEGPTDecoderLayer
    # Llama's read what hides padding, and go on with positions; PaddleNLP's GPT generates without
    paddlenlps_forward = OfLlama.forward
    prepare_inputs_for_generation = OfLlama.prepare_inputs_for_generation
    update_model_kwargs_for_generation = staticmethod(OfLlama.update_model_kwargs_for_generation)
    llama = property(lambda self: self.gpt)  # as Llama's forward calls it

    def __init__(self, config):
        config.use_last_token_for_generation = False  # which Llama's forward reads
        super().__init__(config)
        take_over(self.gpt, _WithOurLayers)

    @classmethod
    def _get_tensor_parallel_mappings(cls, config, is_split=True):
        """PaddleNLP's leaves out the head, which ranks share as they share the embedding."""
        mappings = super()._get_tensor_parallel_mappings(config, is_split)
        return mappings | {"lm_head.weight": mappings["word_embeddings.weight"]}


class GPTForCausalLMPipe(TEForCausalLMPipe, modeling_pp.GPTForCausalLMPipe):
    """See `TEForCausalLMPipe`."""

    host_module, decoder_class = modeling_pp, TEGPTDecoderLayerPipe

    def __init__(self, config):
        super().__init__(config)
        for norm in self.sublayers():
            if isinstance(norm, modeling.GPTLayerNorm):  # the last stage's
                take_over(norm, _OurNorm)
