"""Norms, as parts of other Ops and as one: see paddle_te.ops.te.recording."""

from __future__ import annotations

import math
from typing import NamedTuple

from paddle import Tensor

from paddle_te.native import addition, rmsnorm
from paddle_te.ops.norms import Norm
from paddle_te.ops.te import autograd, kernel_choice
from paddle_te.ops.te.quantized import FP8, new_pieces
from paddle_te.ops.te.recording import Op, Placeholder
from paddle_te.ops.te.runtime import FLOAT32, check_tensor, dtype_code


class NormSettings(NamedTuple):
    """What a `paddle_te.ops.norms.Norm` has besides tensors."""

    eps: float
    zero_centered_gamma: bool
    recompute: bool

    @classmethod
    def of(cls, norm):
        """norm: None for no norm."""
        return cls(0.0, False, False) if norm is None else cls(norm.eps, norm.zero_centered_gamma, norm.recompute)


class Normed:
    """x of a norm with its statistics, forward and backward.

    x: Matrix; weight: parameter; bias: LayerNorm's, None for RMSNorm. recompute: as a `Norm` has it. statistics_bytes:
    of what backward reads, native float32 [rows]: _rsigma, 1 / rms(x) or 1 / std(x), and for LayerNorm _mu, mean(x).
    copy: a new tensor with x's numbers, where `forward_in_fp8` was asked for one; else None.
    """

    __slots__ = (
        "tensor", "x", "dtype", "code", "weight", "bias", "recompute", "statistics_bytes",
        "_settings", "_gamma", "_beta", "_mu", "_rsigma", "copy",
    )  # fmt: skip

    def __init__(self, rt, tensor, weight, bias, settings, code):
        check_tensor("the norm's weight", weight, tensor.shape[-1:], tensor.dtype)
        if bias is not None:
            check_tensor("the norm's bias", bias, tensor.shape[-1:], tensor.dtype)
        self.tensor, self.weight, self.bias, self.code, self.dtype = tensor, weight, bias, code, tensor.dtype
        self._settings, self.recompute, self.x = settings, settings.recompute, rt.matrix(tensor, code)
        self._gamma = rt.view(weight, self.x.shape[1:], code)
        self._beta = None if bias is None else rt.view(bias, self.x.shape[1:], code)
        self.statistics_bytes = self._bytes_of_one * (1 if bias is None else 2)
        self.copy = None

    @property
    def _bytes_of_one(self):
        return -(-4 * self.x.shape[0] // 256) * 256

    def forward(self, rt, z, pieces=None):
        """Writes the native tensor z, in x's dtype or fp8. pieces: Pieces for the statistics."""
        pieces = pieces or new_pieces(rt, self.statistics_bytes)
        eps, zero_centered_gamma, _ = self._settings
        self._rsigma = self._statistic(rt, pieces)
        if self._beta is None:
            rt.te.rmsnorm_fwd(self.x.native, self._gamma, eps, z, self._rsigma, rt.stream, zero_centered_gamma)
            return
        self._mu = self._statistic(rt, pieces)
        operands = self.x.native, self._gamma, self._beta, eps
        rt.te.layernorm_fwd(*operands, z, self._mu, self._rsigma, rt.stream, zero_centered_gamma)

    def output(self, rt):
        """A new Placeholder of the norm's output, in x's dtype, which has a gradient where anything before it has."""
        out = rt.empty(self.tensor.shape, self.dtype)
        tensors = self.tensor, self.weight, self.bias
        out.stop_gradient = all([tensor is None or tensor.stop_gradient for tensor in tensors])
        self.forward(rt, rt.matrix(out, self.code).native)
        return out

    def casts(self, rt, quantizer):
        """Whether `forward_in_fp8` comes in the place of `forward`."""
        return self._beta is None and kernel_choice.norm(rt, self.x.shape[1], self.code, quantizer)

    def forward_in_fp8(self, rt, out, pieces=None, copies=False):
        """Fills the Float8Matrix `out`, by our kernels. pieces: as forward's. copies: whether to make `copy`."""
        pieces, (eps, zero_centered_gamma, _) = pieces or new_pieces(rt, self.statistics_bytes), self._settings
        at = pieces.take(self._bytes_of_one)
        self._rsigma = rt.tensor(at, self.x.shape[:1], FLOAT32)
        self.copy = rt.empty(self.tensor.shape, self.dtype) if copies else None
        operands = rt.te, rt.stream, self.x.memory.data_ptr(), self.weight.data_ptr(), at
        copy = self.copy.data_ptr() if copies else 0

        def statistics(amax):
            rmsnorm.statistics(*operands, amax, copy, *self.x.shape, self.code, eps, zero_centered_gamma)

        def cast(target, rounded):
            if target.data or target.transposed:
                options = *self.x.shape, self.code, FP8[out.quantizer.dtype], zero_centered_gamma, rounded
                rmsnorm.cast_transpose(*operands, target, *options)
            else:
                statistics(target.amax)

        if out.quantizer.kind == "delayed":
            statistics(0)  # current scaling asks for them with the amax
        out.fill_by(rt, cast)

    def _statistic(self, rt, pieces):
        return rt.tensor(pieces.take(self._bytes_of_one), self.x.shape[:1], FLOAT32)

    def backward(self, rt, dz, add=None, into=None):
        """The gradients of x, the weight and the bias from the Matrix dz; the tensor `add`, the residual's gradient, is
        added to that of x. into: the three tensors to write them to, None for new ones."""
        dx, dgamma, dbeta = into or self._new_gradients(rt)
        native_dx, native_dgamma = rt.view(dx, self.x.shape, self.code), self._parameter_view(rt, dgamma)
        zero_centered_gamma = self._settings.zero_centered_gamma
        if self.bias is None:
            operands = dz.native, self.x.native, self._rsigma, self._gamma, native_dx, native_dgamma, rt.stream
            added = None if add is None else rt.view(add, self.x.shape, self.code)
            rt.te.rmsnorm_bwd(*operands, added, zero_centered_gamma)
        else:
            operands = dz.native, self.x.native, self._mu, self._rsigma, self._gamma, native_dx, native_dgamma
            rt.te.layernorm_bwd(*operands, self._parameter_view(rt, dbeta), rt.stream, zero_centered_gamma)
            if add is not None:  # the library's kernel adds none
                addition.add_to(rt.te, rt.stream, dx.data_ptr(), add.data_ptr(), math.prod(self.x.shape), self.code)
        return tuple(
            None if tensor is None or tensor.stop_gradient else gradient
            for tensor, gradient in ((self.tensor, dx), (self.weight, dgamma), (self.bias, dbeta))
        )

    def _new_gradients(self, rt):
        tensors = self.tensor, self.weight, self.bias
        return [None if tensor is None else rt.empty(tensor.shape, tensor.dtype) for tensor in tensors]

    def _parameter_view(self, rt, tensor):
        return rt.view(tensor, self.x.shape[1:], self.code)


class Unnormed:
    """x in the place of a Normed, where there is no norm. What it is read for is x itself."""

    weight = bias = copy = None
    recompute, statistics_bytes = False, 0

    def __init__(self, rt, tensor, code):
        self.tensor, self.dtype, self.code, self.x = tensor, tensor.dtype, code, rt.matrix(tensor, code)

    def output(self, rt):
        """x."""
        return self.tensor

    def backward(self, rt, dz, add=None, into=None):
        """As Normed's; dz is overwritten."""
        if add is not None:
            addresses = dz.memory.data_ptr(), add.data_ptr()
            addition.add_to(rt.te, rt.stream, *addresses, math.prod(self.x.shape), self.code)
        if into is not None:
            rt.te.memcpy_async(rt.view(into[0], self.x.shape, self.code), dz.native, rt.stream)
        return None if self.tensor.stop_gradient else dz.memory, None, None


def normed(rt, tensor, weight, bias, settings, code):
    """The Normed, or the Unnormed where there is no weight."""
    return Unnormed(rt, tensor, code) if weight is None else Normed(rt, tensor, weight, bias, settings, code)


class _Saved(NamedTuple):
    """norm: Normed. residual: as forward was given it."""

    norm: Normed
    residual: Placeholder | None


def _forward(rt, inputs, settings):
    x, weight, bias, residual = inputs.tensors
    code = dtype_code("x", x)
    norm, out = Normed(rt, x, weight, bias, settings, code), rt.empty(x.shape, x.dtype)
    norm.forward(rt, rt.matrix(out, code).native)
    if residual is not None:
        check_tensor("residual", residual, x.shape, x.dtype)
        addition.add_to(rt.te, rt.stream, out.data_ptr(), residual.data_ptr(), math.prod(x.shape), code)
    return out, _Saved(norm, residual)


def _backward(rt, saved, dy):
    norm, residual = saved
    return *norm.backward(rt, rt.matrix(dy, norm.code)), None if residual is None or residual.stop_gradient else dy


_NORMALIZE = Op(_forward, _backward)


def normalize(x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
    """See `ops.interface`."""
    return autograd.apply(_NORMALIZE, (x, norm.weight, norm.bias, residual), NormSettings.of(norm))
