"""Tell which weights are matrices to Muon, and which matrices lie in one weight.

A matrix is what Hugging Face's layers have as one weight: q, k, v, gate and up each, and each expert's, however a
layout stacks them. Moonlight's toy_train.py updates those. The update then does not depend on the backend's layout.
Megatron-Core splits q, k and v as well (muon_split_qkv, on by default), gate and up where it is asked to (split_glu).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from paddle import Tensor

from paddle_te.weights.layout import Layout, Place


@dataclass(frozen=True)
class Unit:
    """A stretch of a weight that holds whole matrices: all of it, or one expert's share of a weight of all experts.

    weight: its name in Paddle. begin: the place of the stretch's first element in the flat weight. shape: as stored, of
    this tensor parallel rank. place: as if the stretch were a tensor of its own.
    """

    weight: str
    begin: int
    shape: tuple[int, int]
    place: Place

    @property
    def size(self) -> int:
        """Return the number of its elements."""
        return math.prod(self.shape)


def units_of(name: str, parameter: Tensor, layout: Layout) -> list[Unit]:
    """Return the Units of a weight; [] for one that AdamW updates.

    name: the weight's in the model's layout. parameter: this tensor parallel rank's.
    """
    if not layout.is_matrix(name):
        return []
    place = layout.place(name)
    *experts, rows, columns = parameter.shape
    expert = 0 if place.slot.stacked else place.expert
    single = place._replace(expert=expert, slot=replace(place.slot, experts=False))
    count = math.prod(experts)
    return [Unit(parameter.name, n * rows * columns, (rows, columns), single) for n in range(count)]
