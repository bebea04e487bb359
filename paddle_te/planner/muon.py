"""The work and memory of Muon beyond AdamW's. The optimizer (`optimizer.muon`) uses these constants."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

from paddle_te.job import Job
from paddle_te.native.newton_schulz import blocks_of, first_steps
from paddle_te.planner.gpus import Gpu
from paddle_te.planner.model import Model

NEWTON_SCHULZ_STEPS = 5
# A rank makes the updates of at least so many elements orthogonal at a time, beside the copies that Newton–Schulz
# works on. With far fewer the GPU would compute one large matrix at a time.
CHUNK = 2**27
# Bytes an element that passes over matrices read and write: momentum 14, norm and division 10, copies and
# transposes between products 20, the weight with its remainder 10.
PASSES = 54
# Bytes an element of a Chunk: its update before and after, what Newton–Schulz reads and writes, and matrices like X·Xᵀ
WORKSPACE = 12


class Matrices(NamedTuple):
    """All of a model's that Muon updates: their elements, those of the largest weight, operations of Newton–Schulz."""

    elements: float
    largest: float
    flops: float


def newton_schulz_flops(rows: int, columns: int) -> float:
    """Return the operations of all steps of a matrix, as `ops.te.newton_schulz` computes them.

    Steps but the first ones multiply with X at their beginning and end. Products of m × m matrices, m the smaller size:
    A² of each step, and 3 for each of the first steps behind the first one. All but products at a step's end are
    symmetric, and computed by block rows from the diagonal on.
    """
    small, large = sorted((rows, columns))
    first, blocks = first_steps(rows, columns), blocks_of(rows, columns)
    upper = (1 + 1 / blocks) / 2
    with_x, squares = NEWTON_SCHULZ_STEPS - first + 1, NEWTON_SCHULZ_STEPS + 3 * (first - 1)
    return 2.0 * small**2 * (with_x * large * (1 + upper) + squares * small * upper)


@cache
def matrices_of(model: Model) -> Matrices:
    """Return the Matrices of a model that was made of a configuration."""
    # here, as they import NumPy, for which the launcher waits only with Muon
    from paddle_te.weights.dims import Dims
    from paddle_te.weights.layout import MATRICES
    from paddle_te.weights.layouts import te_layout

    assert model.spec is not None
    layout, dims = te_layout(family=model.spec.family), Dims(model.spec)
    elements, largest, flops = 0.0, 0.0, 0.0
    for place in layout.tensors(model.spec):
        if place.layer is None or place.slot.parts[0] not in MATRICES:
            continue
        shapes = [dims.part_shape(part) for part in dims.parts(place)]
        size = sum(map(math.prod, shapes))
        elements, largest = elements + size, max(largest, size)
        flops += sum(newton_schulz_flops(*shape) for shape in shapes)
    return Matrices(elements, largest, flops)


def matrices_here(model: Model, layout: Job) -> float:
    """Return the elements of matrices of a stage's tensor parallel rank."""
    return matrices_of(model).elements / (layout.tp * layout.pp)


def workspace(model: Model, layout: Job) -> float:
    """Return the bytes that the update of a Chunk takes for a moment."""
    if layout.optim != "muon":
        return 0.0
    return WORKSPACE * min(max(CHUNK, matrices_of(model).largest / layout.tp), matrices_here(model, layout))


def muon_ms(model: Model, layout: Job, gpu: Gpu) -> float:
    """Return the ms of Muon beyond AdamW's update: Newton–Schulz and the passes around it, divided among the ranks.

    All-to-alls that bring matrices to one rank and back are not counted: 8 bytes of a rank's elements.
    """
    if layout.optim != "muon":
        return 0.0
    ranks = layout.tp * layout.pp * layout.sharding_ranks
    found = matrices_of(model)
    return (found.flops / gpu.gemm_bf16 / 1e9 + PASSES * found.elements / gpu.hbm / 1e6) / ranks
