"""Tell which weights are matrices to Muon, and which matrices lie in one weight.

A matrix is what Hugging Face's layers have as one weight: q, k, v, gate and up each, and each expert's, however a
layout stacks them. Moonlight's toy_train.py updates those. The update then does not depend on the backend's layout.
Megatron-Core splits q, k and v as well (muon_split_qkv, on by default), gate and up where it is asked to (split_glu).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

from paddle import Tensor

from paddle_te.weights.layout import Layout, Place


@dataclass(frozen=True)
class Unit:
    """A stretch of a weight that holds whole matrices: all of it, or some of a weight of all experts.

    weight: its name in Paddle. begin: the place of the stretch's first element in the flat weight. shape: of this
    tensor parallel rank, [rows, columns] as stored, or of experts [matrices, rows, columns]. place: as if the stretch,
    or one of its matrices, were a tensor of its own.
    """

    weight: str
    begin: int
    shape: tuple[int, ...]
    place: Place

    @property
    def size(self) -> int:
        """Return the number of its elements."""
        return math.prod(self.shape)


def units_of(name: str, parameter: Tensor, layout: Layout, ranks: int = 1) -> list[Unit]:
    """Return the Units of a weight; [] for one that AdamW updates.

    name: the weight's in the model's layout. parameter: this tensor parallel rank's. ranks: among which experts'
    matrices are divided evenly, in a Unit for each rank.
    """
    if not layout.is_matrix(name):
        return []
    place = layout.place(name)
    if not place.slot.stacked:
        return [Unit(parameter.name, 0, tuple(parameter.shape), place)]
    # an expert's gate and up are alike and lie one behind the other: the weight is a stack of matrices as it is
    (experts, both, columns), parts = parameter.shape, place.slot.parts
    count, rows = experts * len(parts), both // len(parts)
    one = place._replace(expert=0, slot=replace(place.slot, parts=parts[:1], experts=False))
    edges = pairwise(count * rank // ranks for rank in range(ranks + 1))
    return [
        Unit(parameter.name, first * rows * columns, (last - first, rows, columns), one)
        for first, last in edges
        if first < last
    ]
