"""Norms, as parts of other Ops and as one: see paddle_te.ops.te.recording."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from paddle import Tensor

from paddle_te.native import addition, rmsnorm
from paddle_te.native.casts import CastTarget
from paddle_te.ops.norms import Norm
from paddle_te.ops.te import autograd, kernel_choice
from paddle_te.ops.te.quantized import FP8, Float8Matrix, Pieces, new_pieces
from paddle_te.ops.te.recording import Op, OpInputs, Placeholder, RecordedQuantizer, Recorder
from paddle_te.ops.te.runtime import FLOAT32, Matrix, check_tensor, dtype_code

# of x, of the norm's weight and of its bias, None where there is none
Gradients: TypeAlias = tuple[Placeholder | None, Placeholder | None, Placeholder | None]


class NormSettings(NamedTuple):
    """Hold what a `paddle_te.ops.norms.Norm` has besides tensors."""

    eps: float
    zero_centered_gamma: bool
    recompute: bool

    @classmethod
    def of(cls, norm: Norm | None) -> NormSettings:
        """norm: None for no norm."""
        return cls(0.0, False, False) if norm is None else cls(norm.eps, norm.zero_centered_gamma, norm.recompute)


class Normed:
    """Hold x of a norm with its statistics, forward and backward.

    x: Matrix; weight: parameter; bias: LayerNorm's, None for RMSNorm. recompute: as a `Norm` has it. statistics_bytes:
    of what backward reads, native float32 [rows]: _rsigma, 1 / rms(x) or 1 / std(x), and for LayerNorm _mu, mean(x).
    copy: a new tensor with x's numbers, where `forward_in_fp8` was asked for one; else None.
    """

    __slots__ = (
        "tensor", "x", "dtype", "code", "weight", "bias", "recompute", "statistics_bytes",
        "_settings", "_gamma", "_beta", "_mu", "_rsigma", "copy",
    )  # fmt: skip
    copy: Placeholder | None

    def __init__(
        self,
        rt: Recorder,
        tensor: Placeholder,
        weight: Placeholder,
        bias: Placeholder | None,
        settings: NormSettings,
        code: int,
    ) -> None:
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
    def _bytes_of_one(self) -> int:
        return -(-4 * self.x.shape[0] // 256) * 256

    def forward(self, rt: Recorder, z: Any, pieces: Pieces | None = None) -> None:
        """Write the native tensor z, in x's dtype or fp8. pieces: Pieces for the statistics."""
        pieces = pieces or new_pieces(rt, self.statistics_bytes)
        eps, zero_centered_gamma, _ = self._settings
        self._rsigma = self._statistic(rt, pieces)
        if self._beta is None:
            rt.te.rmsnorm_fwd(self.x.native, self._gamma, eps, z, self._rsigma, rt.stream, zero_centered_gamma)
            return
        self._mu = self._statistic(rt, pieces)
        operands = self.x.native, self._gamma, self._beta, eps
        rt.te.layernorm_fwd(*operands, z, self._mu, self._rsigma, rt.stream, zero_centered_gamma)

    def output(self, rt: Recorder) -> Placeholder:
        """Make a new Placeholder of the norm's output, in x's dtype; it has a gradient where anything before has."""
        out = self._new_output(rt)
        self.forward(rt, rt.matrix(out, self.code).native)
        return out

    def output_in_both(self, rt: Recorder, quantized: Float8Matrix, copies: bool) -> Placeholder:
        """Make `output` where the norm `casts`, and fill `quantized` with the same in fp8.

        copies: `forward_in_fp8`'s.
        """
        out = self._new_output(rt)
        self.forward_in_fp8(rt, quantized, copies=copies, plain=out)
        return out

    def _new_output(self, rt: Recorder) -> Placeholder:
        out, tensors = rt.empty(self.tensor.shape, self.dtype), (self.tensor, self.weight, self.bias)
        out.stop_gradient = all([tensor is None or tensor.stop_gradient for tensor in tensors])
        return out

    def casts(self, rt: Recorder, quantizer: RecordedQuantizer) -> bool:
        """Return whether `forward_in_fp8` replaces `forward`."""
        return self._beta is None and kernel_choice.norm(rt, self.x.shape[1], self.code, quantizer)

    def forward_in_fp8(
        self,
        rt: Recorder,
        out: Float8Matrix,
        pieces: Pieces | None = None,
        copies: bool = False,
        plain: Placeholder | None = None,
    ) -> None:
        """Fill the Float8Matrix `out`, by our kernels.

        pieces: as forward's. copies: whether to make `copy`. plain: a tensor for the output in x's dtype, from which
        fp8 is then rounded.
        """
        pieces, (eps, zero_centered_gamma, _) = pieces or new_pieces(rt, self.statistics_bytes), self._settings
        at = pieces.take(self._bytes_of_one)
        self._rsigma = rt.tensor(at, self.x.shape[:1], FLOAT32)
        self.copy = rt.empty(self.tensor.shape, self.dtype) if copies else None
        places = self.x.memory.data_ptr(), self.weight.data_ptr(), at
        norm = rmsnorm.RMSNorm(*places, *self.x.shape, self.code, eps, zero_centered_gamma)
        copy, of_plain = (0 if tensor is None else tensor.data_ptr() for tensor in (self.copy, plain))

        def statistics(amax: int) -> None:
            rmsnorm.statistics(rt.te, rt.stream, norm, amax, copy)

        def cast(target: CastTarget, rounded: bool) -> None:
            if target.data or target.transposed:
                options = FP8[out.quantizer.dtype], rounded or plain is not None, of_plain
                rmsnorm.cast_transpose(rt.te, rt.stream, norm, target, *options)
            else:
                statistics(target.amax)

        if out.quantizer.kind == "delayed":
            statistics(0)  # current scaling asks for them with the amax
        out.fill_by(rt, cast)

    def _statistic(self, rt: Recorder, pieces: Pieces) -> Any:
        return rt.tensor(pieces.take(self._bytes_of_one), self.x.shape[:1], FLOAT32)

    def backward(
        self, rt: Recorder, dz: Matrix, add: Placeholder | None = None, into: Sequence[Placeholder | None] | None = None
    ) -> Gradients:
        """Return the gradients of x, the weight and the bias from the Matrix dz.

        The tensor `add`, the residual's gradient, is added to that of x. into: the three tensors to write them to, None
        for new ones.
        """
        dx, dgamma, dbeta = into or self._new_gradients(rt)
        assert dx is not None and dgamma is not None  # x and the weight are there
        native_dx, native_dgamma = rt.view(dx, self.x.shape, self.code), self._parameter_view(rt, dgamma)
        zero_centered_gamma = self._settings.zero_centered_gamma
        if self.bias is None:
            operands = dz.native, self.x.native, self._rsigma, self._gamma, native_dx, native_dgamma, rt.stream
            added = None if add is None else rt.view(add, self.x.shape, self.code)
            rt.te.rmsnorm_bwd(*operands, added, zero_centered_gamma)
        else:
            assert dbeta is not None  # so is the bias
            operands = dz.native, self.x.native, self._mu, self._rsigma, self._gamma, native_dx, native_dgamma
            rt.te.layernorm_bwd(*operands, self._parameter_view(rt, dbeta), rt.stream, zero_centered_gamma)
            if add is not None:  # the library's kernel adds none
                addition.add_to(rt.te, rt.stream, dx.data_ptr(), add.data_ptr(), math.prod(self.x.shape), self.code)
        wanted = [tensor is not None and not tensor.stop_gradient for tensor in (self.tensor, self.weight, self.bias)]
        return dx if wanted[0] else None, dgamma if wanted[1] else None, dbeta if wanted[2] else None

    def _new_gradients(self, rt: Recorder) -> list[Placeholder | None]:
        tensors = self.tensor, self.weight, self.bias
        return [None if tensor is None else rt.empty(tensor.shape, tensor.dtype) for tensor in tensors]

    def _parameter_view(self, rt: Recorder, tensor: Placeholder) -> Any:
        return rt.view(tensor, self.x.shape[1:], self.code)


