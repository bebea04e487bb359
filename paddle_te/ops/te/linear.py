"""GEMMs, alone and behind a norm, as Ops: see paddle_te.ops.te.recording and `gemm`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import paddle
from paddle import Tensor

from paddle_te.ops.interface import Ranks
from paddle_te.ops.norms import Norm, norm_tensors
from paddle_te.ops.projection import Projection
from paddle_te.ops.te import autograd, runtime
from paddle_te.ops.te.gemm import (
    Addends,
    BiasGradient,
    Gemm,
    SavedColumn,
    check_bias,
    check_fp8,
    check_weight,
    column_forward,
    dgrad,
    drop_data,
    drop_transpose,
    forward_operands,
    gathers,
    grad_output,
    grad_output_and_dgrad,
    normed_in_both,
    product_of,
    row_count,
    row_output,
    wgrad,
)
from paddle_te.ops.te.low_rank import LowRankProduct, LowRankSettings
from paddle_te.ops.te.norm import Gradients, Normed, NormSettings, Unnormed, normed
from paddle_te.ops.te.quantized import Float8Matrix, Operand
from paddle_te.ops.te.rank_rows import Product, multiply_while_gathering
from paddle_te.ops.te.recording import Op, OpInputs, Placeholder, RecordedRanks, Recorder
from paddle_te.ops.te.runtime import FLOAT32, Matrix, check_tensor, dense, dtype_code

Wanted: TypeAlias = Placeholder | None  # a gradient, None where none is wanted
Pending: TypeAlias = tuple[Matrix, Matrix] | None  # what LowRankProduct.factor_gradients takes


class LinearSettings(NamedTuple):
    """parallel_mode: "column", "row" or None. transpose_y: the weight is [out, in]."""

    parallel_mode: str | None
    transpose_y: bool = True


COLUMN, ROW = LinearSettings("column"), LinearSettings("row")


@dataclass(slots=True)
class _SavedLinear:
    """Hold what the backward of `linear_forward` reads.

    x, residual: as forward was given them. whole: the shape of x with the rows of all ranks. operand, w: x and the
    weight as the GEMM read them. gemm: its tp are `row`. code: x's dtype for TE. column, row: the ranks, if the GEMM is
    parallel that way.
    """

    x: Placeholder
    whole: list[int]
    operand: Operand
    w: Operand
    gemm: Gemm
    residual: Placeholder | None
    code: int
    column: RecordedRanks | None
    row: RecordedRanks | None
    transpose_y: bool


def _linear_forward(rt: Recorder, inputs: OpInputs, settings: LinearSettings) -> tuple[Placeholder, _SavedLinear]:
    x, _, _, residual = inputs.tensors
    return linear_forward(rt, x, Gemm.of(inputs, 0, 1), residual, settings)


def linear_forward(
    rt: Recorder,
    x: Placeholder,
    gemm: Gemm,
    residual: Placeholder | None,
    settings: LinearSettings,
    quantized: Float8Matrix | None = None,
    copy: Placeholder | None = None,
) -> tuple[Placeholder, _SavedLinear]:
    """Compute (the output of `linear`, _SavedLinear).

    quantized: x in fp8, where that is made before. copy: a copy of the residual in which the output is to be, where
    that is made before.
    """
    (weight, bias, quantizers, tp, train, _), (parallel_mode, transpose_y), code = gemm, settings, dtype_code("x", x)
    out_features, in_features = weight.shape[0 if transpose_y else 1], x.shape[-1]
    expected = [out_features, in_features] if transpose_y else [in_features, out_features]
    check_weight("weight", weight, expected, x.dtype, quantizers)
    check_bias("bias", bias, out_features, x.dtype)
    if bias is not None and not transpose_y:
        raise ValueError("backend transformer_engine: cuBLAS sums a bias's gradient beside weights [out, in] alone")
    check_fp8(quantizers, tokens=row_count(x), in_features=in_features, out_features=out_features)
    column, row = (tp if parallel_mode == mode else None for mode in ("column", "row"))
    gather = gathers(column)
    whole = gather.gathered_shape(x.shape) if gather else x.shape
    shape = [*whole[:-1], out_features] if row is None else row.output_shape([*whole[:-1], out_features])
    if residual is not None:
        check_tensor("residual", residual, shape, x.dtype)
    rows = x
    if gather and quantizers is not None:  # the rows of all ranks are cast together
        rows, gather = gather.all_gather(x), None
    operand, w = forward_operands(rt, quantized or rt.matrix(rows, code), gemm, code, transpose_y)
    out, addends = copy or rt.empty(shape, x.dtype), Addends(bias, residual, copied=copy is not None)
    if gather:
        operand = multiply_while_gathering(rt, operand, gather, product_of(rt, w, out, code, addends, transpose_y))
    else:
        out = row_output(rt, operand, w, out, code, row, addends, transpose_y)
    if train:
        drop_data(rt, operand)
        (drop_data if transpose_y else drop_transpose)(rt, w)
    gemm = gemm._replace(tp=row)
    return out, _SavedLinear(x, whole, operand, w, gemm, residual, code, column, row, transpose_y)


def linear_backward(
    rt: Recorder, saved: _SavedLinear, dy: Placeholder, grad: Operand | None = None
) -> tuple[Wanted, Wanted, Wanted, Wanted]:
    """Compute (dx, dW, dbias, the residual's gradient).

    grad: dy as the backward GEMMs read it, where that is made before.
    """
    x, gemm, code, residual, column = saved.x, saved.gemm, saved.code, saved.residual, saved.column
    fp8, transpose_y = gemm.quantizers is not None, saved.transpose_y
    dbias = BiasGradient.wanted(rt, gemm.bias, gemm.weight, fp8)
    dx = None if x.stop_gradient else rt.empty(saved.whole, x.dtype)
    product = None if dx is None else Product(dgrad(rt, saved.w, fp8, transpose_y), rt.matrix(dx, code))
    if grad is None:
        grad = grad_output_and_dgrad(rt, dy, gemm, code, dbias, product)
    elif product:
        product.of(grad)
    summing = None if dx is None or column is None else column.start_reduce_output(dx)
    operands = (saved.operand, grad) if transpose_y else (grad, saved.operand)
    dw = wgrad(rt, *operands, gemm.weight, code, fp8, dbias)
    if column is not None and summing is not None:
        dx = column.finish(summing)
    dresidual = None if residual is None or residual.stop_gradient else dy
    return dx, dw, None if dbias is None else dbias.in_its_dtype(rt), dresidual


class LowRankLinearSettings(NamedTuple):
    linear: LinearSettings
    low_rank: LowRankSettings


class RecordedLowRank(NamedTuple):
    """Hold the `LowRankUpdate` beside a recorded GEMM. Its tensors are Placeholders.

    settings: None where there is no product. factors: all A, then all B. dropped: the product's input after dropout;
    None: the GEMM's input.
    """

    settings: LowRankSettings | None
    factors: Sequence[Placeholder | None]
    dropped: Placeholder | None = None


@dataclass(slots=True)
class SavedLowRankLinear:
    """Hold the tensors that the backward of `low_rank_linear_forward` reads.

    product: the low-rank product, None without LoRA. dropped: the product's input after dropout; None: x.
    """

    linear: _SavedLinear
    product: LowRankProduct | None
    dropped: Placeholder | None

    def backward(
        self, rt: Recorder, dy: Placeholder, grad: Operand | None = None
    ) -> tuple[tuple[Wanted, Wanted, Wanted, Wanted], Wanted, Pending]:
        """Compute linear's gradients, the gradient of `dropped`, and what `factor_gradients` takes.

        linear's: (dx, dW, dbias, the residual's gradient). grad: `linear_backward`'s.
        """
        of_linear = linear_backward(rt, self.linear, dy, grad)
        if self.product is None:
            return of_linear, None, None
        if self.dropped is None:
            return of_linear, None, self.product.input_gradient(rt, dy, of_linear[0], accumulate=True)
        ddropped = None if self.dropped.stop_gradient else rt.empty(self.dropped.shape, self.dropped.dtype)
        return of_linear, ddropped, self.product.input_gradient(rt, dy, ddropped)

    def factor_gradients(self, rt: Recorder, pending: Pending, x: Placeholder | None = None) -> Sequence[Wanted]:
        """Return those of all A, then of all B.

        pending: `backward`'s. x: as LowRankProduct's.
        """
        return () if self.product is None or pending is None else self.product.factor_gradients(rt, *pending, x)


def low_rank_linear_forward(
    rt: Recorder,
    x: Placeholder,
    gemm: Gemm,
    low_rank: RecordedLowRank,
    residual: Placeholder | None,
    settings: LinearSettings,
    quantized: Float8Matrix | None = None,
    copy: Placeholder | None = None,
) -> tuple[Placeholder, SavedLowRankLinear]:
    """Compute (the output of `linear`, SavedLowRankLinear). quantized, copy: `linear_forward`'s."""
    out, saved = linear_forward(rt, x, gemm, residual, settings, quantized, copy)
    of_product, factors, dropped = low_rank
    if of_product is None:
        return out, SavedLowRankLinear(saved, None, None)
    outputs = gemm.weight.shape[0 if settings.transpose_y else 1]
    given = x if dropped is None else dropped, factors, of_product, outputs
    product = LowRankProduct.forward(rt, *given, saved.code, saved.column, saved.row)
    product.add_to(rt, out)
    return out, SavedLowRankLinear(saved, product, dropped)


