"""Let decoder layers of a model in fp8 compute in 16 bits: those at its ends, or those that fp8 does not suit."""

from __future__ import annotations

import re
from collections.abc import Iterable

from paddle import nn

from paddle_te import fp8
from paddle_te.models.decoder import DecoderLayer
from paddle_te.models.pipeline import stage_layer_names
from paddle_te.options import LayerOptions

_NUMBER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")


def layer_number(name: str) -> int | None:
    """Return the number of the decoder layer that a layer's name in the whole model lies in; None outside of them."""
    found = _NUMBER.search(name)
    return int(found[1]) if found else None


def decoder_layers(model: nn.Layer) -> dict[int, DecoderLayer]:
    """Return {number in the whole model: layer} of a model's decoder layers, or of a pipeline stage's."""
    layers = {name: layer for name, layer in model.named_sublayers() if isinstance(layer, DecoderLayer)}
    whole = stage_layer_names(model) or {name: name for name in fp8.name_modules(model)}
    found: dict[int, DecoderLayer] = {}
    for name, layer in layers.items():
        inside = next((whole[module] for module in whole if module.startswith(f"{name}.")), name)
        number = layer_number(inside)
        assert number is not None  # decoder layers are called layers.N in every host
        found[number] = layer
    return found


def compute_in_16_bits(model: nn.Layer, numbers: Iterable[int]) -> None:
    """Let the decoder layers with these numbers in the whole model compute in 16 bits from now on.

    Their scaling state stays as it is, so that a checkpoint's has the same modules. Call it between steps.
    """
    wanted = {*numbers}
    for number, layer in decoder_layers(model).items() if wanted else ():
        if number in wanted:
            layer.fp8_recipe = None
            for module in fp8.name_modules(layer).values():
                module.drop_weights()


def skip_outer_layers(model: nn.Layer) -> None:
    """Let the layers compute in 16 bits that a model's configuration keeps out of fp8."""
    compute_in_16_bits(model, LayerOptions.of(model.config).skipped_layers(model.config.num_hidden_layers))
