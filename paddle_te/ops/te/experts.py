"""Experts on Transformer Engine's grouped GEMMs and our kernels: see `paddle_te.ops.moe`.

Only the device knows how many rows each expert has. Memory has room for the greatest possible number, and the GEMMs
read the numbers on the device. So the host never waits, and one recorded program serves all batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias, cast

import paddle
from paddle import Tensor

from paddle_te import native
from paddle_te.fp8 import BlockScaling, GemmQuantizers, TensorScaling
from paddle_te.native import BackendUnavailable, choice, experts
from paddle_te.native.errors import Problem
from paddle_te.native.experts import Rows
from paddle_te.native.library import cublas_version
from paddle_te.ops.activations import EXPERTS_FC1_WIDTHS
from paddle_te.ops.interface import QuantizersOfTwo
from paddle_te.ops.moe import ExpertWeights, check_counts
from paddle_te.ops.te import autograd, expert_bias, expert_low_rank, float8_experts, kernel_choice, runtime
from paddle_te.ops.te.recording import Op, OpInputs, Placeholder, RecordedQuantizer, RecordedQuantizers, Recorder
from paddle_te.ops.te.runtime import FLOAT32, Matrix, Runtime, check_tensor, dtype_code
from paddle_te.ops.te.scaled_activation import ACTIVATIONS

# from here on Hopper has grouped GEMMs, in fp8, and in fp8 with block scaling
CUBLAS, CUBLAS_FP8, CUBLAS_BLOCK = (13, 4), (13, 5), (13, 6)
HOPPER = 9  # elsewhere they take factors for each expert
FAULTY = (13, 7)  # where these corrupt data on newer GPUs
PIP = 'pip install "nvidia-cublas>=13.6.2,<13.7"'
REMEDY = (
    f"{PIP}; or keep it beside the other one: {PIP} --no-deps --target FOLDER, and start with "
    f"{choice.VARIABLE}=FOLDER/nvidia/cu13/lib"
)


def check_experts(activation: str = "swiglu") -> None:
    """Refuse what has no kernels, and libraries without grouped GEMMs."""
    native.load()
    version = cublas_version()
    problems: list[Problem] = []
    if not _has_grouped_gemms(version):
        problems.append(Problem(f"grouped GEMMs need cuBLAS 13.4 to 13.6, not {_present(version)}", REMEDY))
    capability = runtime.current().stream.capability
    if capability[0] != HOPPER:
        what = "grouped GEMMs are called as Hopper has them, not GPUs of compute capability {}.{}".format(*capability)
        problems.append(Problem(what, "use backend paddle"))
    if activation not in ACTIVATIONS:
        what = f"backend transformer_engine has no experts with activation {activation}"
        problems.append(Problem(what, "use backend paddle"))
    if problems:
        raise BackendUnavailable(problems)


def _has_grouped_gemms(version: tuple[int, ...]) -> bool:
    return CUBLAS <= version < FAULTY


def has_grouped_gemms(rt: Runtime) -> bool:
    """Say whether library and GPU have grouped GEMMs, as `check_experts` wants them."""
    return _has_grouped_gemms(cublas_version()) and rt.stream.capability[0] == HOPPER


def check_supported(activation: str) -> None:
    """Refuse an activation. Layers have asked `check_experts` before, which takes longer."""
    if activation not in ACTIVATIONS:
        check_experts(activation)


def _check_fp8(quantizers: GemmQuantizers | None) -> None:
    """Raise where there are no grouped GEMMs with such quantizers."""
    if quantizers is None:
        return
    in_blocks = quantizers.input.kind == "block"
    needed = CUBLAS_BLOCK if in_blocks else CUBLAS_FP8
    if cublas_version() < needed:
        kind = "fp8 with block scaling" if in_blocks else "fp8"
        what = "grouped GEMMs in {} need cuBLAS {}.{}".format(kind, *needed)
        raise BackendUnavailable([Problem(f"{what}, not {_present(cublas_version())}", REMEDY)])


def _present(version: tuple[int, ...]) -> str:
    """Return the version of the loaded cuBLAS, and its places."""
    places = native.report().get("cublasLt", {"paths": []})["paths"]
    return "{}.{}".format(*version) + (f" ({', '.join(places)})" if places else "")


@cache
def _factors(place: str, alpha: float, beta: float) -> Tensor:
    return paddle.to_tensor([alpha, 0, 0, 0, beta, 0, 0, 0], "float32")


def factors(alpha: float = 1.0, beta: float = 0.0) -> int:
    """Return where a grouped GEMM finds alpha and, 16 bytes behind it, beta on the present device."""
    return _factors(str(paddle.framework._current_expected_place()), alpha, beta).data_ptr()


# what a grouped GEMM reads
Grouped: TypeAlias = Matrix | float8_experts.Operand | float8_experts.BlockOperand | float8_experts.StoredOperand


class Group(NamedTuple):
    """The rows of all experts.

    experts: number of experts. rows: number of rows that memory has room for. counts: address of each expert's number
    of rows. begins: {columns: address of the places where experts' rows begin in a matrix with so many columns}.
    """

    experts: int
    rows: int
    counts: int
    begins: dict[int, int]

    def _gemm(
        self,
        rt: Recorder,
        a: Grouped,
        b: Grouped,
        d: Matrix,
        transa: bool,
        transb: bool,
        accumulate: bool,
        backward: bool,
    ) -> None:
        offsets = [self.begins.get(matrix.shape[1], 0) for matrix in (a, b, d)]  # not read for weights
        exact = backward or isinstance(a, float8_experts.BlockOperand)
        of_sum = factors(beta=float(accumulate))
        given = transa, transb, self.experts, self.counts, *offsets, of_sum, rt.stream, accumulate, exact
        rt.te.grouped_gemm(a.native, b.native, d.native, *given, *map(float8_experts.scale_inv, (a, b)))

    def forward(self, rt: Recorder, x: Grouped, weight: Grouped, y: Matrix, accumulate: bool = False) -> None:
        """Compute y (+)= x · weightᵀ; weight [E · out, in]."""
        self._gemm(rt, weight, x, y, True, False, accumulate, False)

    def dgrad(self, rt: Recorder, dy: Grouped, weight: Grouped, dx: Matrix, accumulate: bool = False) -> None:
        """Compute dx (+)= dy · weight."""
        self._gemm(rt, weight, dy, dx, False, False, accumulate, True)

    def wgrad(self, rt: Recorder, x: Grouped, dy: Grouped, weight: Placeholder, code: int) -> Placeholder | None:
        """Return weight's gradient, or None where it is put into or added to its main_grad."""
        if weight.stop_gradient:
            return None
        main_grad, (_, out, in_) = weight.main_grad, weight.shape
        fused, code = main_grad is not None, code if main_grad is None else FLOAT32
        dw = rt.empty(weight.shape, weight.dtype) if main_grad is None else main_grad
        accumulate = fused and bool(weight.accumulate)
        self._gemm(rt, x, dy, rt.matrix(dw, code), False, True, accumulate, True)
        if not accumulate:  # GEMMs over no rows write nothing
            size = out * in_ * (4 if fused else 2)
            experts.zero_empty(rt.te, rt.stream, dw.data_ptr(), self.counts, self.experts, size)
        return None if fused else dw

    def of_rows(self, matrix: Matrix) -> Rows:
        """Return the experts.Rows of a Matrix that has these."""
        rows, columns = matrix.shape
        given = matrix.memory.data_ptr(), 0, self.begins[columns], rows
        return experts.Rows(*given, self.experts, self.rows, columns, self.counts)


class ExpertsSettings(NamedTuple):
    """topk: the greatest number of a token's experts. recompute: whether backward computes the activation again.

    activation: one of ACTIVATIONS. pairs: as `MoEOps.experts_mlp` has them.
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
        """The rows of x [tokens, columns], a tensor, as GEMMs read them: a Matrix, or under a quantizer an Operand.
        transposes: whether a GEMM sums over them."""
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


def _multiple(quantizers: RecordedQuantizers | None, otherwise: int) -> int:
    """Return what divides dimensions of GEMMs in fp8; without fp8 `otherwise`."""
    if quantizers is None:
        return otherwise
    return cast(TensorScaling | BlockScaling, quantizers.input.scaling).multiple


def _dtype_of_weight(quantizers: RecordedQuantizers | None, x: Placeholder) -> Any:
    """Return the dtype of a weight beside x: of bytes where it exists in fp8 only."""
    return paddle.uint8 if quantizers is not None and quantizers.weight.kind == "stored" else x.dtype


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
        check_tensor(name, weight, [count, *shape], _dtype_of_weight(q, x))
    for name, bias, columns in zip(("fc1_bias", "fc2_bias"), biases, (fc1_rows, hidden), strict=True):
        if bias is not None:
            check_tensor(name, bias, [count, columns], x.dtype)
    if routing_map.dtype is not paddle.bool or list(routing_map.shape) != [tokens, count]:
        raise TypeError(f"routing_map is {routing_map.dtype} {routing_map.shape}; it must be bool {[tokens, count]}")
    multiple = _multiple(inputs.quantizers[0], 8)
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
    multiple = _multiple(first, 1)
    room = experts.most_rows(tokens, count, settings.topk, multiple, settings.pairs)
    sizes = experts.Sizes(tokens, count, room, multiple)
    placed = _Placed.of(rt, probs, routing_map, sizes, (hidden_size, fc1_rows, ffn), x, settings.activation)
    group, code, (low1, low2) = placed.group, placed.code, _low_ranks(inputs)
    expert_low_rank.find_begins(rt, group, low1, low2)
    w1, w2 = (_weight(rt, fc, q, code, train) for fc, q in ((fc1, first), (fc2, second)))
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


def _weight(
    rt: Recorder, weight: Placeholder, quantizers: RecordedQuantizers | None, code: int, train: bool
) -> Grouped:
    """Return a weight [E, out, in] as GEMMs read it."""
    if quantizers is None:
        return rt.matrix(weight, code)
    return float8_experts.quantized_weight(rt, weight, quantizers, code, train)


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
    return dact, None if act is None else group.wgrad(rt, act, grad, fc2, placed.code), dlow


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
    dw1 = group.wgrad(rt, saved.rows, grad, fc1, placed.code)
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
    probs: Tensor,
    routing_map: Tensor,
    weights: ExpertWeights,
    *,
    topk: int,
    pairs: int | None = None,
    residual: Tensor | None = None,
    activation: str = "swiglu",
    recompute_activation: bool = False,
    quantizers: QuantizersOfTwo = (None, None),
    fuse_wgrad_accumulation: bool = False,
) -> Tensor:
    """Return Σ_e probs_e · (fc2_e(activate(fc1_e(x)))) (+ residual) for each token."""
    check_supported(activation)
    _check_fp8(quantizers[0])
    fc1, fc2, fc1_bias, fc2_bias, *low_ranks = weights
    factors = [tensor for low_rank in low_ranks for tensor in low_rank or (None, None)]
    return autograd.apply(
        _EXPERTS_MLP,
        (x, probs, routing_map, fc1, fc2, residual, fc1_bias, fc2_bias, *factors),
        ExpertsSettings(topk, recompute_activation, activation, pairs),
        quantizers=quantizers,
        fuse_wgrad_accumulation=fuse_wgrad_accumulation,
    )


class _SavedLinear(NamedTuple):
    """Hold what backward reads. rows, w: as the GEMM read them. operand: makes a GEMM's operand of rows."""

    inputs: OpInputs
    rows: Grouped
    w: Grouped
    group: Group
    operand: Callable[[Placeholder, RecordedQuantizer | None], Grouped]


def _linear_forward(rt: Recorder, inputs: OpInputs, _: None) -> tuple[Placeholder, _SavedLinear]:
    (x, weight, counts, bias), (quantizers,) = inputs.tensors, inputs.quantizers
    (count, out_features, in_features), code = weight.shape, dtype_code("x", x)
    check_tensor("x", x, [x.shape[0], in_features], x.dtype)
    check_tensor("weight", weight, weight.shape, _dtype_of_weight(quantizers, x))
    if bias is not None:
        check_tensor("bias", bias, [count, out_features], x.dtype)
    if counts.dtype is not paddle.int64 or list(counts.shape) != [count]:
        raise TypeError(f"the experts' rows are {counts.dtype} {counts.shape}; they must be int64 {[count]}")
    multiple = _multiple(quantizers, 8)
    if in_features % multiple or out_features % multiple:
        raise ValueError(
            f"backend transformer_engine: in_features {in_features} and out_features {out_features} must be multiples "
            f"of {multiple}"
        )
    offsets, columns = rt.empty([2, count + 1], paddle.int64), (in_features, out_features)
    begins = offsets.data_ptr(), offsets.data_ptr() + 8 * (count + 1)
    experts.offsets(rt.te, rt.stream, counts.data_ptr(), *begins, count, *columns)
    group = Group(count, x.shape[0], counts.data_ptr(), dict(zip(columns, begins, strict=True)))
    operand = partial(_operand, rt, group, code)
    rows, w = (
        operand(x, None if quantizers is None else quantizers.input),
        _weight(rt, weight, quantizers, code, inputs.train),
    )
    y = rt.empty([x.shape[0], out_features], x.dtype)
    group.forward(rt, rows, w, out := rt.matrix(y, code))
    expert_bias.add(rt, group.of_rows(out), bias, code)
    if inputs.train:
        float8_experts.drop_data(rt, rows, w)
    return y, _SavedLinear(inputs, rows, w, group, operand)


def _operand(rt: Recorder, group: Group, code: int, x: Placeholder, quantizer: RecordedQuantizer | None) -> Grouped:
    """Return rows, a tensor, as GEMMs read them."""
    matrix = rt.matrix(x, code)
    if quantizer is None:
        return matrix
    return float8_experts.quantized(rt, group.of_rows(matrix), quantizer, code, True)


def _linear_backward(rt: Recorder, saved: _SavedLinear, dy: Placeholder) -> tuple[Placeholder | None, ...]:
    inputs, rows, w, group, operand = saved
    (x, weight, _, bias), (quantizers,) = inputs.tensors, inputs.quantizers
    grad, code, dx = operand(dy, None if quantizers is None else quantizers.grad_output), dtype_code("x", x), None
    if not x.stop_gradient:
        dx = rt.empty(x.shape, x.dtype)
        group.dgrad(rt, grad, float8_experts.for_backward(rt, w), rt.matrix(dx, code))
    dbias = expert_bias.gradient(rt, group.of_rows(rt.matrix(dy, code)), bias, code)
    return dx, group.wgrad(rt, rows, grad, weight, code), None, dbias


_GROUPED_LINEAR = Op(_linear_forward, _linear_backward, weights=(1,))


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    counts: Sequence[int] | Tensor,
    *,
    bias: Tensor | None = None,
    quantizers: GemmQuantizers | None = None,
    fuse_wgrad_accumulation: bool = False,
) -> Tensor:
    """Return each expert's rows times its weightᵀ. What is behind the rows that `counts` tells of is not written."""
    _check_fp8(quantizers)
    if not isinstance(counts, paddle.Tensor):
        check_counts(counts, x.shape[0], quantizers)
        counts = paddle.to_tensor(counts, "int64")
    return autograd.apply(
        _GROUPED_LINEAR,
        (x, weight, counts, bias),
        quantizers=(quantizers,),
        fuse_wgrad_accumulation=fuse_wgrad_accumulation,
    )
