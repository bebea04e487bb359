"""Decoder layers that --fp8_skip_layers keeps out of fp8, in what the planner says of a layer."""

from __future__ import annotations

from collections.abc import Callable

from paddle_te.job import Job
from paddle_te.planner.model import Model


def share_in_16_bits(model: Model, layout: Job, stage: int | None = None) -> float:
    """Return the share of a pipeline stage's decoder layers that compute in 16 bits; of the whole model's for None."""
    skipped = layout.skipped_layers(model.layers)
    size = model.layers / layout.pp
    begin, end = (0.0, model.layers) if stage is None else (stage * size, (stage + 1) * size)
    return sum(begin <= number < end for number in skipped) / (end - begin)


def mean_of_layers(value: Callable[[Job], float], model: Model, layout: Job, stage: int | None = None) -> float:
    """Return the mean over a stage's layers of what `value` says of one under a layout, in fp8 and in 16 bits."""
    share = share_in_16_bits(model, layout, stage)
    if not share:
        return value(layout)
    return (1 - share) * value(layout) + share * value(layout.but(use_fp8=False, fp8_dpa=False))
