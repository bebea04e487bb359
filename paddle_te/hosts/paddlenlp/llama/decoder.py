"""Llama's decoder layers, in the place of PaddleNLP's."""

from paddle_te.hosts.paddlenlp.decoder import TEDecoderLayer, TEDecoderLayerPipe
from paddle_te.models.pipeline import FLASH_MASK


class TELlamaDecoderLayer(TEDecoderLayer):
    """See `TEDecoderLayer`."""

    further = ("alibi", FLASH_MASK)


class TELlamaDecoderLayerPipe(TEDecoderLayerPipe):
    """See `TEDecoderLayerPipe`."""
