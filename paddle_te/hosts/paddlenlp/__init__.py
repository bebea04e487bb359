"""PaddleNLP: what all families share, and a folder for each, with its decoder layer and its classes."""

from paddle_te.hosts.paddlenlp.families import model_class
from paddle_te.hosts.paddlenlp.modeling import causal_mask_only
from paddle_te.models.switch import replace_decoder_layers

__all__ = ["causal_mask_only", "model_class", "replace_decoder_layers"]
