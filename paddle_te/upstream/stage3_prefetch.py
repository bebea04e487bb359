"""Gather the weights of about a decoder layer in sharding stage 3 ahead of their use, while layers before compute.

Paddle gathers the weights of one module ahead. That is too little: the MLP has most of a layer's weights, and they are
gathered while the small GEMM of attention's output computes. Paddle expects the order of the first forward. Uses that
are not in it wait for their gathers: the head's at the beginning of backward, and those of recompute.

A pass is the forward and backward of a micro-batch. Here the next pass is expected to use the modules in the order of
the last one. Gathers run on the group's stream in the order in which they were started, and a module waits for its own.
A module whose next use follows at once, as the head's in backward does, keeps its weights.

For a backward only those weights are gathered that it reads. A use of a module in forward sets `read_in_backward` of
its weights, and te's operations set it back where the backward reads something else: in fp8 the copies in fp8, which
forward has made (ops/te/program.py).

A rank keeps its part of a weight while it has the whole. Paddle lets it go, and copies it out of the whole again in
forward and in backward. Paddle also copies each module's output; here the next module reads it where it is. With
offload these copies are Paddle's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import paddle
from paddle import Tensor
from paddle.distributed.communication.group import Group
from paddle.distributed.fleet.meta_parallel.sharding import group_sharded_stage3 as stage3

from paddle_te.upstream.replacement import Replacement, Replacements, Theirs

PACKAGE, VERSION = "paddle", "3.3."
SYMPTOM = "Sharding stage 3 waits for most of its gathers of weights, and copies weights and activations."

AHEAD = 2**28  # elements that are gathered for what comes, and one module more: a layer of Llama-3-8B has 218 million


class _Use(NamedTuple):
    """A forward or a backward of a module.

    parameters: its sharded ones, always the same list. read: those of them that it reads.
    """

    parameters: list[Theirs]
    read: list[Theirs]


class _Uses:
    """The _Uses of modules in a pass."""

    def __init__(self) -> None:
        self.last: list[_Use] = []
        self.present: list[_Use] = []
        self.kept: list[Theirs] | None = None  # the parameters of the module in use, if the next use is its own

    def begin(self) -> None:
        """Begin a pass."""
        self.last, self.present = self.present, []

    def add(self, use: _Use) -> None:
        """Add the next use."""
        self.present.append(use)

    def to_come(self) -> list[_Use]:
        """Return the uses that are expected after the present one; none where the pass is another than the last."""
        at = len(self.present)
        if at > len(self.last) or self.last[at - 1].parameters is not self.present[-1].parameters:
            return []
        return self.last[at:]


def _uses(task_flow: Theirs) -> _Uses:
    if "uses" not in vars(task_flow):
        task_flow.uses = _Uses()
    return task_flow.uses


def _before_forward(layer: Theirs, order_tracer: Theirs, *arguments: Theirs) -> Any:
    """Replace ForwardPreHooks, to see a pass begin."""
    order, task_flow = order_tracer["layer"], arguments[-1]
    if order and order[0] == id(layer):
        _uses(task_flow).begin()
    return _forward.original(layer, order_tracer, *arguments)


def _wait_and_go_on(
    trainable_params: list[Theirs],
    task_flow: Theirs,
    group: Group,
    param2buffer_size: Mapping[str, int],
    use_calc_stream: bool,
    offload: bool = False,
) -> Theirs:
    """Replace _wait_layer, at each forward of a module after the first."""
    if offload:
        _waiting.original(trainable_params, task_flow, group, param2buffer_size, use_calc_stream, offload)
    else:
        _gather(_missing(trainable_params, task_flow), group, param2buffer_size, task_flow)
        _make_whole(trainable_params, task_flow)
    _go_on(_Use(trainable_params, trainable_params), task_flow, group, param2buffer_size, offload)
    return task_flow


def _go_on(
    use: _Use, task_flow: Theirs, group: Group, param2buffer_size: Mapping[str, int], offload: bool = False
) -> None:
    """Start the gathers for the uses that follow on this one."""
    uses = _uses(task_flow)
    uses.add(use)
    to_come = uses.to_come()
    # In backward gradients are off. There a weight is released with its gradient, which a frozen one has not.
    again = bool(to_come) and to_come[0].parameters is use.parameters and paddle.is_grad_enabled()
    stays = again and to_come[0].read and all(param.trainable for param in use.parameters)
    uses.kept = use.parameters if stays else None
    ahead = 0
    for following in to_come:
        if ahead >= AHEAD:
            return
        ahead += sum(param2buffer_size[param.name] for param in following.read if param.status != "all")
        _gather(_missing(following.read, task_flow), group, param2buffer_size, task_flow, offload)


def _missing(parameters: Iterable[Theirs], task_flow: Theirs) -> list[Theirs]:
    """Return those weights that are neither whole nor being gathered."""
    return [param for param in parameters if param.status != "all" and param.name not in task_flow.full_param]


def _gather(
    parameters: Sequence[Theirs],
    group: Group,
    param2buffer_size: Mapping[str, int],
    task_flow: Theirs,
    offload: bool = False,
) -> None:
    """Start the gathers of weights."""
    _gathering.original(parameters, group, param2buffer_size, False, task_flow, offload=offload)


def _gather_when_needed(
    trainable_params: list[Theirs],
    group: Group,
    param2buffer_size: Mapping[str, int],
    use_calc_stream: bool,
    task_flow: Theirs,
    sync_wait: bool = False,
    **elsewhere: Any,
) -> Any:
    """Replace _allgather_buffer, without Paddle's own gather of one module ahead, for which nothing waits."""
    if not sync_wait:
        return task_flow
    if not any(elsewhere.values()):
        _gather([param for param in trainable_params if param.status != "all"], group, param2buffer_size, task_flow)
        _make_whole(trainable_params, task_flow)
        return task_flow
    return _gathering.original(
        trainable_params, group, param2buffer_size, use_calc_stream, task_flow, sync_wait=True, **elsewhere
    )


