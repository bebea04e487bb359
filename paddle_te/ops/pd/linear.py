"""Norms and GEMMs of a decoder layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import Tensor
from paddle.autograd import PyLayer
from paddle.distributed.fleet.utils import recompute as paddle_recompute

from paddle_te.fp8.emulation import emulated_fp8_linear, rounded_to_mxfp8
from paddle_te.ops.activations import CLAMP
from paddle_te.ops.chunks import chunk_rows, ranges
from paddle_te.ops.interface import Ranks
from paddle_te.ops.low_rank import LowRankUpdate
from paddle_te.ops.moe import GroupedProjection
from paddle_te.ops.norms import Norm
from paddle_te.ops.projection import Projection
from paddle_te.ops.recompute import NOTHING_AGAIN, MLPRecompute


def normalize(x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
    """Norm x over its last axis: see `ops.interface`."""
    # in float32 astype would give x itself; a cast has a gradient of its own, so that with recompute the gradients of x
    # are added in the same order as without
    z = paddle.cast(x, "float32")
    if norm.bias is not None:
        z = z - z.mean(-1, keepdim=True)
    z = (z * paddle.rsqrt(z.square().mean(-1, keepdim=True) + norm.eps)).astype(norm.weight.dtype)
    y = z * (1 + norm.weight if norm.zero_centered_gamma else norm.weight)
    y = y if norm.bias is None else y + norm.bias
    return y if residual is None else residual + y


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate=True)


def _gated(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def activate(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return function(gate) * up

    return activate


def _clamped_swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    gate, up = gate.clip(max=CLAMP.limit), up.clip(-CLAMP.limit, CLAMP.limit)
    return gate * F.sigmoid(CLAMP.alpha * gate) * (up + CLAMP.offset)


_ACTIVATIONS = {
    "swiglu": _gated(F.silu),
    "clamped_swiglu": _clamped_swiglu,
    "geglu": _gated(_gelu),
    "gelu": _gelu,
    "relu": F.relu,
}


def activate(x: Tensor, activation: str) -> Tensor:
    """Activate x by one of `ops.activations`; of a gated one [..., 2·f] becomes [..., f]."""
    return _ACTIVATIONS[activation](x)


def _gemm(x: Tensor, projection: Projection, transpose_y: bool = True) -> Tensor:
    weight, quantizers = projection.weight, projection.quantizers
    if quantizers is None:
        return paddle.matmul(x, weight, transpose_y=transpose_y)
    return emulated_fp8_linear(x, weight, quantizers, transpose_y)


def _again(function: Callable[[Tensor], Tensor], x: Tensor, recompute: bool) -> Tensor:
    """Return function(x), or with `recompute` the same computed again in backward; nothing in it is random.

    Autograd keeps what a GEMM reads: to keep it out of memory the GEMM must be computed again as well.
    """
    if recompute and paddle.is_grad_enabled() and not x.stop_gradient:
        return paddle_recompute(function, x, preserve_rng_state=False)
    return function(x)


class _OfStored(PyLayer):
    """function(x), one tensor or several, which backward computes again from what MXFP8 keeps of x."""

    @staticmethod
    def forward(
        ctx: Any, function: Callable[[Tensor], Tensor | tuple[Tensor, Tensor]], x: Tensor
    ) -> Tensor | tuple[Tensor, Tensor]:
        ctx.function = function
        ctx.save_for_backward(rounded_to_mxfp8(x))
        with paddle.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensor()
        x = x.detach()
        x.stop_gradient = False
        with paddle.enable_grad():
            y = ctx.function(x)
        paddle.autograd.backward([*y] if len(dy) > 1 else [y], [*dy])
        return x.grad


def check_fusion(*projections: Projection | GroupedProjection) -> None:
    """Raise NotImplementedError for a GEMM that is to add its weight's gradient to another."""
    if any(projection.fuse_wgrad_accumulation for projection in projections):
        raise NotImplementedError("fuse_wgrad_accumulation: backend paddle has no such GEMM; use transformer_engine")


def _column(x: Tensor, projection: Projection, tp: Ranks | None, transpose_y: bool = True) -> Tensor:
    y = _gemm(x if tp is None else tp.enter(x), projection, transpose_y)
    return y if projection.bias is None else y + projection.bias


def _row(x: Tensor, projection: Projection, tp: Ranks | None, transpose_y: bool = True) -> Tensor:
    y, bias = _gemm(x, projection, transpose_y), projection.bias
    if tp is not None:
        y = tp.leave(y)
        if bias is not None and tp.sequence_parallel:
            bias = tp.sum_gradient(bias)
    return y if bias is None else y + bias


