"""The experts' half of a layer on Transformer Engine's grouped GEMMs and our kernels: see `paddle_te.ops.moe`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import paddle
from paddle import Tensor

from paddle_te.native import experts
from paddle_te.ops.activations import EXPERTS_FC1_WIDTHS
from paddle_te.ops.moe import GroupedProjection, Routed
from paddle_te.ops.te import autograd, expert_bias, expert_low_rank, float8_experts, kernel_choice
from paddle_te.ops.te.grouped_gemms import (
    Group,
    Grouped,
    check_fp8,
    check_supported,
    dtype_of_weight,
    grouped_weight,
    multiple_of,
)
from paddle_te.ops.te.recording import Op, OpInputs, Placeholder, RecordedQuantizer, Recorder
from paddle_te.ops.te.runtime import Matrix, check_tensor, dtype_code
from paddle_te.ops.te.scaled_activation import ACTIVATIONS


class ExpertsSettings(NamedTuple):
    """topk: the greatest number of a token's experts. recompute: whether backward computes the activation again.

    activation: one of ACTIVATIONS. pairs: as `Routed` has them.
    """

    topk: int
    recompute: bool
    activation: str
    pairs: int | None


class _Placed(NamedTuple):
    """Where the rows of tokens are. routing_map: a Placeholder. code, dtype: of x. function: one of ACTIVATIONS."""

    routing_map: Any
    sizes: experts.Sizes
    places: experts.Places
    group: Group
    code: int
    dtype: Any
    function: str

    @classmethod
    def of(
        cls,
        rt: Recorder,
        probs: Placeholder,
        routing_map: Placeholder,
        sizes: experts.Sizes,
        columns: Sequence[int],
        x: Placeholder,
        function: str,
    ) -> _Placed:
        """Place the rows. columns: of x, fc1's output and fc2's input."""
        count, code = sizes.experts, dtype_code("x", x)
        counts, offsets = rt.empty([count], paddle.int64), rt.empty([len(columns), count + 1], paddle.int64)
        place = rt.empty([sizes.tokens, count], paddle.int32)
        token_of, prob_of = rt.empty([sizes.rows], paddle.int32), rt.empty([sizes.rows], paddle.float32)
        places = experts.Places(*[memory.data_ptr() for memory in (counts, offsets, place, token_of, prob_of)])
        experts.place(rt.te, rt.stream, routing_map.data_ptr(), probs.data_ptr(), places, sizes, columns)
        begins = [places.offsets + 8 * (count + 1) * i for i in range(len(columns))]
        group = Group(count, sizes.rows, places.counts, dict(zip(columns, begins, strict=True)))
        return cls(routing_map, sizes, places, group, code, x.dtype, function)

    def of_tokens(self, x: Placeholder) -> experts.Rows:
        """Return the experts.Rows of x [tokens, columns], a tensor."""
        columns, group = x.shape[-1], self.group
        given = x.data_ptr(), self.places.token_of, group.begins[columns], self.sizes.tokens
        return experts.Rows(*given, group.experts, group.rows, columns, group.counts)

    def new(self, rt: Recorder, columns: int) -> Matrix:
        """Return a Matrix of the rows, uninitialised."""
        return rt.new_matrix((self.sizes.rows, columns), self.dtype, self.code)

    def gathered(self, rt: Recorder, x: Placeholder, quantizer: RecordedQuantizer | None, transposes: bool) -> Grouped:
        """Return the rows of x [tokens, columns], a tensor, as GEMMs read them.

        A Matrix, or under a quantizer an Operand. transposes: whether a GEMM sums over them.
        """
        if quantizer is not None:
            return float8_experts.quantized(rt, self.of_tokens(x), quantizer, self.code, transposes)
        rows = self.new(rt, x.shape[-1])
        experts.gather(rt.te, rt.stream, self.of_tokens(x), rows.memory.data_ptr(), self.code)
        return rows

    def in_16_bits(self, rt: Recorder, rows: Grouped, x: Placeholder) -> Matrix:
        """Return `gathered` rows of x that no quantizer has been at: these, or gathered again."""
        return rows if isinstance(rows, Matrix) else cast(Matrix, self.gathered(rt, x, None, False))

    def operand(self, rt: Recorder, matrix: Matrix, quantizer: RecordedQuantizer | None, transposes: bool) -> Grouped:
        """Return a Matrix of rows as GEMMs read it."""
        if quantizer is None:
            return matrix
        return float8_experts.quantized(rt, self.group.of_rows(matrix), quantizer, self.code, transposes)

    def combined(
        self, rt: Recorder, rows: Matrix, out: Placeholder, residual: Placeholder | None = None
    ) -> Placeholder:
        """Compute out, a tensor, = residual, if any, + the sum of each token's rows."""
        added = 0 if residual is None else residual.data_ptr()
        given = rows.memory.data_ptr(), self.routing_map.data_ptr(), self.places, added, out.data_ptr()
        experts.combine(rt.te, rt.stream, *given, self.sizes, rows.shape[1], self.code)
        return out

    def activated(self, rt: Recorder, hidden: Matrix) -> Matrix:
        """Return the activation of fc1's output times the rows' probabilities."""
        act = self.new(rt, self.columns(hidden))
        ACTIVATIONS[self.function].activate(rt, hidden, self.places.prob_of, act, self.code)
        return act

    def columns(self, hidden: Matrix) -> int:
        """Return those of the activation of fc1's output."""
        return hidden.shape[1] // EXPERTS_FC1_WIDTHS[self.function]

    def casts_in_passing(self, hidden: Matrix, quantizer: RecordedQuantizer | None) -> bool:
        """Say whether one kernel computes the activation of `hidden`, or its gradient, and casts it."""
        given = self.function, self.columns(hidden), self.code
        return quantizer is not None and kernel_choice.experts_swiglu(quantizer, *given)

    def activation(
        self,
        rt: Recorder,
        hidden: Matrix,
        activated: Matrix | None,
        quantizer: RecordedQuantizer | None,
        transposes: bool,
    ) -> Grouped:
        """Return `activated` as GEMMs read it; None where that is cast in passing."""
        if activated is not None or quantizer is None:
            return self.operand(rt, activated or self.activated(rt, hidden), quantizer, transposes)
        return float8_experts.activated(rt, self.activation_input(hidden), quantizer, transposes)

    def activation_input(self, hidden: Matrix) -> float8_experts.ActivationInput:
        """Return fc1's output for the kernels that cast in passing."""
        ffn, group, rows = self.columns(hidden), self.group, self.sizes.rows
        given = hidden.memory.data_ptr(), 0, group.begins[ffn], rows, group.experts, rows, ffn, group.counts
        return float8_experts.ActivationInput(experts.Rows(*given), self.places.prob_of, self.code)


