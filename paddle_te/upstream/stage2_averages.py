"""Average gradients of sharding stage 2 in the last reduction of a step, on nvgpu.

Each gradient is kept by one rank. In each micro-batch Paddle sums the gradient over the ranks, together with what that
rank has kept from the micro-batches before. Before the update Paddle divides all sums by the number of ranks, in a pass
of its own. Here the reduction of the last micro-batch divides them (`averages`), so that the pass is left out.

Paddle does not know which micro-batch is the last. Trainers say it with `tell_last`. Where no trainer has said it,
Paddle divides as before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paddle import Tensor
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage2 import GroupShardedStage2

from paddle_te import device
from paddle_te.upstream.replacement import Replacement, Replacements, Theirs

PACKAGE, VERSION = "paddle", "3.3."
SYMPTOM = "On nvgpu several milliseconds of a step of sharding stage 2 divide gradients by the number of ranks."


def tell_last(model: object, is_last: bool) -> None:
    """Say before a micro-batch's forward whether an update follows it. model: what the trainer calls."""
    if isinstance(model, GroupShardedStage2):
        model.is_last_microbatch = is_last


def _averages_now(self: Theirs) -> bool:
    """Return whether a reduction of this micro-batch averages.

    Where Paddle divides otherwise, nothing is changed: float16 gradients as they come, those in host memory, and those
    of data parallel ranks.
    """
    several = self._dp_group is not None and self._dp_group.nranks > 1
    told = vars(self).get("is_last_microbatch", False)
    return told and self.scale_in_opt and not self._offload and not several and device.kind() == "nvgpu"


def _get_reduce_fn(self: Theirs, index: int, param: Tensor, dst_rank: int) -> Callable[..., None]:
    """Return GroupShardedStage2's hook that a parameter's gradient is complete for this micro-batch."""
    reduce_ = _reducing.original(self, index, param, dst_rank)
    averaged = self.__dict__.setdefault("averaged", {})  # of the running step: {parameter: by its last reduction}

    def reduce_or_average(*args: Any) -> None:
        averaged[param.name] = _averages_now(self)
        if not averaged[param.name]:
            return reduce_(*args)
        with device.nvgpu_section("average"):
            reduce_(*args)

    return reduce_or_average


def _grad_scale(self: Theirs) -> None:
    """Divide what was not averaged, before the update, as GroupShardedStage2 does."""
    averaged = {*self.__dict__.get("averaged", {}).values()}
    self.__dict__.get("averaged", {}).clear()
    if len(averaged) > 1:
        raise RuntimeError(
            "sharding stage 2: some weights got no gradient from the step's last micro-batch, but from earlier ones; "
            "use sharding stage 1"
        )
    if averaged != {True}:
        _dividing.original(self)


_reducing = Replacement(GroupShardedStage2, "_get_reduce_fn", _get_reduce_fn)
_dividing = Replacement(GroupShardedStage2, "_grad_scale", _grad_scale)
_replacements = Replacements(_reducing, _dividing)


def apply() -> None:
    """Apply the repair. Raises ValueError for a plug-in that is too old to average."""
    device.check_nvgpu("average")
    _replacements.apply()


undo = _replacements.undo
