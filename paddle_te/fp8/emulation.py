"""fp8's rounding in float32 arithmetic: what the backend "paddle" computes, and the reference for te's kernels.

Plain elementwise Paddle operations, for any device: Paddle's own float8 casts on the CPU turn 465 and NaN into the
wrong numbers.
"""

import paddle
from paddle.autograd import PyLayer

from .recipe import FP8_MAX
from .state import divide

# dtype -> (bits of the mantissa, smallest normal number), Micikevicius et al., 2022, table 1
_FORMATS = {"e4m3": (3, 2.0**-6), "e5m2": (2, 2.0**-14)}


def round_to_fp8(x, dtype):
    """The fp8 values nearest to x (float32), as float32.

    dtype: "e4m3" or "e5m2". Ties go to even, subnormal numbers included; beyond the largest finite value and at
    infinity that value, NaN stays (CUDA's __NV_SATFINITE, which TE's kernels use). Zeros are positive.
    """
    mantissa_bits, smallest_normal = _FORMATS[dtype]
    x = x.clip(-FP8_MAX[dtype], FP8_MAX[dtype])
    # 2**floor(log2|x|), exact: Rump, Ogita and Oishi, "Accurate floating-point summation I", 2008, algorithm 3.5
    q = x * (2.0**23 + 1)
    binade = (q - q * (1 - 2.0**-24)).abs()
    spacing = binade.clip(min=smallest_normal) * 2.0**-mantissa_bits
    # added to a number whose last bit is worth `spacing`, x is rounded to a multiple of it, ties to even
    shift = spacing * (1.5 * 2.0**23)
    return (x + shift) - shift


def _amax(x):
    """max |x| as a float32 tensor of shape []; passes over NaN, as fmaxf in TE's kernels."""
    if x.size == 0:
        return paddle.zeros([], dtype="float32")
    x = x.abs()
    return paddle.where(x.isnan(), paddle.zeros_like(x), x).max()


def scale_from_amax(amax, fp8_max):
    """Current scaling's scale, a float32 tensor like amax: fp8_max / amax, 1 where amax is 0 or not finite.

    `compute_scale_from_amax` in TE 2.20's common/recipe/recipe_common.cuh, with TE's defaults: no epsilon, no rounding
    to powers of 2.
    """
    ones = paddle.ones_like(amax)
    usable = amax.isfinite() & (amax > 0)
    return paddle.where(usable, divide(fp8_max, paddle.where(usable, amax, ones)), ones)


@paddle.no_grad()
def quantize_dequantize(x, quantizer):
    """x as fp8 sees it: rounded to fp8 under the quantizer's scale and multiplied by 1 / scale. float32, x's shape.

    x: float32, or bfloat16 or float16, of any shape. Delayed scaling records x's amax for the steps to come.
    """
    x = x.astype("float32")
    amax = _amax(x)
    if quantizer.kind == "delayed":
        scale = quantizer.scale
        quantizer.record_amax(amax)
    else:
        scale = scale_from_amax(amax, quantizer.fp8_max)
    return round_to_fp8(x * scale, quantizer.dtype) * divide(1.0, scale)


class _EmulatedFP8Linear(PyLayer):
    @staticmethod
    def forward(ctx, x, weight, quantizers):
        ctx.quantizers = quantizers
        ctx.dtypes = x.dtype, weight.dtype
        ctx.needs_grad = not x.stop_gradient, not weight.stop_gradient
        x8 = quantize_dequantize(x, quantizers.input)
        # the same scale gives the same values in every micro-batch: nothing to gain from quantizers.cache_weight
        weight8 = quantize_dequantize(weight, quantizers.weight)
        ctx.save_for_backward(x8, weight8)
        return paddle.matmul(x8, weight8, transpose_y=True).astype(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        x8, weight8 = ctx.saved_tensor()
        dy8 = quantize_dequantize(dy, ctx.quantizers.grad_output)
        dx = dweight = None  # Paddle wants None for what needs no gradient
        if ctx.needs_grad[0]:
            dx = paddle.matmul(dy8, weight8).astype(ctx.dtypes[0])
        if ctx.needs_grad[1]:
            tokens = x8.size // x8.shape[-1]
            dweight = paddle.matmul(dy8.reshape([tokens, -1]), x8.reshape([tokens, -1]), transpose_x=True)
            dweight = dweight.astype(ctx.dtypes[1])
        ctx.quantizers.module.backward_done()
        return dx, dweight


def emulated_fp8_linear(x, weight, quantizers):
    """x · weightᵀ with all operands rounded to fp8, forward and backward, products summed in float32.

    x: [..., in], weight: [out, in], result [..., out] in x's dtype. quantizers: GemmQuantizers.
    y = q(x) · q(weight)ᵀ, dx = q(dy) · q(weight), dweight = q(dy)ᵀ · q(x), where q is `quantize_dequantize`.
    """
    return _EmulatedFP8Linear.apply(x, weight, quantizers)
