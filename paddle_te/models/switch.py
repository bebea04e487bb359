"""The switch: our layers in the place of a host's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

from paddle import nn

L = TypeVar("L", bound=nn.Layer)


@contextmanager
def replace_decoder_layers(*models: Any) -> Iterator[None]:
    """Let a host's constructors build the decoder layers of our classes `models` while it lasts.

    Each has host_module, the host's module whose constructors build decoder layers, and decoder_class, ours, whose name
    is the host's after TE. Afterwards nothing has changed.
    """
    names = {model: model.decoder_class.__name__.removeprefix("TE") for model in models}
    kept = {model: getattr(model.host_module, name) for model, name in names.items()}
    for model, name in names.items():
        setattr(model.host_module, name, model.decoder_class)
    try:
        yield
    finally:
        for model, name in names.items():
            setattr(model.host_module, name, kept[model])


def take_over(layer: L, ours: type[Any]) -> L:
    """Let a layer that a host has made compute as our class, mixed into its own; return the layer."""
    layer.__class__ = _mixed(ours, type(layer))  # type: ignore[arg-type]  # classes are hashable
    layer.taken_over()
    return layer


@cache
def _mixed(ours: type[Any], theirs: type[Any]) -> type[Any]:
    return type(theirs.__name__, (ours, theirs), {"__doc__": ours.__doc__})