class _Saved(NamedTuple):
    """Hold what backward reads.

    rows: of x, as fc1's GEMM read them. w1, w2: as the GEMMs read them. act: fc2's input; None where it is computed
    again. low_ranks: the Factors beside each GEMM, or None; z: the products x · aᵀ between them.
    """

    inputs: OpInputs
    placed: _Placed
    rows: Grouped
    w1: Grouped
    w2: Grouped
    hidden: Matrix
    act: Grouped | None
    low_ranks: tuple[expert_low_rank.Factors | None, expert_low_rank.Factors | None]
    z: tuple[Matrix | None, Matrix | None]


def _check(inputs: OpInputs, activation: str) -> tuple[int, int]:
    """Return (columns of fc1's output, of fc2's input)."""
    x, probs, routing_map, fc1, fc2, residual, *biases = inputs.tensors[:_LOW_RANK]
    (tokens, hidden), count, ffn = x.shape, fc1.shape[0], fc2.shape[2]
    fc1_rows = EXPERTS_FC1_WIDTHS[activation] * ffn
    check_tensor("probs", probs, [tokens, count], paddle.float32)
    if residual is not None:
        check_tensor("residual", residual, x.shape, x.dtype)
    for name, weight, shape, q in zip(
        ("fc1_weight", "fc2_weight"), (fc1, fc2), ([fc1_rows, hidden], [hidden, ffn]), inputs.quantizers, strict=True
    ):
        check_tensor(name, weight, [count, *shape], dtype_of_weight(q, x))
    for name, bias, columns in zip(("fc1_bias", "fc2_bias"), biases, (fc1_rows, hidden), strict=True):
        if bias is not None:
            check_tensor(name, bias, [count, columns], x.dtype)
    if routing_map.dtype is not paddle.bool or list(routing_map.shape) != [tokens, count]:
        raise TypeError(f"routing_map is {routing_map.dtype} {routing_map.shape}; it must be bool {[tokens, count]}")
    multiple = multiple_of(inputs.quantizers[0], 8)
    if hidden % multiple or ffn % multiple:
        raise ValueError(
            f"backend transformer_engine: hidden_size {hidden} and moe_ffn_hidden_size {ffn} must be multiples of "
            f"{multiple}"
        )
    return fc1_rows, ffn


