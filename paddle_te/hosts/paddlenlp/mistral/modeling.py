"""Mistral's model, whose forwards are those of PaddleNLP's Llama.

The two are built alike, but PaddleNLP's Mistral knows neither sequence parallelism, nor recomputation of attention
alone, nor a [b, 1, s, s] mask of packed samples, always makes such a mask, and casts the logits to float32.
"""

from paddle.distributed.fleet.utils.sequence_parallel_utils import mark_as_sequence_parallel_parameter
from paddlenlp.transformers.llama import modeling as of_llama
from paddlenlp.transformers.mistral import modeling

from paddle_te.hosts.paddlenlp.llama.decoder import TELlamaDecoderLayer
from paddle_te.hosts.paddlenlp.modeling import TEForCausalLM
from paddle_te.models.switch import take_over

# What Llama's forwards and our layers read of a configuration, and Mistral's does not have.
_DEFAULTS = dict(
    seq_length=None, alibi=False, use_flash_attention_for_generation=False, use_last_token_for_generation=False
)


class TEMistralDecoderLayer(TELlamaDecoderLayer):
    """In place of PaddleNLP's MistralDecoderLayer."""

    def __init__(self, config):
        super().__init__(config, layerwise_recompute=True)


class _WithLlamasForward:
    """Mixed into PaddleNLP's MistralModel."""

    forward = of_llama.LlamaModel.forward
    recompute_training_full = of_llama.LlamaModel.recompute_training_full
    _prepare_decoder_attention_mask = staticmethod(of_llama.LlamaModel._prepare_decoder_attention_mask)

    def taken_over(self):
        """Makes what Llama's constructor does, and Mistral's does not."""
        config = self.config
        self.sequence_parallel, self.recompute_granularity = config.sequence_parallel, config.recompute_granularity
        self.no_recompute_layers = config.no_recompute_layers or []
        if config.sequence_parallel:
            mark_as_sequence_parallel_parameter(self.norm.weight)


class MistralForCausalLM(TEForCausalLM, modeling.MistralForCausalLM):
    """See `TEForCausalLM`."""

    host_module, decoder_class = modeling, TEMistralDecoderLayer
    paddlenlps_forward = of_llama.LlamaForCausalLM.forward
    llama = property(lambda self: self.mistral)  # as Llama's forward calls it

    def __init__(self, config):
        for name, value in _DEFAULTS.items():
            if not hasattr(config, name):
                setattr(config, name, value)
        super().__init__(config)
        take_over(self.mistral, _WithLlamasForward)