def _low_rank_linear_forward(
    rt: Recorder, inputs: OpInputs, settings: LowRankLinearSettings
) -> tuple[Placeholder, SavedLowRankLinear]:
    x, _, _, residual, dropped, *factors = inputs.tensors
    low_rank = RecordedLowRank(settings.low_rank, factors, dropped)
    return low_rank_linear_forward(rt, x, Gemm.of(inputs, 0, 1), low_rank, residual, settings.linear)


def _low_rank_linear_backward(rt: Recorder, saved: SavedLowRankLinear, dy: Placeholder) -> tuple[Wanted, ...]:
    of_linear, ddropped, pending = saved.backward(rt, dy)
    return *of_linear, ddropped, *saved.factor_gradients(rt, pending)


def layernorm_linear_forward(
    rt: Recorder, inputs: OpInputs, settings: NormSettings, w: Operand | None = None, copies: bool = False
) -> tuple[tuple[Placeholder, Placeholder], SavedColumn]:
    """Compute (the outputs of `layernorm_linear`, SavedColumn).

    inputs: of an op whose first tensors are x, the norm's weight and bias, the weight and its bias. w: a Gemm's.
    copies: `column_forward`'s.
    """
    (x, ln_weight, ln_bias, *_), gemm = inputs.tensors, Gemm.of(inputs, 0, 3, w)
    weight, bias, quantizers, *_ = gemm
    check_weight("weight", weight, [weight.shape[0], x.shape[-1]], x.dtype, quantizers)
    check_bias("bias", bias, weight.shape[0], x.dtype)
    check_fp8(quantizers, tokens=row_count(x), in_features=weight.shape[1], out_features=weight.shape[0])
    norm = normed(rt, x, ln_weight, ln_bias, settings, dtype_code("x", x))
    out, saved = column_forward(rt, norm, gemm, copies)
    return (out.memory, x), saved


