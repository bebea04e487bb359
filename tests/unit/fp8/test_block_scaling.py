"""The emulation of block scaling against NumPy, to the bit."""

import numpy as np
import paddle
import pytest

from paddle_te.fp8 import Float8BlockScaling, Format, ModuleScaling, amax_and_scale_update, fp8_autocast
from paddle_te.fp8.emulation import emulated_fp8_linear, quantize_dequantize_blocks
from tests import block_scaling
from tests.bfloat16 import truncated

power_2_scales = pytest.mark.parametrize("power_2_scale", [True, False], ids=["power_2", "float"])


def quantizers(recipe):
    with fp8_autocast(fp8_recipe=recipe):
        return ModuleScaling(1, amax_and_scale_update).begin_forward()[0]


def draw(seed, *shape):
    """Numbers that bfloat16 holds, each block and each row in a magnitude of its own."""
    generator = np.random.default_rng(seed)
    x = generator.standard_normal(shape) * np.exp2(generator.integers(-20, 20, (*shape[:-1], 1)))
    return truncated((x * np.repeat(np.exp2(generator.integers(-9, 9, shape[-1] // 128)), 128)).astype("float32"))


@power_2_scales
@pytest.mark.parametrize("fp8_format", Format)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks(power_2_scale, fp8_format, dtype, seed):
    recipe = Float8BlockScaling(fp8_format, power_2_scale)
    values = draw(seed, 2, 192, 256)
    values[0, 3] = values[1, :128, 128:] = 0  # blocks of nothing but zeros
    values[1, 140, 7] = np.nan  # which TE's amax passes over
    x, rows = paddle.to_tensor(values).astype(dtype), values.reshape(384, 256)
    of = quantizers(recipe)
    for name, columnwise, block in [
        ("input", False, (1, 128)),
        ("input", True, (128, 1)),
        ("weight", False, (128, 128)),
        ("grad_output", False, (1, 128)),
        ("grad_output", True, (128, 1)),
    ]:
        quantizer = getattr(of, name)
        got = quantize_dequantize_blocks(x, quantizer, columnwise)
        assert got.dtype == paddle.float32 and got.shape == x.shape
        want = block_scaling.quantized(rows, block, power_2_scale, quantizer.dtype, dtype=dtype)
        np.testing.assert_array_equal(got.numpy().reshape(rows.shape), want, err_msg=f"{name}, {block}")


@power_2_scales
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [0.0, 1e-30, 3e38, np.inf])
def test_extreme_blocks(power_2_scale, dtype, value):
    """The greatest bfloat16, and where the scale would be beyond float32."""
    x = truncated(np.full((128, 128), value, "float32"))
    for epsilon in 0.0, 2.0**-10:
        of_input = quantizers(Float8BlockScaling(power_2_scale=power_2_scale, amax_epsilon=epsilon)).input
        got = quantize_dequantize_blocks(paddle.to_tensor(x).astype(dtype), of_input)
        want = block_scaling.quantized(x, (1, 128), power_2_scale, epsilon=epsilon, dtype=dtype)
        np.testing.assert_array_equal(got.numpy(), want)


@power_2_scales
@pytest.mark.parametrize("transpose_y", [True, False])
def test_linear(power_2_scale, transpose_y, seed):
    """Both gradients, of which that of the weight is of other blocks than y and dx."""
    generator = np.random.default_rng(seed)
    x, weight, dy = (
        truncated(generator.standard_normal(s).astype("float32")) for s in ((128, 256), (384, 256), (128, 384))
    )
    want = block_scaling.gemms(x, weight, dy, power_2_scale, dtype="float32")
    inputs = [paddle.to_tensor(values) for values in (x, weight if transpose_y else weight.T)]
    for tensor in inputs:
        tensor.stop_gradient = False
    y = emulated_fp8_linear(*inputs, quantizers(Float8BlockScaling(power_2_scale=power_2_scale)), transpose_y)
    y.backward(paddle.to_tensor(dy))
    got = y, inputs[0].grad, inputs[1].grad if transpose_y else inputs[1].grad.T
    for name, mine, reference in zip(("y", "dx", "dW"), got, want, strict=True):
        # sums of at most 384 products in float32
        bound = 384 * 2.0**-24 * np.sqrt(np.square(reference).mean()) * 30
        np.testing.assert_allclose(mine.numpy(), reference, rtol=0, atol=bound, err_msg=name)


def test_sizes_that_do_not_divide():
    quantizer = quantizers(Float8BlockScaling())
    for shape, columnwise, name in (
        ((128, 192), False, "input"),
        ((64, 128), True, "input"),
        ((64, 128), False, "weight"),
    ):
        with pytest.raises(ValueError, match=f"divisible by 128, not {shape[0]} x {shape[1]}"):
            quantize_dequantize_blocks(paddle.zeros(shape), getattr(quantizer, name), columnwise)
