"""Choose the weights whose optimizer states lie in host memory, and the pieces in which these are copied.

The optimizer (`optimizer.offloaded_states`) and the planner both use this choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from paddle_te.options.training import OFFLOADED_AT_ONCE
from paddle_te.planner.model import Model

PIECE = 2**23  # elements at most, unless one row has more; of a flat weight a multiple of the blocks of 8-bit moments
LEAST = 2**18  # elements of a weight that is offloaded: starting the copies of a smaller one takes longer than them
SLOTS = OFFLOADED_AT_ONCE // PIECE


def spread(sizes: Sequence[float], fraction: float, least: float = LEAST) -> list[bool]:
    """Return for each weight whether its states lie on the host, so that about `fraction` of all elements do.

    sizes: elements of the weights, in the model's order. Weights with fewer than `least` stay on the device. Among
    weights of equal size the chosen ones have equal distances, so that copies spread evenly over the backward pass.
    """
    chosen, seen, moved = [False] * len(sizes), 0.0, 0.0
    for size in sorted({*sizes}, reverse=True):
        alike = [number for number, each in enumerate(sizes) if each == size]
        seen += size * len(alike)
        count = min(max(round((fraction * seen - moved) / size), 0), len(alike)) if size >= least else 0
        moved += size * count
        for place, number in enumerate(alike):
            chosen[number] = (place + 1) * count // len(alike) > place * count // len(alike)
    return chosen


def whole_weights(model: Model, tp: int) -> list[float]:
    """Elements of the weights that a rank has without sharding, in the model's order."""
    h = model.hidden
    fc1 = model.fc1 / (model.fc1 + model.ffn)  # its share of the MLP's weights, or the experts'
    mlp = model.mlp_weights / tp
    attention = [
        gemm.inputs * sum(gemm.outputs) / (1 if gemm.mode == "whole" else tp) for gemm in model.attention_gemms
    ]
    layer = (h, *attention, h, mlp * fc1, mlp * (1 - fc1))
    head = [h] + [model.embedding / tp] * (not model.tied)
    return [model.embedding / tp, *layer * model.layers, *head]


def late_pieces(model: Model, tp: int, fraction: float) -> int:
    """Return how many times of a piece's copy updates in backward wait for their states.

    They wait for those of a weight that has more pieces than there are slots. The first of the rest waits until a
    slot's piece is copied out, and then for its own copy.
    """
    sizes = whole_weights(model, tp)
    pieces = [math.ceil(size / PIECE) for size, moved in zip(sizes, spread(sizes, fraction), strict=True) if moved]
    return sum(count - SLOTS + 1 for count in pieces if count > SLOTS)
