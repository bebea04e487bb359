"""Emulate fp8's rounding in float32 arithmetic: what the backend "paddle" computes, and the reference for te's kernels.

Plain elementwise Paddle operations, for any device: Paddle's own float8 casts on the CPU turn 465 and NaN into the
wrong numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import Tensor
from paddle.autograd import PyLayer
from paddle.distributed.communication.group import Group

from paddle_te.fp8.module import GemmQuantizers, has_fp8_backward
from paddle_te.fp8.recipe import FP8_MAX
from paddle_te.fp8.scaling import BLOCK, MXFP8_BLOCK, BlockScaling
from paddle_te.fp8.state import FLOAT32_MAX, Quantizer, divide
from paddle_te.fp8.stored import StoredWeight

# dtype -> (bits of the mantissa, smallest normal number), Micikevicius et al., 2022, table 1
_FORMATS = {"e4m3": (3, 2.0**-6), "e5m2": (2, 2.0**-14)}


def _power_2_below(x: Tensor) -> Tensor:
    """Return 2**floor(log2|x|) of a float32 tensor: exact from 2**-100 to 2**100, for smaller numbers at most 2**-100.

    Rump, Ogita and Oishi, "Accurate floating-point summation I", 2008, algorithm 3.5.
    """
    q = x * (2.0**23 + 1)
    return (q - q * (1 - 2.0**-24)).abs()


def round_to_fp8(x: Tensor, dtype: str) -> Tensor:
    """Return the fp8 values nearest to x (float32), as float32.

    dtype: "e4m3" or "e5m2". Ties go to even, subnormal numbers included; beyond the largest finite value and at
    infinity that value, NaN stays (CUDA's __NV_SATFINITE, which TE's kernels use). Zeros are positive.
    """
    mantissa_bits, smallest_normal = _FORMATS[dtype]
    x = x.clip(-FP8_MAX[dtype], FP8_MAX[dtype])
    spacing = _power_2_below(x).clip(min=smallest_normal) * 2.0**-mantissa_bits
    # added to a number whose last bit is worth `spacing`, x is rounded to a multiple of it, ties to even
    shift = spacing * (1.5 * 2.0**23)
    return (x + shift) - shift


def _amax(x: Tensor, axes: Sequence[int] | None = None) -> Tensor:
    """Return max |x| over the axes in float32; axes None: over all, as a tensor of shape [].

    It ignores NaN, as fmaxf does in TE's kernels. It is 0 without numbers.
    """
    if x.size == 0:
        return paddle.zeros([size for axis, size in enumerate(x.shape) if axes is not None and axis not in axes])
    x = x.abs()
    return paddle.where(x.isnan(), paddle.zeros_like(x), x).max(axes)


def scale_from_amax(amax: Tensor, fp8_max: float, power_2_scale: bool = False, greatest: float = FLOAT32_MAX) -> Tensor:
    """Return the scale of an amax, a float32 tensor like it: fp8_max / amax, 1 where amax is 0 or not finite.

    power_2_scale: rounded down to a power of 2. greatest: the scale where the quotient is beyond float32.
    `compute_scale_from_amax` in TE 2.20's common/recipe/recipe_common.cuh, whose epsilon is the caller's.
    """
    ones = paddle.ones_like(amax)
    usable = amax.isfinite() & (amax > 0)
    scale = divide(fp8_max, paddle.where(usable, amax, ones))
    scale = paddle.where(scale < FLOAT32_MAX, scale, paddle.full_like(scale, greatest))
    if power_2_scale:
        near_1 = paddle.where(scale > 1, paddle.full_like(scale, 2.0**-64), paddle.full_like(scale, 2.0**64))
        scale = _power_2_below(scale * near_1) / near_1
    return paddle.where(usable, scale, ones)


def _e4m3_number(byte: int) -> float:
    """Return the number that an e4m3 byte from 0 to 126 stands for: 4 bits of exponent, then 3 of mantissa."""
    exponent, mantissa = byte >> 3, byte & 7
    return (mantissa + (8 if exponent else 0)) * 2.0 ** (max(exponent, 1) - 10)


_E4M3_NUMBERS = [_e4m3_number(byte) for byte in range(127)]  # ascending


def quantize_weight(source: Tensor, weight: Tensor, stored: StoredWeight, group: Group | None = None) -> None:
    """Quantize a tensor into a weight that exists in fp8 only, under current scaling's scale or those of its blocks.

    source: float32, bfloat16 or float16. weight: uint8 of the same shape, which gets the e4m3 bytes. stored: the
    weight's StoredWeight, which gets scale_inv, here [out / 128, in / 128] of blocks. group: ranks that each hold a
    part of the weight, whose greatest amax gives its one scale; None: this tensor is the whole weight. A block lies on
    one rank. Raises ValueError where 128 does not divide the sizes of a weight with blocks.
    """
    source = source.detach()
    made_by = stored.scaling.made_by
    if isinstance(made_by, BlockScaling):
        blocks, scale = _blocks_and_scales(source, made_by)
        values, scale_inv = (blocks * scale).reshape(source.shape), divide(1.0, scale).squeeze([1, 3])
    else:
        source = source.astype("float32")
        amax = _amax(source)
        if group is not None:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
        scale = scale_from_amax(amax, stored.fp8_max)
        values, scale_inv = source * scale, divide(1.0, scale).reshape([1])
    values = round_to_fp8(values, stored.dtype)
    codes = paddle.searchsorted(paddle.to_tensor(_E4M3_NUMBERS, "float32"), values.abs())  # NaN: 127, which is NaN
    weight.set_value((codes + 128 * (values < 0).astype(codes.dtype)).astype("uint8"))
    stored.scale_inv = scale_inv


@paddle.no_grad()
def dequantize_weight(weight: Tensor, stored: StoredWeight) -> Tensor:
    """Return the numbers that the bytes of such a weight stand for: float32 of its shape."""
    numbers = [*_E4M3_NUMBERS, float("nan")]
    table = paddle.to_tensor([*numbers, *(-number for number in numbers)], "float32")
    values = paddle.gather(table, weight.flatten().astype("int32"))
    if not stored.scaling.in_blocks:
        return values.reshape(weight.shape) * stored.scale_inv[:1]  # te has as many, alike, as there are experts
    rows, cols = stored.scale_inv.shape
    blocks = values.reshape([rows, BLOCK, cols, BLOCK]) * stored.scale_inv.reshape([rows, 1, cols, 1])
    return blocks.reshape(weight.shape)


@paddle.no_grad()
def quantize_dequantize(x: Tensor, quantizer: Quantizer) -> Tensor:
    """Return x rounded to fp8 under the quantizer's scale and multiplied by 1 / scale. float32, x's shape.

    x: float32, or bfloat16 or float16, of any shape. Delayed scaling records x's amax for the steps to come.
    """
    return _quantize_dequantize_together([x], quantizer)[0]


@paddle.no_grad()
def _quantize_dequantize_together(tensors: Sequence[Tensor], quantizer: Quantizer) -> list[Tensor]:
    """Do the same to several tensors, under one scale."""
    tensors = [x.astype("float32") for x in tensors]
    amax = functools.reduce(paddle.maximum, map(_amax, tensors))
    quantizer.record_amax(amax)
    scale = quantizer.scale if quantizer.kind == "delayed" else scale_from_amax(amax, quantizer.fp8_max)
    return [_rounded(x, scale, quantizer) * divide(1.0, scale) for x in tensors]


def _rounded(x: Tensor, scale: Tensor, quantizer: Quantizer) -> Tensor:
    """Return x · scale rounded to fp8, x in float32, and count it where the quantizer has a Record."""
    rounded = round_to_fp8(x * scale, quantizer.dtype)
    if quantizer.statistics is not None:
        quantizer.statistics.add(x.numpy(), scale.numpy(), rounded.numpy(), quantizer.fp8_max)
    return rounded


@paddle.no_grad()
def quantize_dequantize_blocks(x: Tensor, quantizer: Quantizer, columnwise: bool = False) -> Tensor:
    """Do as quantize_dequantize, with block scaling.

    x: [..., cols]. quantizer: with a BlockScaling. columnwise: for a GEMM that sums over the rows. Bit for bit TE
    2.20's common/transpose/quantize_transpose_{vector,square}_blockwise.cu, where the values are not subnormal.
    Raises ValueError where 128 does not divide cols, or the rows if blocks lie across them.
    """
    assert isinstance(quantizer.scaling, BlockScaling)
    blocks, scale = _blocks_and_scales(x, quantizer.scaling, columnwise)
    # of the two operands the one along the columns is counted
    rounded = round_to_fp8(blocks * scale, quantizer.dtype) if columnwise else _rounded(blocks, scale, quantizer)
    return (rounded * divide(1.0, scale)).reshape(x.shape)


def _blocks_and_scales(x: Tensor, scaling: BlockScaling, columnwise: bool = False) -> tuple[Tensor, Tensor]:
    """Return (blocks, scales) of x under a BlockScaling whose blocks have a rows and b columns.

    blocks: x in float32, [rows / a, a, cols / b, b]. scales: one for each block, [rows / a, 1, cols / b, 1]. columnwise
    and what is raised: as `quantize_dequantize_blocks`.
    """
    cols = x.shape[-1]
    greatest = paddle.finfo(x.dtype).max  # as TE has it: of what is quantized
    across, along = (BLOCK, BLOCK) if scaling.block_scaling_dim == 2 else (BLOCK, 1) if columnwise else (1, BLOCK)
    rows = x.size // cols
    if rows % across or cols % along:
        raise ValueError(f"block scaling needs dimensions divisible by {BLOCK}, not {rows} x {cols}")
    blocks = x.astype("float32").reshape([rows // across, across, cols // along, along])
    amax = _amax(blocks, [1, 3])
    amax = paddle.maximum(amax, paddle.full_like(amax, scaling.amax_epsilon))  # clip would make inf finite
    scale = scale_from_amax(amax, FP8_MAX[scaling.dtype], scaling.power_2_scale, greatest)
    return blocks, scale.reshape([rows // across, 1, cols // along, 1])


@paddle.no_grad()
def rounded_to_mxfp8(x: Tensor) -> Tensor:
    """Return x rounded to MXFP8, in x's dtype; bfloat16 holds the result exactly.

    Each block of 32 neighbours holds e4m3 numbers times one power of 2. It is the least power with which no number is
    beyond 448 (OCP Microscaling Formats 1.0, 2023).

    x: float32, bfloat16 or float16 [..., cols]. Raises ValueError where 32 does not divide cols. Bit for bit what
    paddle_te/native/kernels/mxfp8.cuh restores, where the powers are above 2**-100; a block with a number that is not
    finite is NaN here.
    """
    if x.shape[-1] % MXFP8_BLOCK:
        raise ValueError(f"MXFP8 has blocks of {MXFP8_BLOCK} numbers, which {x.shape[-1]} columns do not divide into")
    blocks = x.astype("float32").reshape([-1, MXFP8_BLOCK])
    scale = scale_from_amax(_amax(blocks, [1]), FP8_MAX["e4m3"], power_2_scale=True).unsqueeze(1)
    finite = blocks.isfinite().all(1, keepdim=True)
    values = round_to_fp8(blocks * scale, "e4m3") * divide(1.0, scale)
    return paddle.where(finite, values, paddle.full_like(values, float("nan"))).reshape(x.shape).astype(x.dtype)


def operands(x: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    """Return x as a GEMM that sums over its columns reads it, and as one that sums over its rows does."""
    if not isinstance(quantizer.scaling, BlockScaling):
        return (quantize_dequantize(x, quantizer),) * 2
    if quantizer.scaling.block_scaling_dim == 2:
        return (quantize_dequantize_blocks(x, quantizer),) * 2
    return quantize_dequantize_blocks(x, quantizer), quantize_dequantize_blocks(x, quantizer, columnwise=True)


class _EmulatedFP8Linear(PyLayer):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, quantizers: GemmQuantizers, transpose_y: bool) -> Tensor:
        ctx.quantizers, ctx.transpose_y = quantizers, transpose_y
        ctx.dtypes = x.dtype, weight.dtype
        ctx.needs_grad = not x.stop_gradient, not weight.stop_gradient
        x8, x8_columnwise = operands(x, quantizers.input)
        if isinstance(quantizers.weight, StoredWeight):
            weight8 = dequantize_weight(weight, quantizers.weight)
            kept = weight  # a copy of every weight in float32 would be what storing in fp8 spares
        else:
            # the same scale gives the same values in every micro-batch: nothing to gain from quantizers.cache_weight
            kept = weight8 = operands(weight, quantizers.weight)[0]
        ctx.save_for_backward(x8_columnwise, kept)
        return paddle.matmul(x8, weight8, transpose_y=transpose_y).astype(x.dtype)

    @staticmethod
    def backward(  # type: ignore[override]  # Paddle gives it the gradients of forward's results
        ctx: Any, dy: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        x8, kept = ctx.saved_tensor()
        of_weight = ctx.quantizers.weight
        weight8 = dequantize_weight(kept, of_weight) if isinstance(of_weight, StoredWeight) else kept
        dy8, dy8_columnwise = operands(dy, ctx.quantizers.grad_output)
        dx = dweight = None  # Paddle wants None for what needs no gradient
        if ctx.needs_grad[0]:
            dx = paddle.matmul(dy8, weight8, transpose_y=not ctx.transpose_y).astype(ctx.dtypes[0])
        if ctx.needs_grad[1]:
            tokens = x8.size // x8.shape[-1]
            rows, columns = (dy8_columnwise, x8) if ctx.transpose_y else (x8, dy8_columnwise)
            dweight = paddle.matmul(rows.reshape([tokens, -1]), columns.reshape([tokens, -1]), transpose_x=True)
            dweight = dweight.astype(ctx.dtypes[1])
        ctx.quantizers.forward_pass.backward_done()
        return dx, dweight


def emulated_fp8_linear(x: Tensor, weight: Tensor, quantizers: GemmQuantizers, transpose_y: bool = True) -> Tensor:
    """Return x · weightᵀ with all operands rounded to fp8, forward and backward, products summed in float32.

    x: [..., in], weight: [out, in], or [in, out] without transpose_y, result [..., out] in x's dtype. quantizers:
    GemmQuantizers. y = q(x) · q(weight)ᵀ, dx = q(dy) · q(weight), dweight = q(dy)ᵀ · q(x), where q is
    `quantize_dequantize`; a weight [in, out] and its gradient are the transposes of those. With block scaling q is
    `quantize_dequantize_blocks`, columnwise for dweight. Of a weight that exists in fp8 only, uint8 [out, in], q is
    `dequantize_weight`.
    """
    return _EmulatedFP8Linear.apply(x, weight, quantizers, transpose_y)


class _EmulatedFP8Attention(PyLayer):
    """Causal attention with a rounding to fp8 wherever cuDNN's kernels have one, on float32 [b, h_kv, h / h_kv, s, d].

    The graphs are those of sdpa_fp8 and sdpa_fp8_backward in NVIDIA's cudnn-frontend, with which TE 2.20's
    common/fused_attn/fused_attn_fp8.cu calls cuDNN.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, quantizers: Sequence[GemmQuantizers]
    ) -> Tensor:
        b, s, h_kv, d = k.shape
        of_qkv, of_softmax, of_out = (quantizer.input for quantizer in quantizers)
        heads = lambda x: x.transpose([0, 2, 1, 3]).reshape([b, h_kv, -1, s, d])  # noqa: E731
        q8, k8, v8 = map(heads, _quantize_dequantize_together((q, k, v), of_qkv))
        scores = _causal_scores(q8, k8, scale)
        greatest = scores.max(-1, keepdim=True)
        statistics = greatest + (scores - greatest).exp().sum(-1, keepdim=True).log()
        softmax8 = quantize_dequantize((scores - statistics).exp(), of_softmax)
        out8 = quantize_dequantize(paddle.matmul(softmax8, v8), of_out)
        in_fp8 = has_fp8_backward(quantizers)
        kept = (q8, k8, v8) if in_fp8 else [heads(x.astype("float32")) for x in (q, k, v)]
        ctx.save_for_backward(*kept, statistics, out8)
        ctx.options = scale, quantizers, in_fp8, heads, q.dtype, [not x.stop_gradient for x in (q, k, v)]
        return _tokens(out8).astype(q.dtype)

    @staticmethod
    def backward(  # type: ignore[override]  # Paddle gives it the gradients of forward's results
        ctx: Any, dout: Tensor
    ) -> tuple[Tensor | None, ...]:
        q, k, v, statistics, out = ctx.saved_tensor()
        scale, quantizers, in_fp8, heads, dtype, needs = ctx.options
        cast = quantize_dequantize if in_fp8 else lambda x, _: x
        of_qkv, of_softmax, of_out = (quantizer.grad_output for quantizer in quantizers)
        dout = heads(cast(dout.astype("float32"), of_out))
        softmax = (_causal_scores(q, k, scale) - statistics).exp()
        dsoftmax = paddle.matmul(dout, v, transpose_y=True)
        dscores = cast(softmax * (dsoftmax - (dout * out).sum(-1, keepdim=True)) * scale, of_softmax)
        dv = paddle.matmul(cast(softmax, quantizers[1].input), dout, transpose_x=True)
        dq, dk = paddle.matmul(dscores, k), paddle.matmul(dscores, q, transpose_x=True)
        gradients = [dq, *(x.sum(2, keepdim=True) for x in (dk, dv))]
        if in_fp8:
            gradients = _quantize_dequantize_together(gradients, of_qkv)
        gradients = [_tokens(x).astype(dtype) for x in gradients]
        quantizers[0].forward_pass.backward_done()
        return tuple(x if needed else None for x, needed in zip(gradients, needs, strict=True))


def _causal_scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return q·kᵀ·scale, -inf where a token comes later."""
    s = q.shape[-2]
    later = paddle.triu(paddle.full([s, s], float("-inf")), diagonal=1)
    return paddle.matmul(q, k, transpose_y=True) * scale + later


def _tokens(x: Tensor) -> Tensor:
    """Return [b, s, h, d] of [b, h_kv, group, s, d]."""
    return x.flatten(1, 2).transpose([0, 2, 1, 3])


def emulated_fp8_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, quantizers: Sequence[GemmQuantizers]
) -> Tensor:
    """Return causal softmax(q·kᵀ·scale)·v, all operands rounded to fp8, forward and (fp8_dpa_bwd) backward.

    q: [b, s, h, d]; k, v: [b, s, h_kv, d]; result like q. quantizers: GemmQuantizers of q, k and v (under one scale),
    of the softmax and of the output. Without fp8_dpa_bwd backward takes q, k, v as they came, and the rounded output.
    """
    return _EmulatedFP8Attention.apply(q, k, v, scale, quantizers)