def _joined(tensors: Sequence[Tensor], axis: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else paddle.concat(tensors, axis)


def _low_rank_product(x: Tensor, low_rank: LowRankUpdate, parallel_mode: str | None, tp: Ranks | None) -> Tensor:
    """Return a LowRankUpdate's scaling · x · A · B, of its parts side by side, zeros for parts without.

    The parts' A stand side by side and their B on a diagonal, so that there are two products for all of them.
    """
    return _low_rank_output(
        _low_rank_input(x if low_rank.x is None else low_rank.x, low_rank), low_rank, parallel_mode, tp
    )


def _low_rank_input(x: Tensor, low_rank: LowRankUpdate) -> Tensor:
    """Return x · A, of this rank."""
    return paddle.matmul(x, _joined([a for a in low_rank.a if a is not None], -1))


def _low_rank_output(z: Tensor, low_rank: LowRankUpdate, parallel_mode: str | None, tp: Ranks | None) -> Tensor:
    """Return what B makes of it."""
    if tp is not None:
        z = tp.enter(z) if parallel_mode == "column" else tp.leave(z)
    return paddle.matmul(z * low_rank.scaling, _diagonal(low_rank))


def _diagonal(low_rank: LowRankUpdate) -> Tensor:
    """Return [sum of r, sum of the parts' sizes]: each B in rows of its own, in its part's columns."""

    def row(part: int, b: Tensor) -> Tensor:
        columns = enumerate(low_rank.sizes)
        return _joined([b if i == part else paddle.zeros([b.shape[0], size], b.dtype) for i, size in columns], -1)

    return _joined([row(part, b) for part, b in enumerate(low_rank.b) if b is not None], 0)


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
    check_fusion(projection)
    y = _projected(x, projection, parallel_mode, None if parallel_mode is None else tp, transpose_y)
    return y if residual is None else y + residual


def _projected(
    x: Tensor, projection: Projection, parallel_mode: str | None, tp: Ranks | None, transpose_y: bool = True
) -> Tensor:
    """Pass x through a GEMM, with the product of its LowRankUpdate, if any, beside it."""
    y = (_row if parallel_mode == "row" else _column)(x, projection, tp, transpose_y)
    low_rank = projection.low_rank
    return y if low_rank is None else y + _low_rank_product(x, low_rank, parallel_mode, tp)


def layernorm_linear(
    x: Tensor, norm: Norm | None, projection: Projection, *, tp: Ranks | None = None
) -> tuple[Tensor, Tensor]:
    """Norm x and multiply it with a weight: see `ops.interface`."""
    check_fusion(projection)
    return _normed_column(x, norm, projection, tp), x


def _normed_column(x: Tensor, norm: Norm | None, projection: Projection, tp: Ranks | None) -> Tensor:
    def function(x: Tensor) -> Tensor:
        return _projected(x if norm is None else normalize(x, norm), projection, "column", tp)

    return _again(function, x, norm is not None and norm.recompute)


def layernorm_mlp(
    x: Tensor,
    norm: Norm | None,
    fc1: Projection,
    fc2: Projection,
    *,
    activation: str = "swiglu",
    add_residual: bool = True,
    recompute: MLPRecompute = NOTHING_AGAIN,
    tp: Ranks | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute an MLP behind a norm: see `ops.interface`."""
    check_fusion(fc1, fc2)

    def second_half(hidden: Tensor) -> Tensor:
        return _projected(activate(hidden, activation), fc2, "row", tp)

    def both_halves(x: Tensor) -> Tensor:
        hidden = _normed_column(x, norm, fc1, tp)
        if stores and not hidden.stop_gradient and paddle.is_grad_enabled():
            return _second_half_of_stored(hidden, fc2, activation, recompute.part == "mlp_act", tp)
        return _again(second_half, hidden, recompute.part == "mlp_act")

    rows = None if fc1.low_rank or fc2.low_rank else chunk_rows(x, recompute.chunk_tokens, tp)
    stores = recompute.fp8_input_store and recompute.part != "mlp" and rows is None
    y = _again(both_halves, x, recompute.part == "mlp") if rows is None else _in_chunks(both_halves, x, rows)
    return x + y if add_residual else (y, x)


def _second_half_of_stored(hidden: Tensor, fc2: Projection, activation: str, again: bool, tp: Ranks | None) -> Tensor:
    """Return fc2 of the activation, of whose input MXFP8 is kept; again: the activation's output is not kept."""
    if not again:
        act = _OfStored.apply(lambda hidden: activate(hidden, activation), hidden)
        return _projected(act, fc2, "row", tp)
    low_rank = fc2.low_rank

    def both_products(hidden: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        # x · A is kept: B's gradient is that of forward's numbers
        act = activate(hidden, activation)
        y = _row(act, fc2, tp)
        return y if low_rank is None else (y, _low_rank_input(act, low_rank))

    out = _OfStored.apply(both_products, hidden)
    return out if low_rank is None else out[0] + _low_rank_output(out[1], low_rank, "row", tp)


def _in_chunks(function: Callable[[Tensor], Tensor], x: Tensor, rows: int) -> Tensor:
    """Return function(x) of so many rows of x at a time, each computed again in backward."""
    tokens = x.reshape([-1, x.shape[-1]])
    chunks = [tokens[first : first + count] for first, count in ranges(tokens.shape[0], rows)]
    return paddle.concat([_again(function, chunk, True) for chunk in chunks]).reshape(x.shape)


def accumulate_wgrad(x: Tensor, dy: Tensor, out: Tensor | None = None) -> Tensor:
    """Return xᵀ · dy in float32, added to `out` (in place) where that is given."""
    product = paddle.matmul(x, dy, transpose_x=True).astype("float32")
    return product if out is None else out.add_(product)
