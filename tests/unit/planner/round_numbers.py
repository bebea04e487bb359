"""A GPU and a model with which a step's time can be worked out by hand."""

from dataclasses import replace
from typing import Any

from paddle_te.job import Job
from paddle_te.planner import speed
from paddle_te.planner.gpus import GPUS, Gpu
from paddle_te.planner.layout import layout as layout_of
from paddle_te.planner.model import Model

# nothing slows anything down, and nothing takes latency
ROUND = replace(
    GPUS["h200"],
    nvlink=100,
    nvlink_of_two=100,
    network=10,
    collective=0,
    nvlink_hop=0,
    network_hop=0,
    overlap=1,
    slowdown=0,
    hbm=1000,
    update=500,
    launch=0,
    gap=0,
    bucket=1e30,
)
SMALL = Model(hidden=1000, ffn=4000, layers=10, heads=10, kv_heads=10, head_dim=100, vocabulary=10_000)


def layout(gpus: int = 1, **settings: Any) -> Job:
    """Return a layout in bf16, unless `settings` say otherwise, of sequences of 1000 tokens."""
    return layout_of(gpus, 1000, **dict(precision="bf16") | settings)


def times(gpu: Gpu = ROUND, **settings: Any) -> dict[str, float]:
    """Return the milliseconds of each part of SMALL's step."""
    return speed.time_of_step(SMALL, layout(**settings), gpu)