def _forward(rt: Recorder, inputs: OpInputs, settings: ExpertsSettings) -> tuple[Placeholder, _Saved]:
    x, probs, routing_map, fc1, fc2, residual, fc1_bias, fc2_bias = inputs.tensors[:_LOW_RANK]
    (first, second), train = inputs.quantizers, inputs.train
    (fc1_rows, ffn), (tokens, hidden_size), count = _check(inputs, settings.activation), x.shape, fc1.shape[0]
    multiple = multiple_of(first, 1)
    room = experts.most_rows(tokens, count, settings.topk, multiple, settings.pairs)
    sizes = experts.Sizes(tokens, count, room, multiple)
    placed = _Placed.of(rt, probs, routing_map, sizes, (hidden_size, fc1_rows, ffn), x, settings.activation)
    group, code, (low1, low2) = placed.group, placed.code, _low_ranks(inputs)
    expert_low_rank.find_begins(rt, group, low1, low2)
    w1, w2 = (grouped_weight(rt, fc, q, code, train) for fc, q in ((fc1, first), (fc2, second)))
    rows = placed.gathered(rt, x, None if first is None else first.input, train and not fc1.stop_gradient)
    group.forward(rt, rows, w1, hidden := placed.new(rt, fc1_rows))
    z1 = None if low1 is None else expert_low_rank.add(rt, group, placed.in_16_bits(rt, rows, x), low1, hidden, code)
    expert_bias.add(rt, group.of_rows(hidden), fc1_bias, code)
    keeps = train and not fc2.stop_gradient and not settings.recompute
    quantizer = None if second is None else second.input
    in_passing = low2 is None and placed.casts_in_passing(hidden, quantizer)
    activated = None if in_passing else placed.activated(rt, hidden)
    act = placed.activation(rt, hidden, activated, quantizer, keeps)
    group.forward(rt, act, w2, y := placed.new(rt, hidden_size))
    z2 = None if activated is None else expert_low_rank.add(rt, group, activated, low2, y, code)
    expert_bias.add(rt, group.of_rows(y), fc2_bias, code, placed.places.prob_of)
    out = placed.combined(rt, y, rt.empty(x.shape, x.dtype), residual)
    if train:
        float8_experts.drop_data(rt, rows, act, w1, w2)
    kept = None if settings.recompute else act
    return out, _Saved(inputs, placed, rows, w1, w2, hidden, kept, (low1, low2), (z1, z2))


def _low_ranks(inputs: OpInputs) -> tuple[expert_low_rank.Factors | None, expert_low_rank.Factors | None]:
    """Return (Factors beside fc1's weight, beside fc2's), each None without LoRA."""
    fc1, fc2, (a1, b1, a2, b2) = *inputs.tensors[3:5], inputs.tensors[_LOW_RANK:]
    return expert_low_rank.factors("fc1", a1, b1, fc1), expert_low_rank.factors("fc2", a2, b2, fc2)


def _backward(rt: Recorder, saved: _Saved, dy: Placeholder) -> tuple[Placeholder | None, ...]:
    x, probs, _, _, _, residual, fc1_bias, fc2_bias = saved.inputs.tensors[:_LOW_RANK]
    placed, group = saved.placed, saved.placed.group
    dact, dw2, dlow2 = _through_fc2(rt, saved, dy)
    grad, dhidden, dof_rows = _through_activation(rt, saved, dact)
    of_dy = placed.of_tokens(dy)
    dfc2_bias = expert_bias.gradient(rt, of_dy, fc2_bias, placed.code, placed.places.prob_of)
    expert_bias.add_to_probs(rt, of_dy, fc2_bias, dof_rows, placed.code)
    dfc1_bias = None
    if dhidden is not None:
        dfc1_bias = expert_bias.gradient(rt, group.of_rows(dhidden), fc1_bias, placed.code)
    dprobs = _dprobs(rt, placed, probs, dof_rows)
    drows, dw1, dlow1 = _through_fc1(rt, saved, grad, dhidden)
    dx = None if drows is None else placed.combined(rt, drows, rt.empty(x.shape, x.dtype))
    dresidual = None if residual is None or residual.stop_gradient else dy
    return dx, dprobs, None, dw1, dw2, dresidual, dfc1_bias, dfc2_bias, *dlow1, *dlow2


def _through_fc2(
    rt: Recorder, saved: _Saved, dy: Placeholder
) -> tuple[Matrix, Placeholder | None, expert_low_rank.Gradients]:
    """Return (the activation's gradient, fc2's weight's, Gradients of its factors)."""
    fc2, placed, group, second = saved.inputs.tensors[4], saved.placed, saved.placed.group, saved.inputs.quantizers[1]
    low_rank, dlow, activated = saved.low_ranks[1], expert_low_rank.Gradients(), None
    of_act = None if second is None else second.input
    grad = placed.gathered(rt, dy, None if second is None else second.grad_output, not fc2.stop_gradient)
    group.dgrad(rt, grad, float8_experts.for_backward(rt, saved.w2), dact := placed.new(rt, fc2.shape[2]))
    act, trains, z = saved.act, not fc2.stop_gradient, saved.z[1]
    again = act is None and trains
    if low_rank is not None and (second is not None or act is None):
        activated = placed.activated(rt, saved.hidden)
    elif again and not placed.casts_in_passing(saved.hidden, of_act):
        activated = placed.activated(rt, saved.hidden)
    if again:
        act = placed.activation(rt, saved.hidden, activated, of_act, True)
    if low_rank is not None and z is not None:
        of_rows = cast(Matrix, act) if activated is None else activated  # in 16 bits, as no quantizer has been at it
        given = z, of_rows, low_rank, placed.in_16_bits(rt, grad, dy)
        dlow = expert_low_rank.gradients(rt, group, *given, dact, placed.code)
    return dact, None if act is None else group.wgrad(rt, act, grad, fc2), dlow


