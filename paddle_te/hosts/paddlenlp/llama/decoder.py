"""Llama's decoder layers, in the place of PaddleNLP's."""

from paddle_te.hosts.paddlenlp.decoder import FLASH_MASK, TEDecoderLayer, TEDecoderLayerPipe


class TELlamaDecoderLayer(TEDecoderLayer):
    """See `TEDecoderLayer`."""

    further = ("alibi", FLASH_MASK)


class TELlamaDecoderLayerPipe(TEDecoderLayerPipe):
    """See `TEDecoderLayerPipe`."""
