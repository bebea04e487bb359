"""A mixture of experts on Transformer Engine's kernels and ours: see `paddle_te.ops.moe`.

How many rows each expert has is known to the device alone. Memory has room for the most that there can be, and the
GEMMs read the numbers where they lie, so that the host waits for nothing and a recorded program serves all batches.
"""

import math
from functools import cache
from typing import Any, NamedTuple

import paddle
from paddle.autograd import PyLayer

from paddle_te import native
from paddle_te.native import BackendUnavailable, addition, experts
from paddle_te.native.library import cublas_version
from paddle_te.ops.activations import FC1_WIDTHS
from paddle_te.ops.moe import SMALL
from paddle_te.ops.te import autograd, runtime
from paddle_te.ops.te.recording import Op
from paddle_te.ops.te.runtime import BYTE, FLOAT32, Matrix, check_tensor, dense, dtype_code, view

__all__ = [
    "balance_loss",
    "check_experts",
    "experts_mlp",
    "fork",
    "grouped_linear",
    "limit_experts",
    "route",
    "scaled_activate",
]

CUBLAS = (13, 4)  # from here on Hopper has grouped GEMMs
FAULTY = (13, 7)  # where these corrupt data on newer GPUs
NO_GROUPS = -1


def check_experts(activation="swiglu", bias=False, capacity=False):
    """Refuse what has no kernels, and libraries without grouped GEMMs."""
    native.load()
    version, problems = cublas_version(), []
    if not CUBLAS <= version < FAULTY:
        what = "grouped GEMMs need cuBLAS 13.4 to 13.6, not {}.{}".format(*version)
        problems.append((what, 'pip install "nvidia-cublas>=13.6.2,<13.7"'))
    for missing, what in (
        (activation != "swiglu", f"experts with activation {activation}"),
        (bias, "biases of experts"),
        (capacity, "a capacity of experts"),
    ):
        if missing:
            problems.append((f"backend transformer_engine has no {what}", "use backend paddle"))
    if problems:
        raise BackendUnavailable(problems)


@cache
def _factors(place):
    """1 and, 16 bytes behind it, 0: what grouped GEMMs multiply products and sums with."""
    return paddle.to_tensor([1.0, 0, 0, 0, 0, 0, 0, 0], "float32")


def factors():
    """The address of `_factors` on the present device."""
    return _factors(str(paddle.framework._current_expected_place())).data_ptr()


class _Fork(PyLayer):
    @staticmethod
    def forward(ctx, x, count):
        return tuple([view(x, x.shape) for _ in range(count)])

    @staticmethod
    def backward(ctx, *grads):
        rt, (first, *others) = runtime.current(), [dense(grad) for grad in grads]
        code, n = dtype_code("a gradient", first), math.prod(first.shape)
        total = rt.empty(first.shape, first.dtype)  # autograd may read the first one elsewhere, too
        rt.te.memcpy_async(rt.view(total, (n,), code), rt.view(first, (n,), code), rt.stream)
        for grad in others:
            addition.add_to(rt.te, rt.stream, total.data_ptr(), grad.data_ptr(), n, code)
        return total


def fork(x, count):
    """x `count` times; one kernel adds each further gradient."""
    return _Fork.apply(dense(x), count)


