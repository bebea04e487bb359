"""The routers of a model while it trains: scale of the auxiliary loss, bias by load, and what they have seen."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import paddle.distributed as dist
from paddle import nn

from paddle_te.distributed import gather_objects, row_groups
from paddle_te.layers.moe import MoEAuxLossAutoScaler, TopKRouter, update_expert_bias

# What the log says of each rank's last micro-batch: tokens of the busiest expert over the mean of all, in the layer
# where that is greatest; the share of all pairs of a token and an expert that moe_expert_capacity_factor has dropped;
# and, with their coefficients, the means over the layers of the loss that balances the load and of the z-loss
ROUTING = ("expert_load", "dropped_tokens", "moe_aux_loss", "moe_z_loss")


def routers(model: nn.Layer) -> list[TopKRouter]:
    """Return the routers of a model, or of a pipeline's stage."""
    return [layer for layer in model.sublayers() if isinstance(layer, TopKRouter)]


@contextlib.contextmanager
def scaled_auxiliary_loss(micro_batches: int, scaler: Any = None) -> Iterator[None]:
    """Give the auxiliary losses of the backward inside the weight that the micro-batch's main loss has in a step.

    micro_batches: whose losses the step takes the mean of. scaler: Paddle's GradScaler in fp16, which multiplies the
    main loss; None: none does.
    """
    share = 1 / micro_batches
    before = MoEAuxLossAutoScaler.main_loss_backward_scale
    MoEAuxLossAutoScaler.set_loss_scale(share if scaler is None else scaler._scale * share)
    try:
        yield
    finally:
        MoEAuxLossAutoScaler.set_loss_scale(before)


class _Seen(NamedTuple):
    """What a rank's routers saw: per layer the load, pairs and dropped pairs, and by name the losses of the layers."""

    loads: list[float]
    pairs: float
    dropped: float
    losses: dict[str, list[float]]


def _seen(model: nn.Layer) -> _Seen:
    """Read the statistics of the last forward. Waits for the device."""
    found = [router.statistics for router in routers(model) if router.statistics is not None]
    tokens = [statistics.tokens_per_expert.numpy() for statistics in found]
    return _Seen(
        [float(each.max() / max(each.mean(), 1e-12)) for each in tokens],
        float(sum(each.sum() for each in tokens)),
        sum(float(statistics.dropped) for statistics in found),
        {
            "moe_aux_loss": [float(statistics.aux_loss) for statistics in found if statistics.aux_loss is not None],
            "moe_z_loss": [float(statistics.z_loss) for statistics in found if statistics.z_loss is not None],
        },
    )


def routing_values(model: nn.Layer, processes: int) -> dict[str, float]:
    """Return {name of ROUTING: value} of all processes' routers; {} where nobody has routed. Collective."""
    everyone = gather_objects(_seen(model), processes)
    loads = [load for seen in everyone for load in seen.loads]
    if not loads:
        return {}
    values = {"expert_load": max(loads), "dropped_tokens": _share(everyone)}
    for name in everyone[0].losses:
        losses = [loss for seen in everyone for loss in seen.losses[name]]
        values |= {name: sum(losses) / len(losses)} if losses else {}
    return values


def _share(everyone: list[_Seen]) -> float:
    return sum(seen.dropped for seen in everyone) / max(sum(seen.pairs for seen in everyone), 1.0)


def update_biases(model: nn.Layer) -> None:
    """Move the bias of experts, where a model has one, by the load that all ranks' routers have seen in a step."""
    groups = row_groups()
    if groups is None:  # without fleet's topology all processes read other rows
        groups = [dist.get_group(0)] if dist.is_initialized() else []
    update_expert_bias(model, *groups)


def drop_step(model: nn.Layer) -> None:
    """Forget the load that routers have seen in a step whose update is left out: no bias moves by it."""
    for router in routers(model):
        router.forget_load()
