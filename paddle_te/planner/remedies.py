"""Find what fits when a job does not: layouts with as many tokens a step, then those that also keep less."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from paddle_te.job import Job
from paddle_te.options.lora import FP8_BASE
from paddle_te.planner.gpus import Gpu
from paddle_te.planner.layout import kept
from paddle_te.planner.memory import Memory
from paddle_te.planner.model import Model
from paddle_te.planner.plan import Plan
from paddle_te.planner.search import search

COMPACT = {"optim_moments": "bfloat16", "master_weights": "bf16_remainder"}  # the smallest state of AdamW in 16 bits


def remedies(
    model: Model, job: Job, gpu: Gpu, most: int, wanted: Callable[[Job], bool] = lambda layout: True
) -> tuple[dict[str, object], list[Plan]]:
    """Return (what a job would have to change beside its layout, the fastest plans that then fit, at most so many).

    wanted: which layouts are possible. Both are empty where nothing fits.
    """
    asked = job.world, job.sequence, job.tokens_per_step
    smaller: dict[str, object] = {**(FP8_BASE if job.lora else COMPACT)}
    for change in ({}, smaller):
        other = job.but(**change)
        try:
            found = search(model, gpu, *asked, other.precision, wanted, **kept(other))
        except ValueError:  # no layout has so many tokens
            continue
        if found.plans:
            return change, [*found.plans[:most]]
    return {}, []


def bill(memory: Memory, least: float) -> str:
    """Return the parts of a memory from `least` GB on, the largest first, as " (optimizer 20.1, weights 16.2)"."""
    sizes = {part.name.replace("_", " "): getattr(memory, part.name) / 1e9 for part in fields(memory)}
    largest = sorted(sizes.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{part} {size:.1f}" for part, size in largest if size >= least)
    return f" ({parts})" if parts else ""
