"""LoRA on a model's decoder layers, for the LoRAModel of every host.

A and B have the names and shapes that a host's LoRALinear gives the native layer's projections, each in the layer that
has the fused weight:

    ….self_attention.layernorm_qkv.{q,k,v}_proj.{lora_A [in, r], lora_B [r, out]}
    ….self_attention.linear_q_proj.q_proj…, ….self_attention.linear_{q,kv}_down_proj.{q,kv}_a_proj…
    ….self_attention.linear_{q,kv}_up_proj.{q,kv}_b_proj…
    ….self_attention.proj.o_proj…, ….layernorm_mlp.{gate,up,down}_proj…
    ….moe_layer.experts.{gate,up,down}_proj.{lora_A [experts, r, in], lora_B [experts, out, r]}
    ….moe_layer.shared_experts.{gate,up,down}_proj.{lora_A [in, r], lora_B [r, out]}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import paddle
from paddle import Tensor, nn

from paddle_te.configs.families import family_of
from paddle_te.configs.spec import spec_of
from paddle_te.fp8 import StoredScaling
from paddle_te.layers import stored_weights
from paddle_te.layers.lora import (
    LoRAColumnLinear,
    LoRALayerNormLinear,
    LoRALayerNormMLP,
    LoRALinear,
    LoRAWholeLinear,
    WithLoRA,
)
from paddle_te.layers.moe.lora import LoRAGroupedMLP, LoRASharedExpertMLP
from paddle_te.models.decoder import DecoderLayer
from paddle_te.weights import Dims, te_layout
from paddle_te.weights.adapters.names import module_of
from paddle_te.weights.layout import Place

ATTENTION = tuple(f"{part}_proj" for part in ("q", "k", "v", "o", "q_a", "q_b", "kv_a", "kv_b"))
MLP = tuple(f"{part}_proj" for part in ("gate", "up", "down"))
TARGETS = {"all": ATTENTION + MLP, "attention": ATTENTION, "mlp": MLP}

# Where the layers with LoRA are in a decoder layer
PLACES: dict[str, type[WithLoRA]] = {
    "self_attention.layernorm_qkv": LoRALayerNormLinear,
    "self_attention.linear_q_proj": LoRAColumnLinear,
    "self_attention.linear_q_down_proj": LoRAWholeLinear,
    "self_attention.linear_q_up_proj": LoRALayerNormLinear,
    "self_attention.linear_kv_down_proj": LoRAWholeLinear,
    "self_attention.linear_kv_up_proj": LoRALayerNormLinear,
    "self_attention.proj": LoRALinear,
    "layernorm_mlp": LoRALayerNormMLP,
    "moe_layer.experts": LoRAGroupedMLP,
    "moe_layer.shared_experts": LoRASharedExpertMLP,
}


def add_lora(model: nn.Layer, config: Any) -> dict[str, WithLoRA]:
    """Give LoRA to the parts of a model's decoder layers that config.target_modules match.

    config: a host's LoRAConfig, whose target_modules are regular expressions of names such as
    "….self_attention.proj.o_proj". Returns {name: layer} of the layers that have it now. Raises ValueError when nothing
    matches.
    """
    targets = config.target_modules
    targets = [targets] if isinstance(targets, str) else targets
    found: dict[str, WithLoRA] = {}
    for name, decoder_layer in model.named_sublayers():
        if isinstance(decoder_layer, DecoderLayer):
            found |= _add_to_decoder_layer(f"{name}.transformer", decoder_layer, targets, config)
    if not found:
        raise ValueError(f"LoRA: target_modules {targets} match nothing in {type(model).__name__}")
    return found


def _add_to_decoder_layer(
    prefix: str, decoder_layer: DecoderLayer, targets: Sequence[str], config: Any
) -> dict[str, WithLoRA]:
    layers, found = dict(decoder_layer.transformer.named_sublayers()), dict[str, WithLoRA]()
    for place, lora_class in PLACES.items():
        if place not in layers:
            continue  # an MLP's, or experts'
        name, parts = f"{prefix}.{place}", _parts(decoder_layer, place, lora_class.GEMM_WEIGHTS)
        names = [part for rows in parts.values() for part in rows]
        matching = [part for part in names if any(re.fullmatch(target, f"{name}.{part}") for target in targets)]
        if matching:
            found[name] = lora_class.enable(layers[place], parts, matching, config)
    return found


def _parts(decoder_layer: DecoderLayer, place: str, weights: Iterable[str]) -> dict[str, dict[str, int]]:
    """Return {name of a weight: {name of a part: its rows on a rank}} of the layer at a place in a decoder layer."""
    config, number = decoder_layer.config, decoder_layer.number
    layout = te_layout(family=family_of(config))
    slots = {slot.name: slot for slot in (*layout.layer, *layout.sparse)}
    dims, degree = Dims(spec_of(config)), max(config.tensor_parallel_degree, 1)
    return {
        weight: {
            module_of(part.name): dims.part_shape(part, degree)[0]
            for part in dims.parts(Place(number, None, slots[f"transformer.{place}.{weight}"]))
        }
        for weight in weights
    }


class DecoderLoRA:
    """Hold what LoRA on our decoder layers is to a host's LoRAModel, which it is mixed into, as its first base.

    It has of that the attributes model and lora_config, add_lora_split_mapping and set_state_dict.
    """

    model: nn.Layer
    lora_config: Any
    add_lora_split_mapping: Callable[[str, bool], None]

    def get_lora_model(self, model: nn.Layer, lora_config: Any) -> nn.Layer:
        """Return the model, with LoRA in those of its layers whose parts match lora_config.target_modules.

        Raises ValueError for settings that LoRA on our layers does not have, or when nothing matches.
        """
        check_settings(lora_config)
        for name, layer in add_lora(model, lora_config).items():
            if layer.tp is not None:
                for parameter, is_column in layer.split_mapping():
                    self.add_lora_split_mapping(f"{name}.{parameter}", is_column)
        return model

    def mark_only_lora_as_trainable(self) -> None:
        """Freeze all but LoRA and what matches lora_config.trainable_modules."""
        extra = self.lora_config.trainable_modules or []
        for name, weight in self.model.state_dict().items():
            weight.stop_gradient = "lora_" not in name and not any(re.fullmatch(e, name) for e in extra)
            if weight.dtype == paddle.uint8 and not weight.stop_gradient:
                raise ValueError(f"LoRA: {name} of trainable_modules exists in fp8 only, in which it cannot be trained")

    def set_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Do as the host's, in the model's dtype: an adapter trained in bfloat16 serves a float32 model too."""
        own = self.model.state_dict()
        cast = lambda name, value: paddle.to_tensor(value).astype(own[name].dtype) if name in own else value  # noqa: E731
        super().set_state_dict(  # type: ignore[misc]  # the host's
            {name: cast(name, value) for name, value in state_dict.items()}
        )

    @property
    def base_scaling(self) -> StoredScaling | None:
        """Return how the frozen weights are stored that exist in fp8 only; None where there are none."""
        found = next(iter(stored_weights(self.model).values()), None)
        return None if found is None else found[0].fp8.stored[0].scaling

    @property
    def base_precision(self) -> str | None:
        """Return the precision in which alone the frozen weights exist, in words; None for the model's own."""
        return None if self.base_scaling is None else self.base_scaling.words

    def lora_layers(self) -> list[WithLoRA]:
        """Return the layers with LoRA."""
        return [layer for layer in self.model.sublayers() if isinstance(layer, WithLoRA)]

    def merge(self) -> None:
        """Add LoRA to the weights it stands beside, in all layers; they compute as without it from then on."""
        for layer in self.lora_layers():
            layer.merge()

    def unmerge(self) -> None:
        """Take it out again, but for the weights' rounding."""
        for layer in self.lora_layers():
            layer.unmerge()

    def disable_lora(self) -> None:
        """Compute without LoRA until `enable_lora`."""
        for layer in self.lora_layers():
            layer.disable_lora = True

    def enable_lora(self) -> None:
        """Undo `disable_lora`."""
        for layer in self.lora_layers():
            layer.disable_lora = False

    def restore_original_model(self) -> nn.Layer:
        """Return the model without LoRA.

        What was merged stays in its weights; what was not is gone.
        """
        for layer in self.lora_layers():
            layer.disable()
        return self.model


def check_settings(config: Any) -> None:
    """Raise ValueError for settings of a host's LoRAConfig that our layers do not have."""
    plain = dict(
        pissa=False, loraga=False, use_mora=False, lora_use_mixer=False, do_qat=False, use_quick_lora=False,
        trainable_bias=None, enable_lora_list=None,
    )  # fmt: skip
    for name, value in plain.items():
        if getattr(config, name, value) != value:
            raise ValueError(f"LoRA of backends paddle and transformer_engine has no {name}: leave it at {value}")
    if config.r < 1:
        raise ValueError(f"LoRA: r={config.r}; it must be at least 1")
