"""A product for each expert: see `paddle_te.ops.moe`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import paddle
from paddle import Tensor

from paddle_te.native import experts
from paddle_te.ops.moe import GroupedProjection, check_counts
from paddle_te.ops.te import autograd, expert_bias, float8_experts
from paddle_te.ops.te.grouped_gemms import (
    Group,
    Grouped,
    check_fp8,
    dtype_of_weight,
    grouped_weight,
    multiple_of,
)
from paddle_te.ops.te.recording import Op, OpInputs, Placeholder, RecordedQuantizer, Recorder
from paddle_te.ops.te.runtime import check_tensor, dtype_code


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
    check_tensor("weight", weight, weight.shape, dtype_of_weight(quantizers, x))
    if bias is not None:
        check_tensor("bias", bias, [count, out_features], x.dtype)
    if counts.dtype is not paddle.int64 or list(counts.shape) != [count]:
        raise TypeError(f"the experts' rows are {counts.dtype} {counts.shape}; they must be int64 {[count]}")
    multiple = multiple_of(quantizers, 8)
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
        grouped_weight(rt, weight, quantizers, code, inputs.train),
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
    return dx, group.wgrad(rt, rows, grad, weight), None, dbias


_GROUPED_LINEAR = Op(_linear_forward, _linear_backward, weights=(1,))


def grouped_linear(x: Tensor, projection: GroupedProjection, counts: Sequence[int] | Tensor) -> Tensor:
    """Return each expert's rows projected. What is behind the rows that `counts` tells of is not written."""
    weight, bias, quantizers, fuse, low_rank = projection
    if low_rank is not None:
        raise NotImplementedError("grouped_linear: it has no low-rank product; experts_mlp has")
    check_fp8(quantizers)
    if not isinstance(counts, paddle.Tensor):
        check_counts(counts, x.shape[0], quantizers)
        counts = paddle.to_tensor(counts, "int64")
    return autograd.apply(
        _GROUPED_LINEAR,
        (x, weight, counts, bias),
        quantizers=(quantizers,),
        fuse_wgrad_accumulation=(fuse,),
    )
