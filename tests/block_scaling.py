"""Block scaling in NumPy, written down independently of the package: rounding by ml_dtypes, powers of 2 by frexp."""

import ml_dtypes
import numpy as np

FLOAT8 = {"e4m3": (ml_dtypes.float8_e4m3fn, 448), "e5m2": (ml_dtypes.float8_e5m2, 57344)}
GREATEST = {"float32": np.finfo(np.float32).max, "bfloat16": ml_dtypes.finfo(ml_dtypes.bfloat16).max}


def scale_of(amax, fp8_max, power_2_scale, dtype):
    """A block's scale, from its amax, a float32 number."""
    if amax == 0 or not np.isfinite(amax):
        return np.float32(1)
    with np.errstate(over="ignore"):
        scale = np.float32(fp8_max) / np.float32(amax)
    scale = scale if np.isfinite(scale) else np.float32(GREATEST[dtype])
    return np.float32(2.0 ** (np.frexp(scale)[1] - 1)) if power_2_scale else scale


def quantized(x, block, power_2_scale, fp8="e4m3", epsilon=0.0, dtype="bfloat16"):
    """float32 [rows, cols] as fp8 has it, block by block. block: its shape. dtype: what x's numbers came in."""
    (float8, fp8_max), (height, width), out = FLOAT8[fp8], block, np.empty_like(x)
    for row in range(0, x.shape[0], height):
        for col in range(0, x.shape[1], width):
            here = np.s_[row : row + height, col : col + width]
            amax = max(np.fmax.reduce(np.abs(x[here]), axis=None, initial=0), np.float32(epsilon))
            scale = scale_of(amax, fp8_max, power_2_scale, dtype)
            values = np.clip(x[here] * scale, -fp8_max, fp8_max).astype(float8).astype(np.float32)
            out[here] = values * (np.float32(1) / scale)
    return out


def gemms(x, weight, dy, power_2_scale, grad_dtype="e4m3", **options):
    """(y, dx, dW) of y = x · weightᵀ in float64 of rounded operands. Shapes: [tokens, in], [out, in], [tokens, out]."""

    def of(values, block, fp8="e4m3"):
        return quantized(values, block, power_2_scale, fp8, **options).astype("float64")

    weight8 = of(weight, (128, 128))
    y = of(x, (1, 128)) @ weight8.T
    dx = of(dy, (1, 128), grad_dtype) @ weight8
    return y, dx, of(dy, (128, 1), grad_dtype).T @ of(x, (128, 1))
