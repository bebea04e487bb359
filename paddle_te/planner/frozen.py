"""The weights that --freeze leaves untrained, for memory and time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from paddle_te.configs.spec import ModelSpec
from paddle_te.planner.model import Model

if TYPE_CHECKING:  # the functions here import the weights' table themselves: it imports NumPy, and few runs freeze
    from paddle_te.weights.layout import Place


@dataclass(frozen=True)
class Frozen:
    """Elements of the weights that are not trained.

    layers: of each decoder layer. matrices: those of them in all layers together that GEMMs multiply by. embedding,
    head: all elements of it, or 0. A head that is the embedding has none of its own.
    """

    layers: tuple[int, ...] = ()
    matrices: int = 0
    embedding: int = 0
    head: int = 0

    def on_stage(self, stage: int, stages: int) -> int:
        """Return the elements on one of so many pipeline stages."""
        count = len(self.layers) // stages
        ends = self.embedding * (stage == 0) + self.head * (stage == stages - 1)
        return sum(self.layers[stage * count : (stage + 1) * count]) + ends


def frozen_of(model: Model, patterns: Iterable[str] | None) -> Frozen:
    """Return what the patterns of --freeze find in a model.

    Raises:
        ValueError: of patterns for a Model that was not made of a configuration, and whose weights have no names.
    """
    if not patterns:
        return Frozen()
    if model.spec is None:
        raise ValueError(f"--freeze {' '.join(patterns)}: a Model of sizes only has no weights with names")
    return _frozen(model.spec, tuple(patterns))


def check_patterns(model: Model, patterns: Sequence[str]) -> None:
    """Raise ValueError if one pattern of --freeze matches no weight's name, or if the patterns match all names."""
    from paddle_te.weights import frozen

    if model.spec is not None:
        frozen.check_patterns([*_named(model.spec)], patterns)


@cache
def _frozen(spec: ModelSpec, patterns: tuple[str, ...]) -> Frozen:
    from paddle_te.weights.dims import Dims
    from paddle_te.weights.frozen import matching

    sizes, layers, matrices, ends = Dims(spec), [0] * len(spec.layers), 0, dict[str, int]()
    named = _named(spec)
    for place in map(named.__getitem__, matching(named, patterns)):
        shape = sizes.slot_shape(place)
        elements = math.prod(shape)
        if place.layer is None:
            ends[place.slot.parts[0]] = elements
        else:
            layers[place.layer] += elements
            matrices += elements * (len(shape) > 1)
    return Frozen(tuple(layers), matrices, ends.get("embed", 0), ends.get("lm_head", 0))


def _named(spec: ModelSpec) -> dict[str, Place]:
    """Return {name in the checkpoints of runs with te: Place}; a head that is the embedding is left out."""
    from paddle_te.weights.layouts import te_layout

    layout = te_layout(spec.tied, spec.family)
    places = [place for place in layout.tensors(spec) if not (spec.tied and place.slot.parts == ("lm_head",))]
    return {layout.full_name(place): place for place in places}
