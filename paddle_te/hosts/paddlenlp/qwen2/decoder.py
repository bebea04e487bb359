"""Qwen2's decoder layers, in the place of PaddleNLP's."""

from paddle_te.hosts.paddlenlp.decoder import TEDecoderLayer, TEDecoderLayerPipe
from paddle_te.models.pipeline import FLASH_MASK


class TEQwen2DecoderLayer(TEDecoderLayer):
    """See `TEDecoderLayer`."""

    further = (FLASH_MASK,)


class TEQwen2DecoderLayerPipe(TEDecoderLayerPipe):
    """See `TEDecoderLayerPipe`."""
