"""Norms and GEMMs of a decoder layer."""

import paddle
import paddle.nn.functional as F

from paddle_te.fp8.emulation import emulated_fp8_linear


def rms_norm(x, weight, eps):
    """x / sqrt(mean(x²) + eps) · weight over the last axis, in float32 (Zhang and Sennrich, 2019)."""
    z = x.astype("float32")
    z = z * paddle.rsqrt(z.square().mean(-1, keepdim=True) + eps)
    return z.astype(weight.dtype) * weight


def _gemm(x, weight, quantizers, transpose_y=True):
    if quantizers is None:
        return paddle.matmul(x, weight, transpose_y=transpose_y)
    return emulated_fp8_linear(x, weight, quantizers, transpose_y)


def _check_fusion(fuse_wgrad_accumulation):
    if fuse_wgrad_accumulation:
        raise NotImplementedError("fuse_wgrad_accumulation: backend paddle has no such GEMM; use transformer_engine")


def _column(x, weight, tp, quantizers, transpose_y=True):
    return _gemm(x if tp is None else tp.enter(x), weight, quantizers, transpose_y)


def _row(x, weight, tp, quantizers, transpose_y=True):
    y = _gemm(x, weight, quantizers, transpose_y)
    return y if tp is None else tp.leave(y)


def linear(
    x,
    weight,
    *,
    residual=None,
    parallel_mode=None,
    tp=None,
    quantizers=None,
    fuse_wgrad_accumulation=False,
    transpose_y=True,
):
    """x · weightᵀ (+ residual), or x · weight without transpose_y; the weight is split by `parallel_mode` ("column",
    "row" or None) over `tp`."""
    _check_fusion(fuse_wgrad_accumulation)
    gemm = {"column": _column, "row": _row}.get(parallel_mode)
    y = gemm(x, weight, tp, quantizers, transpose_y) if gemm else _gemm(x, weight, quantizers, transpose_y)
    return y if residual is None else y + residual


def layernorm_linear(x, ln_weight, weight, eps, *, bias=None, tp=None, quantizers=None, fuse_wgrad_accumulation=False):
    """(rms_norm(x) · weightᵀ (+ bias), x): column parallel; x comes back as the residual branch.

    The residual passes through so that an implementation can add both gradients of x in one kernel.
    """
    _check_fusion(fuse_wgrad_accumulation)
    y = _column(rms_norm(x, ln_weight, eps), weight, tp, quantizers)
    return y if bias is None else y + bias, x


def layernorm_mlp(
    x,
    ln_weight,
    fc1_weight,
    fc2_weight,
    eps,
    *,
    add_residual=True,
    tp=None,
    quantizers=(None, None),
    fuse_wgrad_accumulation=False,
):
    """x + swiglu(rms_norm(x) · fc1ᵀ) · fc2ᵀ; fc1 is column parallel (gate and up stacked), fc2 row parallel.

    Without add_residual it returns (the second summand, x), as layernorm_linear does.
    """
    _check_fusion(fuse_wgrad_accumulation)
    gate, up = _column(rms_norm(x, ln_weight, eps), fc1_weight, tp, quantizers[0]).chunk(2, -1)
    y = _row(F.silu(gate) * up, fc2_weight, tp, quantizers[1])
    return x + y if add_residual else (y, x)


def accumulate_wgrad(x, dy, out=None):
    """xᵀ · dy in float32, added to `out` (in place) where that is given."""
    product = paddle.matmul(x, dy, transpose_x=True).astype("float32")
    return product if out is None else out.add_(product)