def _through_activation(rt: Recorder, saved: _Saved, dact: Matrix) -> tuple[Grouped, Matrix | None, Placeholder]:
    """Return (the gradient of fc1's output as GEMMs read it, in 16 bits or None, that of the rows' probabilities)."""
    fc1, fc1_bias, placed, first = *saved.inputs.tensors[3:7:3], saved.placed, saved.inputs.quantizers[0]
    quantizer, trains, rows = None if first is None else first.grad_output, not fc1.stop_gradient, placed.sizes.rows
    dof_rows = rt.empty([rows], paddle.float32)
    in_16_bits = saved.low_ranks[0] is not None or fc1_bias is not None
    if quantizer is None or in_16_bits or not placed.casts_in_passing(saved.hidden, quantizer):
        dhidden = placed.new(rt, fc1.shape[1])
        given = saved.hidden, placed.places.prob_of, dhidden, dof_rows.data_ptr(), placed.code
        ACTIVATIONS[placed.function].gradient(rt, dact, *given)
        return placed.operand(rt, dhidden, quantizer, trains), dhidden, dof_rows
    columns = experts.shares_of_row(dact.shape[1], placed.code)
    shares, of_dact = rt.empty([rows, columns], paddle.float32), dact.memory.data_ptr()
    source = placed.activation_input(saved.hidden)
    grad = float8_experts.activated(rt, source, quantizer, trains, of_dact, shares.data_ptr())
    experts.row_sums(rt.te, rt.stream, shares.data_ptr(), dof_rows.data_ptr(), rows, columns)
    return grad, None, dof_rows


def _through_fc1(
    rt: Recorder, saved: _Saved, grad: Grouped, dhidden: Matrix | None
) -> tuple[Matrix | None, Placeholder | None, expert_low_rank.Gradients]:
    """Return (the rows' gradient or None, fc1's weight's, Gradients of its factors)."""
    (x, _, _, fc1, *_), placed = saved.inputs.tensors, saved.placed
    group, low_rank, dlow, drows = placed.group, saved.low_ranks[0], expert_low_rank.Gradients(), None
    dw1 = group.wgrad(rt, saved.rows, grad, fc1)
    if not x.stop_gradient:
        group.dgrad(rt, grad, float8_experts.for_backward(rt, saved.w1), drows := placed.new(rt, x.shape[1]))
    z = saved.z[0]
    if low_rank is not None and z is not None and dhidden is not None:
        given = z, placed.in_16_bits(rt, saved.rows, x), low_rank, dhidden
        dlow = expert_low_rank.gradients(rt, group, *given, drows, placed.code)
    return drows, dw1, dlow


def _dprobs(rt: Recorder, placed: _Placed, probs: Placeholder, dof_rows: Placeholder) -> Placeholder | None:
    if probs.stop_gradient:
        return None
    dprobs = rt.empty(probs.shape, probs.dtype)
    given = dof_rows.data_ptr(), placed.routing_map.data_ptr(), placed.places, dprobs.data_ptr(), placed.sizes
    experts.scatter_probs(rt.te, rt.stream, *given)
    return dprobs


_LOW_RANK = 8  # the tensors before the factors of LoRA
_EXPERTS_MLP = Op(_forward, _backward, weights=(3, 4))


def experts_mlp(
    x: Tensor,
    routed: Routed,
    fc1: GroupedProjection,
    fc2: GroupedProjection,
    *,
    residual: Tensor | None = None,
    activation: str = "swiglu",
    recompute_activation: bool = False,
) -> Tensor:
    """Return Σ_e probs_e · (fc2_e(activate(fc1_e(x)))) (+ residual) for each token."""
    check_supported(activation)
    (weight1, bias1, first, fuse1, low1), (weight2, bias2, second, fuse2, low2) = fc1, fc2
    check_fp8(first)
    probs, routing_map, topk, pairs = routed
    none = None, None
    return autograd.apply(
        _EXPERTS_MLP,
        (x, probs, routing_map, weight1, weight2, residual, bias1, bias2, *(low1 or none), *(low2 or none)),
        ExpertsSettings(topk, recompute_activation, activation, pairs),
        quantizers=(first, second),
        fuse_wgrad_accumulation=(fuse1, fuse2),
    )