def _make_whole(parameters: Iterable[Theirs], task_flow: Theirs) -> None:
    """Wait for the gathers of weights, of which the rank's parts stay."""
    for param in parameters:
        if param.status != "all":
            whole, task = task_flow.full_param[param.name]
            task.wait()
            whole._slice(0, param._numel())._share_buffer_to(param)
            param.status = "all"
        param.use_count += 1
        param.read_in_backward = True


def _release_unless_kept(
    trainable_params: list[Theirs], param2buffer: Theirs, rank: int, task_flow: Theirs, offload: bool = False
) -> None:
    """Replace _release_param, after a module's forward."""
    if _uses(task_flow).kept is trainable_params:
        return
    if offload:
        _releasing.original(trainable_params, param2buffer, rank, task_flow, offload)
        return
    for param in trainable_params:
        param.use_count -= 1
        if param.use_count == 0:
            let_go(param, task_flow)


def let_go(param: Theirs, task_flow: Theirs) -> None:
    """Leave of a weight this rank's part."""
    param._clear_data()
    param.use_count, param.status = 0, "part"
    task_flow.full_param.pop(param.name, None)


class _Behind(stage3.ForwardPostHooks):
    """ForwardPostHooks, a PyLayer behind each module, whose backward prepares that of the module."""

    @staticmethod
    def forward(
        ctx: Theirs,
        *outputs: Any,
        layer: Theirs,
        order_tracer: Theirs,
        trainable_params: Theirs,
        param2buffer: Theirs,
        rank: int,
        task_flow: Theirs,
        offload: bool,
        **of_backward: Any,
    ) -> Any:
        parameters = trainable_params[id(layer)]
        ctx.read = [param for param in parameters if getattr(param, "read_in_backward", True)]
        stage3._release_param(parameters, param2buffer, rank, task_flow, offload)
        if id(layer) not in order_tracer:
            order_tracer[id(layer)] = order_tracer["order"]
            order_tracer["order"] += 1
            order_tracer["layer"].append(id(layer))
        ctx.order_tracer, ctx.trainable_params, ctx.layer_id = order_tracer, trainable_params, id(layer)
        ctx.task_flow, ctx.offload = task_flow, offload
        for name in ("group", "sync_comm", "param2buffer_size"):
            setattr(ctx, name, of_backward[name])
        tensors = [output for output in outputs if isinstance(output, paddle.Tensor)]
        ctx.grad_none = {place: tensor.stop_gradient for place, tensor in enumerate(tensors)}
        outputs = tuple(_alias(output) if isinstance(output, paddle.Tensor) else output for output in outputs)
        return outputs if len(outputs) > 1 else outputs[0]

    @staticmethod
    def backward(ctx: Theirs, *grads: Tensor) -> Any:
        if ctx.sync_comm or ctx.offload:
            return _behind.original.backward(ctx, *grads)
        parameters, task_flow = ctx.trainable_params[ctx.layer_id], ctx.task_flow
        _gather(_missing(ctx.read, task_flow), ctx.group, ctx.param2buffer_size, task_flow)
        _make_whole(ctx.read, task_flow)
        _go_on(_Use(parameters, ctx.read), task_flow, ctx.group, ctx.param2buffer_size)
        stage3._create_params_grad(parameters, ctx.param2buffer_size, task_flow)
        return tuple(None if ctx.grad_none[place] else grad for place, grad in enumerate(grads))


def _alias(tensor: Tensor) -> Tensor:
    """Return a tensor in the same memory.

    A PyLayer would take its input itself for the result of an operation in place.
    """
    alias = tensor.view(tensor.shape) if tensor.size else paddle.assign(tensor)
    alias.stop_gradient = tensor.stop_gradient
    return alias


def _all_gather(tensor: Tensor, buffer_size: int, group: Group) -> tuple[Tensor, Any]:
    """Replace _all_gather: gather into memory that is not cleared first, as the ranks' slices fill it."""
    out = paddle.empty([buffer_size], dtype=tensor.dtype)
    return out, group.process_group.all_gather(tensor, out)


def _update_params_slice(self: Theirs) -> Any:
    """Replace GroupShardedStage3's, before an update: a gather for a use that did not come holds the old weights."""
    for param in (param for parameters in self._trainable_params.values() for param in parameters):
        if param.status == "part" and param.name in self._task_flow.full_param:
            _, task = self._task_flow.full_param.pop(param.name)
            task.wait()
    return _update.original(self)


_forward = Replacement(stage3, "ForwardPreHooks", _before_forward)
_waiting = Replacement(stage3, "_wait_layer", _wait_and_go_on)
_gathering = Replacement(stage3, "_allgather_buffer", _gather_when_needed)
_releasing = Replacement(stage3, "_release_param", _release_unless_kept)
_behind = Replacement(stage3, "ForwardPostHooks", _Behind)
_collective = Replacement(stage3, "_all_gather", _all_gather)
_update = Replacement(stage3.GroupShardedStage3, "_update_params_slice", _update_params_slice)
_replacements = Replacements(_forward, _waiting, _gathering, _releasing, _behind, _collective, _update)
apply, undo = _replacements.apply, _replacements.undo
