"""The emulation against ml_dtypes' fp8 types, bit for bit."""

import ml_dtypes
import numpy as np
import paddle
import pytest

from paddle_te.fp8 import DelayedScaling, Float8CurrentScaling, Format, ModuleScaling, fp8_autocast
from paddle_te.fp8.emulation import emulated_fp8_linear, quantize_dequantize, round_to_fp8, scale_from_amax

TYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
MAX = {"e4m3": 448.0, "e5m2": 57344.0}
dtypes = pytest.mark.parametrize("dtype", TYPES)


def reference_rounding(x, dtype):
    # ml_dtypes turns what is too large into NaN or infinity; TE saturates first
    with np.errstate(invalid="ignore"):  # NaN is meant
        return np.clip(x, -MAX[dtype], MAX[dtype]).astype(TYPES[dtype]).astype(np.float32)


def rounded(x, dtype):
    return round_to_fp8(paddle.to_tensor(x), dtype).numpy()


@dtypes
def test_all_256_codes_stay_themselves(dtype):
    codes = np.arange(256, dtype=np.uint8).view(TYPES[dtype]).astype(np.float32)
    codes = codes[~np.isinf(codes)]
    np.testing.assert_array_equal(rounded(codes, dtype), codes)


@dtypes
def test_neighbours_of_every_tie(dtype):
    codes = np.arange(256, dtype=np.uint8).view(TYPES[dtype]).astype(np.float32)
    codes = np.unique(codes[np.isfinite(codes)])
    ties = (codes[1:] + codes[:-1]) / 2
    x = np.concatenate([ties, np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf))])
    np.testing.assert_array_equal(rounded(x, dtype), reference_rounding(x, dtype))


@dtypes
def test_random_numbers_of_every_magnitude(dtype, seed):
    x = np.random.randint(0, 2**32, 1 << 20, dtype=np.uint32).view(np.float32)  # every bit pattern of float32
    moderate = np.ldexp(np.random.uniform(-1, 1, 1 << 20), np.random.randint(-20, 18, 1 << 20)).astype(np.float32)
    for values in (x, moderate):
        np.testing.assert_array_equal(rounded(values, dtype), reference_rounding(values, dtype))


@dtypes
def test_special_values(dtype):
    top = MAX[dtype]
    x = np.float32([np.inf, -np.inf, np.nan, 3e38, top * 1.04, 0.0, 1e-40, -1e-40])
    np.testing.assert_array_equal(rounded(x, dtype), np.float32([top, -top, np.nan, top, top, 0, 0, 0]))


@dtypes
def test_current_scaling_scale(dtype, seed):
    amax = np.exp(np.random.uniform(-80, 80, 20000)).astype(np.float32)
    scale = scale_from_amax(paddle.to_tensor(amax), MAX[dtype]).numpy()
    expected = MAX[dtype] / amax.astype(np.float64)
    np.testing.assert_array_equal(scale, np.minimum(expected, np.finfo(np.float32).max).astype(np.float32))
    special = scale_from_amax(paddle.to_tensor(np.float32([0, np.inf, np.nan, 1e-38])), MAX[dtype]).numpy()
    np.testing.assert_array_equal(special, np.float32([1, 1, 1, np.finfo(np.float32).max]))


def quantizers(recipe, training=True, scaling=None, **kwargs):
    scaling = scaling or ModuleScaling(1, "paddle")
    with fp8_autocast(fp8_recipe=recipe):
        return scaling.begin_forward(training, **kwargs)[0]


def reference(x, dtype, scale=None):
    """quantize_dequantize in NumPy and ml_dtypes."""
    x = x.astype(np.float32)
    if scale is None:
        scale = np.float32(MAX[dtype]) / np.abs(x).max()
    return reference_rounding(x * scale, dtype) * (np.float32(1) / scale)


@pytest.mark.parametrize("fp8_format", Format)
@pytest.mark.parametrize("x_dtype", ["float32", "bfloat16", "float16"])
def test_quantize_dequantize(fp8_format, x_dtype, seed):
    values = (np.random.randn(37, 53) * np.exp(np.random.uniform(-6, 6))).astype(np.float32)
    x = paddle.to_tensor(values).astype(x_dtype)
    values = x.astype("float32").numpy()
    current, delayed = quantizers(Float8CurrentScaling(fp8_format)), quantizers(DelayedScaling(fp8_format=fp8_format))
    backward = fp8_format.value.backward
    for name, dtype in (("input", "e4m3"), ("weight", "e4m3"), ("grad_output", backward)):
        got = quantize_dequantize(x, getattr(current, name))
        assert got.dtype == paddle.float32
        np.testing.assert_array_equal(got.numpy(), reference(values, dtype))
        got = quantize_dequantize(x, getattr(delayed, name))  # the first step's scale is 1
        np.testing.assert_array_equal(got.numpy(), reference(values, dtype, np.float32(1)))


def test_zeros_empty_tensors_and_nan():
    quantizer = quantizers(Float8CurrentScaling()).input
    assert not quantize_dequantize(paddle.zeros([3, 4]), quantizer).numpy().any()
    assert quantize_dequantize(paddle.zeros([0, 4]), quantizer).shape == [0, 4]
    got = quantize_dequantize(paddle.to_tensor([float("nan"), 2.0, -1.0]), quantizer).numpy()  # NaN is no amax
    np.testing.assert_array_equal(got, np.float32([np.nan, 2, -1]))


@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), Float8CurrentScaling(Format.E4M3), DelayedScaling()])
@pytest.mark.parametrize("x_dtype", ["float32", "bfloat16"])
def test_linear(recipe, x_dtype, seed):
    x = paddle.randn([2, 5, 48]).astype(x_dtype)
    weight = paddle.randn([32, 48]).astype(x_dtype)
    dy = paddle.randn([2, 5, 32]).astype(x_dtype)
    x.stop_gradient = weight.stop_gradient = False
    y = emulated_fp8_linear(x, weight, quantizers(recipe))
    y.backward(dy)
    assert [t.dtype for t in (y, x.grad, weight.grad)] == [x.dtype] * 3

    scale = np.float32(1) if recipe.kind == "delayed" else None
    values = [t.astype("float32").numpy() for t in (x, weight, dy)]
    backward = recipe.fp8_format.value.backward
    x8, w8, dy8 = (
        reference(v, d, scale).astype(np.float64) for v, d in zip(values, ["e4m3", "e4m3", backward], strict=True)
    )
    tolerance = dict(rtol=1e-5, atol=1e-4) if x_dtype == "float32" else dict(rtol=2**-8, atol=1e-3)
    for got, expected in (
        (y, x8 @ w8.T),
        (x.grad, dy8 @ w8),
        (weight.grad, dy8.reshape(-1, 32).T @ x8.reshape(-1, 48)),
    ):
        np.testing.assert_allclose(got.astype("float32").numpy(), expected, **tolerance)


def test_linear_is_deterministic_and_without_unneeded_gradients(seed):
    x, weight, dy = paddle.randn([4, 16]), paddle.randn([8, 16]), paddle.randn([4, 8])
    weight.stop_gradient = False
    grads = []
    for _ in range(2):
        weight.clear_grad()
        emulated_fp8_linear(x, weight, quantizers(Float8CurrentScaling())).backward(dy)
        grads.append(weight.grad.numpy())
    assert x.grad is None
    np.testing.assert_array_equal(*grads)
    weight = weight.detach()
    x.stop_gradient = False
    emulated_fp8_linear(x, weight, quantizers(Float8CurrentScaling())).backward(dy)
    assert x.grad is not None and weight.grad is None