def layernorm_linear_backward(
    rt: Recorder, saved: SavedColumn, dy: Placeholder, dresidual: Placeholder | None
) -> tuple[Wanted, ...]:
    """Compute (dx, the gradients of the norm's weight and bias, dW, dbias)."""
    dbias = saved.bias_gradient(rt)
    grad = grad_output(rt, dy, saved.norm.code, saved.quantizers, saved.weight, dbias)
    return *saved.backward(rt, grad, dbias, dresidual), None if dbias is None else dbias.in_its_dtype(rt)


@dataclass(slots=True)
class NormedLowRankLinear:
    """Hold what the backward of a norm and a column-parallel GEMM with a low-rank product reads.

    The gradients of the product's A need the norm's output in 16 bits. So the norm writes that, and rounds it to fp8.
    rows: the output in 16 bits, None where backward computes it again.
    """

    norm: Normed | Unnormed
    rows: Placeholder | None
    linear: SavedLowRankLinear

    @classmethod
    def forward(
        cls,
        rt: Recorder,
        inputs: OpInputs,
        norm: NormSettings,
        low_rank: RecordedLowRank,
        copies: bool = False,
    ) -> tuple[Placeholder, NormedLowRankLinear]:
        """Compute (the output, a tensor; what backward reads). inputs, copies: `layernorm_linear_forward`'s."""
        x, ln_weight, ln_bias, *_ = inputs.tensors
        before = normed(rt, x, ln_weight, ln_bias, norm, dtype_code("x", x))
        gemm = Gemm.of(inputs, 0, 3)
        rows, quantized = normed_in_both(rt, before, gemm, copies)
        out, saved = low_rank_linear_forward(rt, rows, gemm, low_rank, None, COLUMN, quantized)
        return out, cls(before, None if before.recompute else rows, saved)

    def backward(
        self, rt: Recorder, dy: Placeholder, dresidual: Placeholder | None, grad: Operand | None = None
    ) -> tuple[Wanted, ...]:
        """Compute (dx, the gradients of the norm's weight and bias, dW, dbias, *the factors').

        grad: `linear_backward`'s.
        """
        (drows, dw, dbias, _), _, pending = self.linear.backward(rt, dy, grad)
        rows = self.norm.output(rt) if self.rows is None and pending else None
        factors = self.linear.factor_gradients(rt, pending, rows)
        of_norm: Gradients = (None, None, None)
        if drows is not None:
            of_norm = self.norm.backward(rt, rt.matrix(drows, self.norm.code), dresidual)
        return *of_norm, dw, dbias, *factors


