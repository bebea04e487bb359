"""TransformerLayer: a whole decoder layer."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from paddle import Tensor, nn

from paddle_te.fp8 import bind_model
from paddle_te.layers.attention import MultiHeadAttention
from paddle_te.layers.context import Context, KeyValue, takes_context
from paddle_te.layers.mlp import LayerNormMLP
from paddle_te.layers.settings import LayerSettings, takes


class FeedForward(Protocol):
    """Compute the half of a layer behind attention, x + ff(norm(x)): an nn.Layer, made of its LayerSettings.

    slot: what the layer calls it, which its parameters' names begin with.
    """

    slot: ClassVar[str]

    def __call__(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """x as TransformerLayer's -> the same shape and dtype, the residual included."""
        ...


class TransformerLayer(nn.Layer):
    """Compute a decoder layer: attention, MHA or GQA, and a feed-forward, an MLP, unless others are given.

    Arguments: LayerSettings'. Raises ValueError for sizes that do not divide and for other names than these, and what
    the backend raises where it cannot run.
    """

    @takes(LayerSettings)
    def __init__(self, settings: LayerSettings):
        super().__init__()
        self.layer_number = settings.layer_number
        attention_half = settings.attention_half or MultiHeadAttention.of_layer
        self.self_attention = attention_half(settings)
        feed_forward: Any = (settings.feed_forward or LayerNormMLP.of_layer)(settings)
        self.add_sublayer(feed_forward.slot, feed_forward)
        self._slot = feed_forward.slot
        bind_model(self)

    @takes_context()
    def forward(self, hidden_states: Tensor, context: Context) -> Tensor | tuple[Tensor, KeyValue]:
        """Compute the layer: hidden_states of the same shape and dtype.

        hidden_states: [b, s, h], with attn_input_format sbhd [s, b, h], or under sequence parallelism [b·s/tp,
        h], tokens in that order. With cp_comm_type they are of this rank's tokens, and all else of whole
        sequences. The other arguments are Context's; with use_cache the result is (output, (k, v)).
        """
        layers = self._sub_layers  # see layers.base.ParallelLayer
        out, feed_forward = layers["self_attention"](hidden_states, context), layers[self._slot]
        if not context.use_cache:
            return feed_forward(out, context.is_first_microbatch)
        out, present_key_value = out
        return feed_forward(out, context.is_first_microbatch), present_key_value
