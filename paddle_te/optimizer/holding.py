"""Tell which elements of which weights a rank's optimizer keeps the state of, in each kind of Paddle's sharding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from paddle import Tensor
from paddle.distributed.communication.group import Group
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer import (
    DygraphShardingOptimizer,
    DygraphShardingOptimizerV2,
)
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_optimizer_stage2 import GroupShardedOptimizerStage2

from paddle_te.distributed.tensor_parallel import TensorParallel


@dataclass(frozen=True)
class Held:
    """The part of a parameter that a rank's optimizer has: under which name, and which elements of the flat tensor.

    begin, end: None for all elements, in the parameter's shape; otherwise end may lie behind the last, among zeros.
    """

    name: str
    begin: int | None = None
    end: int | None = None

    def share(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return this rank's part of a whole array."""
        if self.begin is None or self.end is None:
            return array
        flat = array.reshape(-1)[self.begin : self.end]
        return np.concatenate([flat, np.zeros(self.end - self.begin - flat.size, flat.dtype)])


def layers_of(optimizer: Any) -> list[Any]:
    """Return an optimizer and those in it, which Paddle wraps for each kind of parallelism; Paddle's own last."""
    layers = [optimizer]
    while True:
        held = vars(layers[-1])
        inner = held.get("_inner_opt") or held.get("_optim")
        if inner is None or inner is layers[-1]:  # stage 3 makes an optimizer its own _optim
            return layers
        layers.append(inner)


def held_by(optimizer: Any, parameters: Iterable[Tensor]) -> dict[str, Held]:
    """Return {parameter's name: Held} of those Paddle parameters of which this rank's optimizer keeps the state.

    optimizer: the outermost one, wrapped for the run's kind of sharding, before its first step.
    """
    group: Group | None = None  # stage 3's
    for layer in layers_of(optimizer):
        if isinstance(layer, DygraphShardingOptimizerV2):
            return _held_in_buckets(layer)
        if isinstance(layer, DygraphShardingOptimizer):
            return {p.name: Held(p.name) for p in layer._rank2params[layer._sharding_rank]}
        if isinstance(layer, GroupShardedOptimizerStage2):
            return {name: Held(name) for name, rank in layer.param2rank.items() if rank == layer._rank}
        group = vars(layer).get("_group") or group
    return {p.name: _held_in_slices(p, group) for p in parameters if not p.stop_gradient}


def _held_in_buckets(optimizer: DygraphShardingOptimizerV2) -> dict[str, Held]:
    """Return, for stage 1 with split_param, the rank's part of a bucket in which parameters lie one after another."""
    optimizer._collect_comm_buffers()
    views = {
        name: view for bucket in optimizer._comm_buffer_list for name, view in bucket._sharding_param_grad_view.items()
    }
    return {
        name: Held(name, view._param_begin - view._index, view._param_end - view._index)
        for name, view in views.items()
        if view._param_begin < view._param_end
    }


@dataclass(frozen=True)
class Shares:
    """Which ranks divide a flat weight, and the elements [first, last) that each of them has."""

    ranks: TensorParallel
    ranges: Sequence[tuple[int, int]]

    def overlap(self, rank: int, begin: int, size: int) -> tuple[int, int]:
        """Return the elements [first, last) of a stretch of the weight that a rank has; first = last for none."""
        first, last = self.ranges[rank]
        first, last = max(first, begin), min(last, begin + size)
        return first, max(first, last)


def shares_of(optimizer: Any) -> dict[str, Shares]:
    """Return {parameter's name: Shares} of those that stage 1 with split_param divides among several ranks.

    optimizer: as for `held_by`. Names of all parameters, whether this rank has a part of them or not.
    """
    found: dict[str, Shares] = {}
    for layer in layers_of(optimizer):
        if isinstance(layer, DygraphShardingOptimizerV2):
            layer._collect_comm_buffers()
            for bucket in layer._comm_buffer_list:
                found |= _shares_in(bucket)
    return found


def _shares_in(bucket: Any) -> dict[str, Shares]:
    """Return the Shares of a bucket, in which parameters lie one after another, and which ranks divide evenly."""
    group = bucket._comm_group
    found: dict[str, Shares] = {}
    if group.nranks == 1:
        return {}
    ranks = TensorParallel(group, group.rank, group.nranks)
    for name, view in bucket._sharding_param_grad_view.items():
        size, begin = view._param_buffer._numel() // group.nranks, view._index
        count = int(np.prod(view._param.shape))
        edges = [min(max(rank * size - begin, 0), count) for rank in range(group.nranks + 1)]
        found[name] = Shares(ranks, list(pairwise(edges)))
    return found


def _held_in_slices(parameter: Tensor, group: Group | None) -> Held:
    """Return, for stage 3, an equal slice of a large parameter for each rank.

    Without sharding, and for a small parameter, return all of it.
    """
    if not hasattr(parameter, "fw_storage"):
        return Held(parameter.name)
    assert group is not None  # stage 3 has one
    size = int(np.prod(parameter.fw_storage.shape))
    return Held(f"slice@{parameter.name}", group.rank * size, (group.rank + 1) * size)
