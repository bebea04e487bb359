"""Qwen2's models, plain and pipeline."""

from paddlenlp.transformers.qwen2 import modeling, modeling_pp

from paddle_te.hosts.paddlenlp.modeling import TEForCausalLM, TEForCausalLMPipe
from paddle_te.hosts.paddlenlp.qwen2.decoder import TEQwen2DecoderLayer, TEQwen2DecoderLayerPipe


class Qwen2ForCausalLM(TEForCausalLM, modeling.Qwen2ForCausalLM):
    """See `TEForCausalLM`."""

    host_module, decoder_class = modeling, TEQwen2DecoderLayer


class Qwen2ForCausalLMPipe(TEForCausalLMPipe, modeling_pp.Qwen2ForCausalLMPipe):
    """See `TEForCausalLMPipe`."""

    host_module, decoder_class = modeling_pp, TEQwen2DecoderLayerPipe
