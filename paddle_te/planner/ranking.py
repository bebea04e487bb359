"""Rank layouts: the faster is better, unless its costs are worth more than the time that it gains.

The table PRICES is the rule. A layout that has one of these things must be faster than one without by that factor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from paddle_te.job import Job
from paddle_te.planner.measured import has_run
from paddle_te.planner.plan import Plan


class Price(NamedTuple):
    """A part of a layout, how much faster the layout must be for it, and what it costs, in words.

    "" for nothing that a user gives up.
    """

    has: Callable[[Job], object]
    factor: float
    costs: str = ""


PRICES = (
    # four runs with something in host memory differed by 3 % from what is computed
    Price(lambda layout: layout.offloads, 1.03),
    # the error of a step's time is 5 % in nine points of ten (docs/guides/plan.md)
    Price(lambda layout: not has_run(layout), 1.05),
    Price(
        lambda layout: layout.optim_moments == "bfloat16",
        1.05,
        "moments in bfloat16: they are rounded at random after each step; over 500 steps of a 134 M model the loss "
        "differed by at most 0.16 %",
    ),
    Price(
        lambda layout: layout.optim_moments == "int8",
        1.10,
        "moments in int8: they are rounded to 8 bits at random after each step; over 500 steps of a 134 M model the "
        "loss differed by at most 0.30 %",
    ),
    Price(
        lambda layout: layout.optimizer_in_backward == "last_norm",
        1.05,
        "update in backward: gradients are clipped by the norm of the step before",
    ),
)
FURTHER = 1.01  # for each further part of a layout, so that near ties go to the simplest


def rank(plan: Plan) -> tuple[float, int, float]:
    """Return the key that sorts the better plan first: time and prices, then least recompute, then least memory."""
    layout = plan.layout
    worth = plan.milliseconds * FURTHER ** len(things(layout))
    for price in PRICES:
        worth *= price.factor if price.has(layout) else 1
    return worth, computed_again(layout), plan.memory.total


def things(layout: Job) -> list[str]:
    """Return the names of the parts that a layout adds to the simplest one."""
    has = {
        "TP": layout.tp > 1,
        "PP": layout.pp > 1,
        "VP": layout.vp > 1,
        "SEP or CP": layout.sharing > 1,
        "EP": layout.ep > 1,
        "sharding": layout.sharding_ranks > 1,
        "recompute": computed_again(layout),
        "loss in chunks": layout.use_fused_linear_cross_entropy,
        "MLP in chunks": layout.mlp_in_chunks,
        "activations in host memory": layout.layers_on_host,
        "states in host memory": layout.share_on_host,
    }
    return [name for name, there in has.items() if there]


def computed_again(layout: Job) -> int:
    """Return the parts of a layer that backward computes again, whole layers being more than all parts."""
    return 10 if layout.recomputed == "full" else len(layout.recomputed_modules)


def costs(layout: Job) -> list[str]:
    """Return what a user gives up for a layout, in words."""
    return [price.costs for price in PRICES if price.costs and price.has(layout)]
