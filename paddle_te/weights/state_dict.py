"""Weights in memory from PaddleNLP's native layout to Transformer Engine's, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from paddle_te.configs.families import family_of, is_tied
from paddle_te.configs.spec import spec_of
from paddle_te.weights.dims import Dims, Matrix
from paddle_te.weights.layout import Layout, Part, Place
from paddle_te.weights.layouts import detect, native_layout, te_layout
from paddle_te.weights.tensors import CheckpointError


def native_to_te(state_dict: Mapping[str, Matrix], config: Any) -> dict[str, Matrix]:
    """Convert PaddleNLP's native weights, fused or not, to Transformer Engine's.

    Args:
        state_dict: {name: numpy array or Paddle tensor}, whole weights or one tensor parallel rank's.
        config: has model_type (left out: Llama's), hidden_size, num_attention_heads, num_key_value_heads and
            tie_word_embeddings; PaddleNLP's object or a dict.

    Returns: a new dict; tensors may be views of the old ones. Raises CheckpointError for a dict of another layout,
    an incomplete layer, or q and k whose sizes contradict the heads.
    """
    return _convert(state_dict, config, "pd", te_layout(is_tied(config), family_of(config)))


def te_to_native(
    state_dict: Mapping[str, Matrix], config: Any, fuse_attention_qkv: bool = False, fuse_attention_ffn: bool = False
) -> dict[str, Matrix]:
    """Convert Transformer Engine's weights to PaddleNLP's native ones, fused as asked for; else as `native_to_te`."""
    tied = is_tied(config)
    target = native_layout(fuse_attention_qkv, fuse_attention_ffn, tied, family_of(config))
    return _convert(state_dict, config, "te", target)


def _convert(state_dict: Mapping[str, Matrix], config: Any, kind: str, target: Layout) -> dict[str, Matrix]:
    source = detect(state_dict, is_tied(config), family=target.family)
    if source.kind != kind:
        raise CheckpointError(f"expected another layout: the weights are in {source.title} layout")
    dims = Dims(spec_of(config))
    parts: dict[int | None, dict[Part, Matrix]] = {}
    for name, tensor in state_dict.items():
        place = source.place(name)
        parts.setdefault(place.layer, {}).update(dims.take_apart(place, tensor))
    for layer, found in parts.items():
        if layer is not None:
            _check_layer(layer, found, source.layer_parts, dims.spec.layers[layer].attention.queries)
    converted = {}
    for layer, found in parts.items():
        for slot in target.model if layer is None else target.layer:
            place = Place(layer, None, slot)
            if all(part in found for part in dims.parts(place)):
                converted[target.full_name(place)] = dims.put_together(place, found)
    return converted


def _check_layer(layer: int, parts: Mapping[Part, Matrix], wanted: Iterable[str], queries: int) -> None:
    missing = [name for name in wanted if Part(layer, None, name) not in parts]
    if missing:
        raise CheckpointError(f"layer {layer} has no {', '.join(missing)}")
    q, k = (parts[Part(layer, None, name)].shape[0] for name in "qk")
    if q != queries * k:
        raise CheckpointError(
            f"layer {layer}: q has {q} rows and k {k}, which contradicts {queries} query heads to each kv head"
        )
