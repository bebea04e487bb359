"""Let collectives divide gradients by the number of ranks on nvgpu, as NCCL can, instead of a pass over all of them.

Paddle has a reduction for that, ReduceOp.AVG, which it gives to its own GPU devices only. On other devices it
multiplies the gradients before or after they are summed. That reads and writes 8 bytes for each float32 gradient:
under sharding for those that the rank keeps, in data parallelism for all of the model's.

Here nvgpu has ReduceOp.AVG, too. Paddle itself takes it for sharding stage 1; here it is also taken for data
parallelism, for gradients that are reduced during a pipeline's last backward, and in stage3_gradients. DataParallel's
reducer, which reduces 16-bit gradients during backward, is C++ and stays as it is.

Where the number of ranks is a power of two no bit changes. Otherwise NCCL multiplies by its reciprocal, rounded to the
gradients' type, before it adds.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import paddle.distributed as dist
from paddle import Tensor
from paddle.distributed import ReduceOp
from paddle.distributed.communication.group import Group
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer import dygraph_sharding_optimizer as stage1
from paddle.distributed.fleet.meta_parallel import pipeline_parallel
from paddle.distributed.fleet.utils import hybrid_parallel_util

from paddle_te import device
from paddle_te.upstream.replacement import Replacement, Replacements

PACKAGE, VERSION = "paddle", "3.3."
SYMPTOM = "On nvgpu several milliseconds of a step divide gradients by the number of ranks."


def _average(name: str) -> Replacement:
    """Return the Replacement of one of paddle.distributed's collectives, which on nvgpu knows ReduceOp.AVG."""
    original = getattr(dist, name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        if call.arguments.get("op") != ReduceOp.AVG or device.kind() != "nvgpu":
            return original(*args, **kwargs)
        call.arguments["op"] = ReduceOp.SUM
        with device.nvgpu_section("average"):
            return original(*call.args, **call.kwargs)

    return Replacement(dist, name, collective)


def _can_average() -> bool:
    """Replace is_avg_reduce_op_supported."""
    return device.kind() == "nvgpu" or _support.original()


def _buffer(*args: Any, **kwargs: Any) -> Any:
    """Make a FusedCommBuffer of a pipeline's stage."""
    return _pipeline.original(*args, **kwargs, use_reduce_avg=device.kind() == "nvgpu")


def _reduce_over_data_parallel_ranks(
    parameters: Sequence[Tensor], comm_group: Group | None, bucket_size: int, scale: float | None = None
) -> Any:
    """Replace _apply_collective_grads_eager.

    scale: the sums are multiplied by it; None: they are averaged.
    """
    ranks = dist.get_world_size() if comm_group is None else comm_group.nranks
    if scale not in (None, 1 / ranks) or device.kind() != "nvgpu":
        return _data_parallel.original(parameters, comm_group, bucket_size, scale)
    with device.nvgpu_section("average"):
        return _data_parallel.original(parameters, comm_group, bucket_size, 1.0)


_support = Replacement(stage1, "is_avg_reduce_op_supported", _can_average)
_pipeline = Replacement(pipeline_parallel, "FusedCommBuffer", _buffer)
_data_parallel = Replacement(hybrid_parallel_util, "_apply_collective_grads_eager", _reduce_over_data_parallel_ranks)
_replacements = Replacements(
    *map(_average, ("all_reduce", "reduce", "reduce_scatter")), _support, _pipeline, _data_parallel
)


def apply() -> None:
    """Apply the repair. Raises ValueError for a plug-in that is too old to average."""
    device.check_nvgpu("average")
    _replacements.apply()


undo = _replacements.undo
