"""A mixture of experts on Transformer Engine's kernels and ours: see `paddle_te.ops.moe`.

The router is here, the experts are in `experts`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_te.native import addition
from paddle_te.ops.activations import EXPERTS_FC1_WIDTHS
from paddle_te.ops.moe import Routing
from paddle_te.ops.routing import apply_routing, limit_experts, shares_of
from paddle_te.ops.routing import balance_loss as of_shares
from paddle_te.ops.routing import route as in_paddle
from paddle_te.ops.te import autograd, runtime
from paddle_te.ops.te.experts import experts_mlp
from paddle_te.ops.te.grouped_gemms import check_experts, check_supported
from paddle_te.ops.te.grouped_linear import grouped_linear
from paddle_te.ops.te.recording import Op, OpInputs, Placeholder, Recorder
from paddle_te.ops.te.runtime import BYTE, FLOAT32, Matrix, check_tensor, dense, dtype_code, view
from paddle_te.ops.te.scaled_activation import ACTIVATIONS

__all__ = [
    "add",
    "balance_loss",
    "check_experts",
    "experts_mlp",
    "fork",
    "grouped_linear",
    "limit_experts",
    "route",
    "scaled_activate",
]

NO_GROUPS = -1


class _Fork(PyLayer):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> tuple[Tensor, ...]:
        return tuple([view(x, x.shape) for _ in range(count)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return _sum([dense(grad) for grad in grads])


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    """Return their sum, in new memory: the first one may be read elsewhere, too."""
    rt, (first, *others) = runtime.current(), tensors
    code, n = dtype_code("a tensor", first), math.prod(first.shape)
    total = rt.empty(first.shape, first.dtype)
    rt.te.memcpy_async(rt.view(total, (n,), code), rt.view(first, (n,), code), rt.stream)
    for other in others:
        addition.add_to(rt.te, rt.stream, total.data_ptr(), other.data_ptr(), n, code)
    return total


class _Add(PyLayer):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return _sum([dense(x), dense(y)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, view(gradient, gradient.shape)


def add(x: Tensor, y: Tensor) -> Tensor:
    """Return x + y, in one kernel."""
    return _Add.apply(x, y)


def fork(x: Tensor, count: int) -> tuple[Tensor, ...]:
    """Return x `count` times; one kernel adds each further gradient."""
    return _Fork.apply(dense(x), count)


class _SavedScaled(NamedTuple):
    """Hold what backward reads. activation: its name."""

    x: Placeholder
    hidden: Matrix
    scales: Placeholder
    activation: str
    code: int


def _scaled_forward(rt: Recorder, inputs: OpInputs, activation: str) -> tuple[Placeholder, _SavedScaled]:
    x, scales = inputs.tensors
    code, (rows, columns) = dtype_code("x", x), x.shape
    check_tensor("scales", scales, [rows], paddle.float32)
    hidden, act = rt.matrix(x, code), rt.empty([rows, columns // EXPERTS_FC1_WIDTHS[activation]], x.dtype)
    ACTIVATIONS[activation].activate(rt, hidden, scales.data_ptr(), rt.matrix(act, code), code)
    return act, _SavedScaled(x, hidden, scales, activation, code)


def _scaled_backward(rt: Recorder, saved: _SavedScaled, dy: Placeholder) -> tuple[Placeholder, Placeholder]:
    x, hidden, scales, activation, code = saved
    dx, dscales = rt.empty(x.shape, x.dtype), rt.empty([x.shape[0]], paddle.float32)
    given = rt.matrix(dy, code), hidden, scales.data_ptr(), rt.matrix(dx, code), dscales.data_ptr(), code
    ACTIVATIONS[activation].gradient(rt, *given)
    return dx, dscales


_SCALED_ACTIVATION = Op(_scaled_forward, _scaled_backward)


def scaled_activate(x: Tensor, scales: Tensor, activation: str) -> Tensor:
    """Return activate(x) times float32 scales [tokens], in one kernel."""
    check_supported(activation)
    return autograd.apply(_SCALED_ACTIVATION, (x, scales), activation)


class _Route(PyLayer):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, expert_bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
        rt, shape = runtime.current(), tuple(logits.shape)
        probs, scores = rt.empty(list(shape), paddle.float32), rt.empty(list(shape), paddle.float32)
        routing_map = rt.empty(list(shape), paddle.bool)
        bias = expert_bias if expert_bias is None else rt.view(expert_bias, (shape[1],), FLOAT32)
        rt.te.topk_forward(
            rt.view(logits, shape, FLOAT32),
            bias,
            rt.view(probs, shape, FLOAT32),
            rt.view(routing_map, shape, BYTE),
            rt.view(scores, shape, FLOAT32),
            routing.topk,
            routing.pre_softmax,
            routing.num_groups or NO_GROUPS,
            routing.group_topk or NO_GROUPS,
            routing.scaling_factor,
            routing.score_function == "sigmoid",
            rt.stream,
        )
        ctx.saved, ctx.routing, ctx.has_bias = (routing_map.detach(), scores), routing, expert_bias is not None
        ctx.set_materialize_grads(False)
        return probs, routing_map

    @staticmethod
    def backward(ctx: Any, dprobs: Tensor, _: Tensor) -> Any:
        (routing_map, scores), routing = ctx.saved, ctx.routing
        rt, dprobs, shape = runtime.current(), dense(dprobs), tuple(scores.shape)
        dlogits = rt.empty(list(shape), paddle.float32)
        rt.te.topk_backward(
            rt.view(routing_map, shape, BYTE),
            rt.view(scores, shape, FLOAT32),
            rt.view(dprobs, shape, FLOAT32),
            rt.view(dlogits, shape, FLOAT32),
            routing.topk,
            routing.pre_softmax,
            routing.scaling_factor,
            routing.score_function == "sigmoid",
            rt.stream,
        )
        return (dlogits, None) if ctx.has_bias else dlogits


def route(logits: Tensor, routing: Routing, expert_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (probs, routing_map) of float32 logits [tokens, E].

    TE's kernel adds topk / group_topk scores of a group up; where another number counts, Paddle's operations choose.
    """
    check_tensor("logits", logits, logits.shape, paddle.float32)
    if expert_bias is not None:
        check_tensor("expert_bias", expert_bias, [logits.shape[1]], paddle.float32)
    if routing.group_topk and routing.group_topk * routing.best_of_group != routing.topk:
        return in_paddle(logits, routing, expert_bias)
    return apply_routing(_Route, dense(logits), expert_bias, routing)


def balance_loss(logits: Tensor, routing: Routing, sequences: int = 1) -> Tensor:
    """Return 1 where the experts are in balance, more where they are not."""
    with paddle.no_grad():
        _, routing_map = route(logits.detach(), routing._replace(num_groups=None, group_topk=None))
    return of_shares(shares_of(logits, routing), routing_map, routing.topk, sequences)
