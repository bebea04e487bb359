"""Llama's models, plain and pipeline."""

from paddlenlp.transformers.llama import modeling, modeling_pp

from paddle_te.hosts.paddlenlp.llama.decoder import TELlamaDecoderLayer, TELlamaDecoderLayerPipe
from paddle_te.hosts.paddlenlp.modeling import TEForCausalLM, TEForCausalLMPipe


class LlamaForCausalLM(TEForCausalLM, modeling.LlamaForCausalLM):
    """See `TEForCausalLM`."""

    host_module, decoder_class = modeling, TELlamaDecoderLayer


class LlamaForCausalLMPipe(TEForCausalLMPipe, modeling_pp.LlamaForCausalLMPipe):
    """See `TEForCausalLMPipe`."""

    host_module, decoder_class = modeling_pp, TELlamaDecoderLayerPipe
