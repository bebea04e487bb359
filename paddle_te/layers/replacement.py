"""Replace each paddle.nn.Linear of any model by a Linear."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import paddle
from paddle import nn

from paddle_te.fp8 import DelayedScaling, bind_model
from paddle_te.fp8.recipe import Recipe
from paddle_te.layers.linear import Linear


def replace_linear(
    model: nn.Layer,
    fp8: bool | Recipe = True,
    skip: str | Sequence[str] = ("lm_head",),
    backend: str = "transformer_engine",
) -> dict[str, Linear]:
    """Replace each paddle.nn.Linear under a model by a Linear with its values.

    The model then computes these layers with the backend's GEMMs, and in fp8 where it is called under `fp8_autocast`:

        replace_linear(model)
        optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
        with fp8_autocast(True, DelayedScaling()):
            loss = model(batch)

    Backend transformer_engine takes weights and inputs in bfloat16 or float16, so call model.to(dtype="bfloat16")
    before; in fp8 the number of tokens must be a multiple of 16, with block scaling of 128.
    Weights are new parameters, [out_features, in_features] where paddle.nn.Linear's are [in_features, out_features]:
    load older checkpoints before the call, and make the optimizer after it. Biases, frozen parameters, hooks and the
    mode stay as they are. Subclasses of paddle.nn.Linear stay, and so do fleet's ColumnParallelLinear and
    RowParallelLinear, in which collectives are part of the layer: a model of your own has `Linear` with parallel_mode.

    fp8: the layers will run in fp8, as one model (`bind_model`). Give the recipe, whose sizes the GEMMs must have, or
        True for delayed or current scaling.
    skip: layers that stay, by their full names or parts of these between dots.

    Returns {full name: Linear}.
    Raises ValueError, and replaces nothing, if another layer shares a weight, if fp8 does not support a size, or if
    there is nothing to replace.
    """
    skip = (skip,) if isinstance(skip, str) else skip
    places = [place for place in _linear_places(model) if not _is_skipped(place.name, skip)]
    if not places:
        raise ValueError(
            f"{type(model).__name__} has no paddle.nn.Linear but those to skip; subclasses of it and fleet's "
            "ColumnParallelLinear and RowParallelLinear are not replaced"
        )
    _check_tied(model, places)
    if fp8:
        _check_fp8(places, DelayedScaling() if fp8 is True else fp8)
    made = {id(place.layer): _like(place.layer, backend) for place in places}
    for place in places:
        setattr(place.parent, place.attribute, made[id(place.layer)])
    if fp8:
        bind_model(model)
    return {place.name: made[id(place.layer)] for place in places}


class _Occurrence(NamedTuple):
    """Say where an nn.Linear is: parent.attribute; name: its full name in the model."""

    name: str
    parent: nn.Layer
    attribute: str
    layer: nn.Linear


def _linear_places(model: nn.Layer) -> Iterator[_Occurrence]:
    """Yield all; of a layer that is in two places both."""
    for prefix, parent in model.named_sublayers(include_self=True):
        for attribute, child in parent._sub_layers.items():
            if type(child) is nn.Linear:
                yield _Occurrence(f"{prefix}.{attribute}".lstrip("."), parent, attribute, child)


def _is_skipped(name: str, skip: Sequence[str]) -> bool:
    return any(part == name or part in name.split(".") for part in skip)


def _check_tied(model: nn.Layer, places: Sequence[_Occurrence]) -> None:
    """Raise ValueError where a new weight would part what is tied."""
    owners: dict[int, list[str]] = {}
    for name, layer in model.named_sublayers(include_self=True):
        for parameter in layer._parameters.values():
            owners.setdefault(id(parameter), []).append(name or "the model itself")
    for place in places:
        of_weight = owners[id(place.layer.weight)]
        if len(of_weight) > 1:
            raise ValueError(f"{' and '.join(of_weight)} share a weight and would no longer: name {place.name} in skip")


def _check_fp8(places: Sequence[_Occurrence], recipe: Recipe) -> None:
    multiple = max(scaling.multiple for scaling in recipe.scalings)
    shapes = {place.name: list(place.layer.weight.shape) for place in places}
    wrong = [f"{name} {shape}" for name, shape in shapes.items() if any(size % multiple for size in shape)]
    if wrong:
        raise ValueError(
            f"GEMMs in fp8 with {type(recipe).__name__} have sizes that are multiples of {multiple}, unlike those of "
            f"{', '.join(wrong)}: name them in skip, or set fp8 to False"
        )


@paddle.no_grad()
def _like(old: nn.Linear, backend: str) -> Linear:
    """Make a Linear with the values, the hooks and the mode of an nn.Linear."""
    in_features, out_features = old.weight.shape
    new = Linear(in_features, out_features, params_dtype=old.weight.dtype, bias=old.bias is not None, backend=backend)
    new.weight.set_value(old.weight.transpose([1, 0]))
    new.weight.stop_gradient = old.weight.stop_gradient
    if old.bias is not None:
        new.bias = old.bias
    new._forward_pre_hooks, new._forward_post_hooks = old._forward_pre_hooks, old._forward_post_hooks
    new.training = old.training
    return new
