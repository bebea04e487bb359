"""Tell which layouts ran on GPUs, and how fast.

They stand in measured.json, which `python -m tools.benchmark.measured` makes of benchmarks/.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from paddle_te.job import Job
from paddle_te.planner.gpus import GPUS, Gpu
from paddle_te.planner.layout import layout as layout_of
from paddle_te.planner.model import Model

FILE = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class Ran:
    """A training that was measured. tokens_per_second: of one GPU."""

    gpu: Gpu
    model: Model
    layout: Job
    tokens_per_second: float


@cache
def all_that_ran() -> tuple[Ran, ...]:
    """Return the rows of the file."""
    return tuple(_ran(**row) for row in json.loads(FILE.read_text(encoding="utf-8")))


def _ran(gpu: str, model: dict[str, Any], layout: dict[str, Any], tokens_per_second: float) -> Ran:
    return Ran(GPUS[gpu], model_of_row(model), layout_of(**layout), tokens_per_second)


def model_of_row(row: dict[str, Any]) -> Model:
    """Return the Model that JSON has as its fields, without defaults.

    Older rows leave out the width of heads that divide `hidden`.
    """
    windows = tuple(row.get("windows", ()))
    return Model(**{"head_dim": row["hidden"] // row["heads"]} | row | {"windows": windows})


def speed_of(model: Model, layout: Job, gpu: Gpu) -> float | None:
    """Tokens/s of a GPU that were measured of this very layout; None where it never ran."""
    asked = model, layout, gpu.title
    found = (ran.tokens_per_second for ran in all_that_ran() if (ran.model, ran.layout, ran.gpu.title) == asked)
    return next(found, None)


def ran_on(layout: Job) -> list[str]:
    """Return the GPUs on which layouts of the same kind ran."""
    asked = _kind(layout)
    return sorted({gpu for kind, gpu in _kinds() if kind == asked})


def has_run(layout: Job) -> bool:
    """Return whether a layout of the same kind ran on any GPU."""
    return bool(ran_on(layout))


@cache
def _kinds() -> frozenset[tuple[tuple[Any, ...], str]]:
    return frozenset((_kind(ran.layout), ran.gpu.title) for ran in all_that_ran())


def _kind(layout: Job) -> tuple[Any, ...]:
    """The ways in which ranks share a model, whatever their number, and what lies in host memory."""
    degrees = layout.tp, layout.pp, layout.vp, layout.sep, layout.cp, layout.ep, layout.replicas
    shared = (degree > 1 for degree in degrees)
    on_the_host = layout.layers_on_host > 0, layout.share_on_host > 0
    stage = layout.sharding_ranks > 1 and layout.stage
    return *shared, *on_the_host, stage, layout.lora, layout.has_reference
