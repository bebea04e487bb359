"""GPT's decoder layers, in the place of PaddleNLP's: LayerNorm, biases, an activation without gate, dropout."""

from paddle_te.configs.schema import Gpt, keys_of
from paddle_te.host import HostConfig
from paddle_te.hosts.paddlenlp.decoder import TEDecoderLayer, TEDecoderLayerPipe


class TEGPTDecoderLayer(TEDecoderLayer):
    """See `TEDecoderLayer`."""

    def __init__(self, config: HostConfig) -> None:
        """Raise ValueError for what TransformerLayer does not have."""
        for name in ("normalize_before", "scale_qk_coeff"):
            (only,) = keys_of(Gpt)[name].only
            if getattr(config, name) != only:
                raise ValueError(f"{name}={getattr(config, name)}: backends pd and te have only {name}={only}")
        super().__init__(config)
        self._is_initialized = True  # PaddleNLP's GPTModel would initialise the parts of its own layer
        # PaddleNLP drops what attention adds to its input with attention's own probability
        self.transformer.self_attention.dropout_in_training = config.attention_probs_dropout_prob


class TEGPTDecoderLayerPipe(TEGPTDecoderLayer, TEDecoderLayerPipe):  # type: ignore[misc]  # its forward takes a tuple
    """See `TEDecoderLayerPipe`."""
