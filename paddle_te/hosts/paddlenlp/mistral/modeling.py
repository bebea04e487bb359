"""Mistral's model."""

from paddlenlp.transformers.mistral import modeling

from paddle_te.host import HostConfig
from paddle_te.hosts.paddlenlp.decoder import TEDecoderLayer
from paddle_te.hosts.paddlenlp.own_forward import OwnForwardForCausalLM


class TEMistralDecoderLayer(TEDecoderLayer):
    """See `TEDecoderLayer`."""


class MistralForCausalLM(OwnForwardForCausalLM, modeling.MistralForCausalLM):
    """See `OwnForwardForCausalLM`."""

    host_module, decoder_class = modeling, TEMistralDecoderLayer

    def __init__(self, config: HostConfig) -> None:
        if not hasattr(config, "seq_length"):  # which our layers read
            config.seq_length = None
        super().__init__(config)
