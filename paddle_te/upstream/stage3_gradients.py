"""Send each rank its part of a gradient's sum in sharding stage 3 while the layers below compute their backward.

Paddle divides a gradient by the number of ranks, sums all of it on every rank (an all-reduce), and lets each rank keep
its part. Meanwhile nothing computes, and twice as much is sent as is needed. Here each rank receives its part of the
ranks' average alone (a reduce-scatter, on nvgpu through `averages`). The numbers are equal to the bit where the number
of ranks is a power of two.

Paddle also clears each gradient before the module's backward, and te's GEMMs read it to add to it. It is new in each
micro-batch, so that te writes it instead (8 bytes of memory traffic less for each weight).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import Tensor
from paddle.distributed.fleet.meta_parallel.sharding import group_sharded_stage3 as stage3

from paddle_te.upstream import stage3_prefetch
from paddle_te.upstream.replacement import Replacement, Replacements, Theirs

PACKAGE, VERSION = "paddle", "3.3."
SYMPTOM = "Sharding stage 3 computes nothing while it sums gradients, and clears those that are overwritten."

UNDER_WAY = 3  # reductions at most, each of which keeps a whole gradient


def _get_reduction(self: Theirs, param: Theirs) -> Callable[..., None]:
    """Replace GroupShardedStage3._get_allreduce_fn: return the hook that a parameter's gradient is complete.

    With offload, and among ranks that keep the same part (data parallelism), Paddle's.
    """
    if self._offload or self._dp_group is not None and self._dp_group.nranks > 1:
        return _hook.original(self, param)
    release = _hook.original(self, param)  # what is left of it without the gradient

    @paddle.autograd.no_grad()
    def reduce_(*_: object) -> None:
        if param.name in self._task_flow.full_grad:
            _start(self, param, self._task_flow.full_grad.pop(param.name))
            if self.use_main_grad:
                param.main_grad = None
            else:
                param.clear_gradient(False)
            _finish(self, UNDER_WAY)
        if param.status == "all" and param.fw_storage is not None:  # stage3_prefetch has kept the rank's part
            stage3_prefetch.let_go(param, self._task_flow)
        else:
            release()

    return reduce_


def _start(self: Theirs, param: Theirs, gradient: Tensor) -> None:
    part = paddle.empty([gradient.size // self._group.nranks], gradient.dtype)
    options = dict(op=dist.ReduceOp.AVG, group=self._group, sync_op=False)
    task = dist.reduce_scatter(part, gradient, **options)  # type: ignore[arg-type]  # Paddle takes one tensor, too
    self.__dict__.setdefault("reductions", []).append((param, gradient, part, task))


@paddle.autograd.no_grad()
def _finish(self: Theirs, left: int = 0) -> None:
    """Add parts to those of earlier micro-batches, except the last ones, which may be under way."""
    reductions = vars(self).get("reductions", [])
    while len(reductions) > left:
        param, _, part, task = reductions.pop(0)
        task.wait()
        param.bw_storage = part if param.bw_storage is None else paddle.add(param.bw_storage, part)


def _update_params(self: Theirs) -> Any:
    """Replace GroupShardedStage3._update_params, which gives the optimizer the gradients."""
    _finish(self)
    return _update.original(self)


@paddle.autograd.no_grad()
def _create_params_grad(
    trainable_params: Iterable[Theirs], param2buffer_size: Mapping[str, int], task_flow: Theirs
) -> Any:
    """Replace _create_params_grad, which clears the gradients before a module's backward.

    Those that te has written in a pass before are not cleared (overwrite_main_grad: ops/te/program.py).
    """
    for param in trainable_params:
        if getattr(param, "overwrite_main_grad", None) is False and param.name not in task_flow.full_grad:
            elements, size = param._numel(), param2buffer_size[param.name]
            whole = paddle.empty([size], "float32")
            if elements < size:
                whole._slice(elements, size).zero_()  # padding is in the norm of the gradients
            param.main_grad, param.overwrite_main_grad = whole._slice(0, elements), True
            param.main_grad.get_tensor()._set_dims(param.shape)
            task_flow.full_grad[param.name] = whole
    return _creation.original(trainable_params, param2buffer_size, task_flow)


_hook = Replacement(stage3.GroupShardedStage3, "_get_allreduce_fn", _get_reduction)
_update = Replacement(stage3.GroupShardedStage3, "_update_params", _update_params)
_creation = Replacement(stage3, "_create_params_grad", _create_params_grad)
_replacements = Replacements(_hook, _update, _creation)
apply, undo = _replacements.apply, _replacements.undo
