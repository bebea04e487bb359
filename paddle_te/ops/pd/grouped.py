"""GEMMs of experts, and how tokens become their rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_te.fp8 import GemmQuantizers, StoredWeight
from paddle_te.fp8.emulation import dequantize_weight, operands
from paddle_te.ops.moe import GroupedProjection, check_counts
from paddle_te.ops.pd.linear import check_fusion


class Rows(NamedTuple):
    """Say where tokens stand among the rows of their experts.

    counts: rows of each expert, padding included. tokens, experts: int64 [rows], of each row; of padding the number of
    tokens, one too many. rows: int64 [tokens, topk], the rows of each token; the number of rows for an expert that it
    lacks.
    """

    counts: list[int]
    tokens: Tensor
    experts: Tensor
    rows: Tensor


@paddle.no_grad()
def rows_of(routing_map: Tensor, topk: int, multiple: int) -> Rows:
    """Find the Rows of a routing_map, an expert's padded to a multiple.

    Where no token has an expert here, the first one has padding: Paddle computes with no empty tensors on nvgpu.
    """
    tokens, experts = routing_map.shape
    chosen = routing_map.astype("int64").transpose([1, 0])
    counts = (chosen.sum(1) + multiple - 1) // multiple * multiple
    total = int(counts.sum())
    if not total:
        total = multiple
        counts = paddle.concat([paddle.full([1], multiple, "int64"), counts[1:]])
    places = (counts.cumsum() - counts).unsqueeze(1) + chosen.cumsum(1) - 1
    places = paddle.where(chosen > 0, places, paddle.full_like(places, total)).transpose([1, 0])
    rows = paddle.sort(places, 1)[:, :topk]
    numbers = paddle.arange(tokens).unsqueeze(1).expand(rows.shape)
    token_of = paddle.full([total + 1], tokens, "int64")
    token_of = paddle.scatter(token_of, rows.flatten(), numbers.flatten())  # what is lacking is written behind the end
    of_experts = counts.numpy().tolist()
    return Rows(of_experts, token_of[:total], _experts_of(of_experts), rows)


def _experts_of(counts: Sequence[int]) -> Tensor:
    """Return each row's expert, int64 [rows]."""
    return paddle.to_tensor(np.repeat(np.arange(len(counts)), counts), "int64")


def _gathered(x: Tensor, places: Tensor) -> Tensor:
    """Return rows of x by their places; beyond its end there is a row of zeros."""
    return paddle.concat([x, paddle.zeros([1, x.shape[1]], x.dtype)]).index_select(places, 0)


def _summed(x: Tensor, places: Tensor) -> Tensor:
    """Sum x's rows by their places [n, k], in float32 and rounded once."""
    found = _gathered(x, places.flatten()).reshape([*places.shape, x.shape[1]])
    return found.astype("float32").sum(1).astype(x.dtype)


class _Permute(PyLayer):
    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Rows) -> Tensor:
        ctx.rows = places.rows
        return _gathered(x, places.tokens)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return _summed(dy, ctx.rows)


class _Unpermute(PyLayer):
    @staticmethod
    def forward(ctx: Any, y: Tensor, places: Rows) -> Tensor:
        ctx.tokens = places.tokens
        return _summed(y, places.rows)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return _gathered(dy, ctx.tokens)


def permute(x: Tensor, places: Rows) -> Tensor:
    """Return the rows of experts, [rows, h], of tokens [tokens, h]; zeros for padding."""
    return _Permute.apply(x, places)


def unpermute(y: Tensor, places: Rows) -> Tensor:
    """Sum each token's rows, [tokens, h]."""
    return _Unpermute.apply(y, places)


def probabilities(probs: Tensor, places: Rows) -> Tensor:
    """Return those of the rows, float32 [rows], of probs [tokens, E]."""
    flat = paddle.concat([probs, paddle.zeros([1, probs.shape[1]], probs.dtype)]).flatten()
    return flat.index_select(places.tokens * probs.shape[1] + places.experts, 0)


def _products(x: Tensor, weight: Tensor, counts: Sequence[int], transpose_y: bool) -> Tensor:
    """Multiply each expert's rows with its matrix."""
    products = [
        paddle.matmul(rows, matrix, transpose_y=transpose_y)
        for rows, matrix in zip(_split(x, counts), weight.unbind(0), strict=True)
        if len(rows)
    ]
    if not products:
        return paddle.zeros([0, weight.shape[1 if transpose_y else 2]], x.dtype)
    return paddle.concat(products)


def _split(x: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Return the rows of each expert."""
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return [x[end - count : end] for end, count in zip(ends, counts, strict=True)]


def _wgrad(dy: Tensor, x: Tensor, counts: Sequence[int]) -> Tensor:
    """Return each expert's gradient, zeros for one without rows."""
    pairs = zip(_split(dy, counts), _split(x, counts), strict=True)
    zeros = paddle.zeros([dy.shape[1], x.shape[1]], x.dtype)
    return paddle.stack([paddle.matmul(a, b, transpose_x=True) if len(a) else zeros for a, b in pairs])


class _GroupedLinear(PyLayer):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, counts: Sequence[int], quantizers: GemmQuantizers | None
    ) -> Tensor:
        ctx.options = counts, quantizers, x.dtype, weight.dtype
        ctx.needs_grad = not x.stop_gradient, not weight.stop_gradient
        x8 = x8_columnwise = x
        if quantizers is not None:
            x8, x8_columnwise = operands(x, quantizers.input)
            flat, shape = weight.reshape([-1, weight.shape[-1]]), weight.shape
            if isinstance(quantizers.weight, StoredWeight):
                weight = dequantize_weight(flat, quantizers.weight).reshape(shape)
            else:
                weight = operands(flat, quantizers.weight)[0].reshape(shape)
        ctx.save_for_backward(x8_columnwise, weight)
        return _products(x8, weight, counts, True).astype(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]  # Paddle takes None, too
        x, weight = ctx.saved_tensor()
        counts, quantizers, x_dtype, weight_dtype = ctx.options
        dy, dy_columnwise = (dy, dy) if quantizers is None else operands(dy, quantizers.grad_output)
        dx = dweight = None  # Paddle wants None for what needs no gradient
        if ctx.needs_grad[0]:
            dx = _products(dy, weight, counts, False).astype(x_dtype)
        if ctx.needs_grad[1]:
            dweight = _wgrad(dy_columnwise, x, counts).astype(weight_dtype)
        if quantizers is not None:
            quantizers.forward_pass.backward_done()
        return dx, dweight


def grouped_linear(x: Tensor, projection: GroupedProjection, counts: Sequence[int] | Tensor) -> Tensor:
    """Project each expert's rows."""
    check_fusion(projection)
    weight, bias, quantizers, _, low_rank = projection
    counts = [int(count) for count in counts]
    check_counts(counts, x.shape[0], quantizers)
    y = _GroupedLinear.apply(x, weight, counts, quantizers)
    if low_rank is not None:
        a, b = map(GroupedProjection, low_rank)
        y = y + grouped_linear(grouped_linear(x, a, counts), b, counts)
    if bias is None:
        return y
    return y + bias.index_select(_experts_of(counts), 0)