def _scaled_forward(rt, inputs, settings):
    x, scales = inputs.tensors
    code, (rows, columns) = dtype_code("x", x), x.shape
    check_tensor("scales", scales, [rows], paddle.float32)
    hidden, act = rt.matrix(x, code), rt.empty([rows, columns // 2], x.dtype)
    of_rows = rt.view(scales, (rows,), FLOAT32)
    rt.te.scaled_swiglu(hidden.native, of_rows, rt.matrix(act, code).native, rt.stream)
    return act, (x, hidden, of_rows, code)


def _scaled_backward(rt, saved, dy):
    x, hidden, of_rows, code = saved
    dx, dscales = rt.empty(x.shape, x.dtype), rt.empty([x.shape[0]], paddle.float32)
    gradients = rt.matrix(dx, code).native, rt.view(dscales, (x.shape[0],), FLOAT32)
    rt.te.scaled_dswiglu(rt.matrix(dy, code).native, hidden.native, of_rows, *gradients, rt.stream)
    return dx, dscales


_SCALED_SWIGLU = Op(_scaled_forward, _scaled_backward)


def scaled_activate(x, scales, activation):
    """activate(x) times float32 scales [tokens], in one kernel."""
    _check_supported(activation)
    return autograd.apply(_SCALED_SWIGLU, (x, scales))


class _Route(PyLayer):
    @staticmethod
    def forward(ctx, logits, expert_bias, routing):
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
        ctx.mark_non_differentiable(routing_map)
        return probs, routing_map

    @staticmethod
    def backward(ctx, dprobs, _):
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


def route(logits, routing, expert_bias=None):
    """(probs, routing_map) of float32 logits [tokens, E]."""
    check_tensor("logits", logits, logits.shape, paddle.float32)
    if expert_bias is not None:
        check_tensor("expert_bias", expert_bias, [logits.shape[1]], paddle.float32)
    return _Route.apply(dense(logits), expert_bias, routing)


def balance_loss(logits, routing):
    """1 where the experts are in balance, more where they are not."""
    if routing.score_function == "sigmoid":
        scores = paddle.nn.functional.sigmoid(logits)
        scores = scores / (scores.sum(-1, keepdim=True) + SMALL)
    else:
        scores = paddle.nn.functional.softmax(logits, -1)
    with paddle.no_grad():
        _, routing_map = route(logits.detach(), routing._replace(num_groups=None, group_topk=None))
        shares = routing_map.astype("float32").mean(0) / routing.topk
    return (shares * scores.mean(0)).sum() * logits.shape[1]


def limit_experts(probs, routing_map, capacity, policy):
    """Layers do not get as far: see `check_experts`."""
    raise NotImplementedError("backend transformer_engine has no capacity of experts; use backend paddle")


class _Group(NamedTuple):
    """The rows of all experts. experts: how many. counts: where their rows are counted. widths: {columns: address of
    where each expert's rows begin in a matrix with so many}."""

    experts: int
    counts: int
    widths: dict

    def _gemm(self, rt, a, b, d, transa, transb, accumulate, backward, columns):
        offsets = [self.widths.get(n, 0) for n in columns]
        given = transa, transb, self.experts, self.counts, *offsets, factors(), rt.stream, accumulate, backward
        rt.te.grouped_gemm(a.native, b.native, d.native, *given)

    def forward(self, rt, x, weight, y):
        """y = x · weightᵀ, Matrices; weight [E · out, in]."""
        columns = 0, x.shape[1], y.shape[1]
        self._gemm(rt, weight, x, y, True, False, False, False, columns)

    def dgrad(self, rt, dy, weight, dx):
        """dx = dy · weight."""
        self._gemm(rt, weight, dy, dx, False, False, False, True, (0, dy.shape[1], dx.shape[1]))

    def wgrad(self, rt, x, dy, weight, code):
        """weight's gradient, or None where it is put into or added to its main_grad."""
        if weight.stop_gradient:
            return None
        fused, (_, out, in_) = weight.main_grad is not None, weight.shape
        dtype, code = (paddle.float32, FLOAT32) if fused else (weight.dtype, code)
        dw, accumulate = weight.main_grad if fused else rt.empty(weight.shape, dtype), fused and weight.accumulate
        columns = x.shape[1], dy.shape[1], 0
        self._gemm(rt, x, dy, rt.matrix(dw, code), False, True, accumulate, True, columns)
        if not accumulate:  # GEMMs over no rows write nothing
            size = out * in_ * (4 if fused else 2)
            experts.zero_empty(rt.te, rt.stream, dw.data_ptr(), self.counts, self.experts, size)
        return None if fused else dw


class ExpertsSettings(NamedTuple):
    """topk: the greatest number of a token's experts. recompute: whether backward computes the activation again."""

    topk: int
    recompute: bool


class _Saved(NamedTuple):
    """What backward reads. places, group, memory: where the rows are, and the Placeholders that says. rows: of x, a
    Matrix. act: None where it is computed again."""

    inputs: Any
    settings: ExpertsSettings
    sizes: experts.Sizes
    places: experts.Places
    group: _Group
    rows: Matrix
    hidden: Matrix
    act: Matrix | None


def _placed(rt, inputs, sizes, columns):
    """(Places, _Group) of the tokens. columns: of x, fc1's and fc2's input."""
    _, probs, routing_map, *_ = inputs.tensors
    count = sizes.experts
    counts, offsets = rt.empty([count], paddle.int64), rt.empty([len(columns), count + 1], paddle.int64)
    place = rt.empty([sizes.tokens, count], paddle.int32)
    token_of, prob_of = rt.empty([sizes.rows], paddle.int32), rt.empty([sizes.rows], paddle.float32)
    places = experts.Places(*[memory.data_ptr() for memory in (counts, offsets, place, token_of, prob_of)])
    given = routing_map.data_ptr(), probs.data_ptr(), places, sizes, columns
    experts.place(rt.te, rt.stream, *given)
    begins = [places.offsets + 8 * (count + 1) * i for i in range(len(columns))]
    return places, _Group(count, places.counts, dict(zip(columns, begins, strict=True)))


def _check(x, probs, routing_map, fc1, fc2, residual):
    tokens, hidden = x.shape
    count, fc1_rows, ffn = fc1.shape[0], fc1.shape[1], fc2.shape[2]
    check_tensor("probs", probs, [tokens, count], paddle.float32)
    if residual is not None:
        check_tensor("residual", residual, x.shape, x.dtype)
    check_tensor("fc1_weight", fc1, [count, FC1_WIDTHS["swiglu"] * ffn, hidden], x.dtype)
    check_tensor("fc2_weight", fc2, [count, hidden, ffn], x.dtype)
    if routing_map.dtype is not paddle.bool or list(routing_map.shape) != [tokens, count]:
        raise TypeError(f"routing_map is {routing_map.dtype} {routing_map.shape}; it must be bool {[tokens, count]}")
    if hidden % 8 or ffn % 8:
        raise ValueError(
            f"backend transformer_engine: hidden_size {hidden} and moe_ffn_hidden_size {ffn} must be multiples of 8"
        )
    return fc1_rows, ffn


def _forward(rt, inputs, settings):
    x, probs, routing_map, fc1, fc2, residual = inputs.tensors
    (fc1_rows, ffn), code, (tokens, hidden_size) = _check(*inputs.tensors), dtype_code("x", x), x.shape
    count, multiple = fc1.shape[0], 1
    sizes = experts.Sizes(tokens, count, experts.most_rows(tokens, count, settings.topk, multiple), multiple)
    places, group = _placed(rt, inputs, sizes, (hidden_size, fc1_rows, ffn))
    new = lambda columns: rt.new_matrix((sizes.rows, columns), x.dtype, code)  # noqa: E731
    rows, hidden, act, y = new(hidden_size), new(fc1_rows), new(ffn), new(hidden_size)
    _gather(rt, x, rows, places, sizes, code)
    group.forward(rt, rows, rt.matrix(fc1, code), hidden)
    _activate(rt, hidden, places, sizes, act)
    group.forward(rt, act, rt.matrix(fc2, code), y)
    out = rt.empty(x.shape, x.dtype)
    _combine(rt, y, routing_map, places, sizes, out, code, residual)
    return out, _Saved(inputs, settings, sizes, places, group, rows, hidden, None if settings.recompute else act)


def _gather(rt, x, rows, places, sizes, code):
    experts.gather(rt.te, rt.stream, x.data_ptr(), places, rows.memory.data_ptr(), sizes, rows.shape[1], code)


def _combine(rt, rows, routing_map, places, sizes, out, code, residual=None):
    added = 0 if residual is None else residual.data_ptr()
    given = rows.memory.data_ptr(), routing_map.data_ptr(), places, added, out.data_ptr()
    experts.combine(rt.te, rt.stream, *given, sizes, rows.shape[1], code)


def _of_rows(rt, places, sizes):
    """The probabilities of the rows, as TE takes them."""
    return rt.tensor(places.prob_of, (sizes.rows,), FLOAT32)


def _activate(rt, hidden, places, sizes, act):
    rt.te.scaled_swiglu(hidden.native, _of_rows(rt, places, sizes), act.native, rt.stream)


def _backward(rt, saved, dy):
    x, probs, routing_map, fc1, fc2, residual = saved.inputs.tensors
    sizes, places, group, code = saved.sizes, saved.places, saved.group, dtype_code("x", x)
    new = lambda columns: rt.new_matrix((sizes.rows, columns), x.dtype, code)  # noqa: E731
    grad, dact, act = new(x.shape[1]), new(fc2.shape[2]), saved.act
    _gather(rt, dy, grad, places, sizes, code)
    group.dgrad(rt, grad, rt.matrix(fc2, code), dact)
    if act is None:
        _activate(rt, saved.hidden, places, sizes, act := new(fc2.shape[2]))
    dw2 = group.wgrad(rt, act, grad, fc2, code)
    dhidden, dof_rows = new(fc1.shape[1]), rt.empty([sizes.rows], paddle.float32)
    of_rows = _of_rows(rt, places, sizes), dhidden.native, rt.view(dof_rows, (sizes.rows,), FLOAT32)
    rt.te.scaled_dswiglu(dact.native, saved.hidden.native, *of_rows, rt.stream)
    dprobs = _dprobs(rt, saved, dof_rows)
    dw1 = group.wgrad(rt, saved.rows, dhidden, fc1, code)
    dx = None
    if not x.stop_gradient:
        group.dgrad(rt, dhidden, rt.matrix(fc1, code), grad)  # whose numbers nobody needs any more
        dx = rt.empty(x.shape, x.dtype)
        _combine(rt, grad, routing_map, places, sizes, dx, code)
    dresidual = None if residual is None or residual.stop_gradient else dy
    return dx, dprobs, None, dw1, dw2, dresidual


def _dprobs(rt, saved, dof_rows):
    _, probs, routing_map, *_ = saved.inputs.tensors
    if probs.stop_gradient:
        return None
    dprobs = rt.empty(probs.shape, probs.dtype)
    given = dof_rows.data_ptr(), routing_map.data_ptr(), saved.places, dprobs.data_ptr(), saved.sizes
    experts.scatter_probs(rt.te, rt.stream, *given)
    return dprobs


_EXPERTS_MLP = Op(_forward, _backward, weights=(3, 4))


def experts_mlp(
    x,
    probs,
    routing_map,
    weights,
    *,
    topk,
    residual=None,
    activation="swiglu",
    recompute_activation=False,
    quantizers=(None, None),
    fuse_wgrad_accumulation=False,
):
    """Σ_e probs_e · (fc2_e(activate(fc1_e(x)))) (+ residual) for each token."""
    _check_supported(activation, weights.fc1_bias, weights.fc2_bias)
    _check_precision(quantizers[0])
    return autograd.apply(
        _EXPERTS_MLP,
        (x, probs, routing_map, weights.fc1_weight, weights.fc2_weight, residual),
        ExpertsSettings(topk, recompute_activation),
        quantizers=quantizers,
        fuse_wgrad_accumulation=fuse_wgrad_accumulation,
    )


def _check_supported(activation, *biases):
    """Layers have asked `check_experts` before, which takes longer."""
    bias = any(bias is not None for bias in biases)
    if bias or activation != "swiglu":
        check_experts(activation, bias)


def _check_precision(quantizers):
    if quantizers is not None:
        raise NotImplementedError("backend transformer_engine computes experts in 16 bits only; use backend paddle")


class GroupedSettings(NamedTuple):
    """experts: how many."""

    experts: int


def _linear_forward(rt, inputs, settings):
    x, weight, counts = inputs.tensors
    (count, out_features, in_features), code = weight.shape, dtype_code("x", x)
    check_tensor("x", x, [x.shape[0], in_features], x.dtype)
    check_tensor("weight", weight, weight.shape, x.dtype)
    if in_features % 8 or out_features % 8:
        raise ValueError(
            f"backend transformer_engine: {in_features} and {out_features} features, which must be multiples of 8"
        )
    offsets = rt.empty([2, count + 1], paddle.int64)
    begins = offsets.data_ptr(), offsets.data_ptr() + 8 * (count + 1)
    columns = in_features, out_features
    experts.offsets(rt.te, rt.stream, counts.data_ptr(), *begins, count, *columns)
    group = _Group(count, counts.data_ptr(), dict(zip(columns, begins, strict=True)))
    y = rt.empty([x.shape[0], out_features], x.dtype)
    matrix = rt.matrix(x, code)
    group.forward(rt, matrix, rt.matrix(weight, code), rt.matrix(y, code))
    return y, (x, weight, matrix, group, code)


def _linear_backward(rt, saved, dy):
    x, weight, matrix, group, code = saved
    grad, dx = rt.matrix(dy, code), None
    if not x.stop_gradient:
        dx = rt.empty(x.shape, x.dtype)
        group.dgrad(rt, grad, rt.matrix(weight, code), rt.matrix(dx, code))
    return dx, group.wgrad(rt, matrix, grad, weight, code), None


_GROUPED_LINEAR = Op(_linear_forward, _linear_backward, weights=(1,))


def grouped_linear(x, weight, counts, *, bias=None, quantizers=None, fuse_wgrad_accumulation=False):
    """Each expert's rows times its weightᵀ."""
    _check_supported("swiglu", bias)
    _check_precision(quantizers)
    if not isinstance(counts, paddle.Tensor):
        if sum(counts) != x.shape[0]:
            raise ValueError(f"the experts' rows, {counts}, do not sum up to the {x.shape[0]} rows of the input")
        counts = paddle.to_tensor(counts, "int64")
    given = (x, weight, counts), GroupedSettings(weight.shape[0])
    return autograd.apply(_GROUPED_LINEAR, *given, quantizers=(None,), fuse_wgrad_accumulation=fuse_wgrad_accumulation)