class NormedLowRankSettings(NamedTuple):
    norm: NormSettings
    low_rank: LowRankSettings


def _layernorm_low_rank_linear_forward(
    rt: Recorder, inputs: OpInputs, settings: NormedLowRankSettings
) -> tuple[tuple[Placeholder, Placeholder], NormedLowRankLinear]:
    low_rank = RecordedLowRank(settings.low_rank, inputs.tensors[5:])
    out, saved = NormedLowRankLinear.forward(rt, inputs, settings.norm, low_rank)
    return (out, inputs.tensors[0]), saved


def _layernorm_low_rank_linear_backward(
    rt: Recorder, saved: NormedLowRankLinear, dy: Placeholder, dresidual: Placeholder | None
) -> tuple[Wanted, ...]:
    return saved.backward(rt, dy, dresidual)


LINEAR = Op(_linear_forward, linear_backward, weights=(1,))
_LOW_RANK_LINEAR = Op(_low_rank_linear_forward, _low_rank_linear_backward, weights=(1,))
_LAYERNORM_LOW_RANK_LINEAR = Op(_layernorm_low_rank_linear_forward, _layernorm_low_rank_linear_backward, weights=(3,))
_LAYERNORM_LINEAR = Op(layernorm_linear_forward, layernorm_linear_backward, weights=(3,))


def linear(
    x: Tensor,
    projection: Projection,
    *,
    residual: Tensor | None = None,
    parallel_mode: str | None = None,
    tp: Ranks | None = None,
    transpose_y: bool = True,
) -> Tensor:
    """Multiply x with a weight: see `ops.interface`."""
    weight, bias, quantizers, fuse, low_rank = projection
    tensors, of_linear = (x, weight, bias, residual), LinearSettings(parallel_mode, transpose_y)
    with_product = () if low_rank is None else (low_rank.x, *low_rank.a, *low_rank.b)
    return autograd.apply(
        LINEAR if low_rank is None else _LOW_RANK_LINEAR,
        (*tensors, *with_product),
        of_linear if low_rank is None else LowRankLinearSettings(of_linear, LowRankSettings.of(low_rank)),
        quantizers=(quantizers,),
        tp=tp,
        fuse_wgrad_accumulation=(fuse,),
    )


def layernorm_linear(
    x: Tensor, norm: Norm | None, projection: Projection, *, tp: Ranks | None = None
) -> tuple[Tensor, Tensor]:
    """Norm x and multiply it: see `ops.interface`; RMSNorm's backward kernel adds the residual's gradient."""
    weight, bias, quantizers, fuse, low_rank = projection
    tensors, of_norm = (x, *norm_tensors(norm), weight, bias), NormSettings.of(norm)
    with_product = () if low_rank is None else (*low_rank.a, *low_rank.b)
    return autograd.apply(
        _LAYERNORM_LINEAR if low_rank is None else _LAYERNORM_LOW_RANK_LINEAR,
        (*tensors, *with_product),
        of_norm if low_rank is None else NormedLowRankSettings(of_norm, LowRankSettings.of(low_rank)),
        quantizers=(quantizers,),
        tp=tp,
        fuse_wgrad_accumulation=(fuse,),
    )


def accumulate_wgrad(x: Tensor, dy: Tensor, out: Tensor | None = None) -> Tensor:
    """Return xᵀ · dy in float32, added to `out` (in place) where that is given, in the GEMM."""
    rt, code = runtime.current(), dtype_code("hidden states", x)
    result = rt.empty([x.shape[-1], dy.shape[-1]], paddle.float32) if out is None else out
    left, right = rt.matrix(dense(x), code), rt.matrix(dense(dy), code)
    rt.te.gemm(
        right.native, left.native, rt.matrix(result, FLOAT32).native, False, True, rt.stream, out is not None, False
    )
    return result