class Unnormed:
    """Replace a Normed where there is no norm: its output is x itself."""

    weight = bias = copy = None
    recompute, statistics_bytes = False, 0

    def __init__(self, rt: Recorder, tensor: Placeholder, code: int) -> None:
        self.tensor, self.dtype, self.code, self.x = tensor, tensor.dtype, code, rt.matrix(tensor, code)

    def output(self, rt: Recorder) -> Placeholder:
        """Return x."""
        return self.tensor

    def backward(
        self, rt: Recorder, dz: Matrix, add: Placeholder | None = None, into: Sequence[Placeholder | None] | None = None
    ) -> Gradients:
        """Return the gradients as Normed does; dz is overwritten."""
        if add is not None:
            addresses = dz.memory.data_ptr(), add.data_ptr()
            addition.add_to(rt.te, rt.stream, *addresses, math.prod(self.x.shape), self.code)
        if into is not None and into[0] is not None:
            rt.te.memcpy_async(rt.view(into[0], self.x.shape, self.code), dz.native, rt.stream)
        return None if self.tensor.stop_gradient else dz.memory, None, None


def normed(
    rt: Recorder,
    tensor: Placeholder,
    weight: Placeholder | None,
    bias: Placeholder | None,
    settings: NormSettings,
    code: int,
) -> Normed | Unnormed:
    """Make the Normed, or the Unnormed where there is no weight."""
    return Unnormed(rt, tensor, code) if weight is None else Normed(rt, tensor, weight, bias, settings, code)


class _Saved(NamedTuple):
    """Hold what backward reads. norm: Normed. residual: as forward was given it."""

    norm: Normed
    residual: Placeholder | None


def _forward(rt: Recorder, inputs: OpInputs, settings: NormSettings) -> tuple[Placeholder, _Saved]:
    x, weight, bias, residual = inputs.tensors
    code = dtype_code("x", x)
    norm, out = Normed(rt, x, weight, bias, settings, code), rt.empty(x.shape, x.dtype)
    norm.forward(rt, rt.matrix(out, code).native)
    if residual is not None:
        check_tensor("residual", residual, x.shape, x.dtype)
        addition.add_to(rt.te, rt.stream, out.data_ptr(), residual.data_ptr(), math.prod(x.shape), code)
    return out, _Saved(norm, residual)


def _backward(rt: Recorder, saved: _Saved, dy: Placeholder) -> tuple[Placeholder | None, ...]:
    norm, residual = saved
    return *norm.backward(rt, rt.matrix(dy, norm.code)), None if residual is None or residual.stop_gradient else dy


_NORMALIZE = Op(_forward, _backward)


def normalize(x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
    """Norm x: see `ops.interface`."""
    return autograd.apply(_NORMALIZE, (x, norm.weight, norm.bias, residual), NormSettings.of(norm))
