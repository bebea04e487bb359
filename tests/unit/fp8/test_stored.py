"""Weights that exist in fp8 only: their bytes against ml_dtypes' e4m3, and what is refused."""

import copy

import ml_dtypes
import numpy as np
import paddle
import pytest

from paddle_te.fp8 import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    StoredWeight,
    fp8_autocast,
    fp8_model_init,
    stored_scaling,
)
from paddle_te.fp8.emulation import dequantize_weight
from paddle_te.layers import LayerNormMLP, Linear
from paddle_te.ops import get_ops
from tests import emulated_te
from tests.poison import poison_allocations


def reference(values):
    """(the bytes, scale_inv) under the scale that brings the greatest number to e4m3's greatest."""
    scale = np.float32(448) / np.abs(values).max()
    return (values * scale).astype(ml_dtypes.float8_e4m3fn).view(np.uint8), np.float32(1) / scale


@pytest.mark.parametrize("backend, dtype", [("paddle", "float32"), ("transformer_engine", "bfloat16")])
def test_bytes(monkeypatch, seed, backend, dtype):
    emulated_te.install(monkeypatch.setattr)
    values = np.random.standard_normal([48, 80]) * 10.0 ** np.random.uniform(-6, 0, [48, 80])
    source = paddle.to_tensor(values.astype("float32")).astype(dtype)
    weight, stored = paddle.zeros([48, 80], "uint8"), StoredWeight()
    get_ops(backend).quantize_weight(source, weight, stored)
    codes, scale_inv = reference(source.astype("float32").numpy())
    codes = np.where(codes == 128, weight.numpy() & 128, codes)  # Paddle's zeros are positive
    np.testing.assert_array_equal(weight.numpy(), codes)
    np.testing.assert_allclose(stored.scale_inv.numpy(), [scale_inv], rtol=1e-6)


def block_reference(values, power_2_scale):
    """(the bytes, scale_inv [rows / 128, cols / 128]) under scales of 128 x 128 numbers."""
    blocks = values.reshape([values.shape[0] // 128, 128, -1, 128])
    scale = np.float32(448) / np.abs(blocks).max((1, 3), keepdims=True)
    if power_2_scale:
        scale = np.exp2(np.floor(np.log2(scale)))
    codes = (blocks * scale).astype(ml_dtypes.float8_e4m3fn).view(np.uint8).reshape(values.shape)
    return codes, np.float32(1) / scale.squeeze((1, 3))


@pytest.mark.parametrize("power_2_scale", [True, False])
@pytest.mark.parametrize("backend, dtype", [("paddle", "float32"), ("transformer_engine", "bfloat16")])
def test_bytes_in_blocks(monkeypatch, seed, backend, dtype, power_2_scale):
    """te's scales lie as cuBLAS reads them: rows of scales are filled up to multiples of 4, and behind those of the
    data come those of its transpose, from a multiple of 256 bytes on."""
    emulated_te.install(monkeypatch.setattr)
    poison_allocations(monkeypatch)
    values = np.random.standard_normal([256, 640]) * np.repeat(10.0 ** np.random.uniform(-3, 3, [256, 5]), 128, 1)
    source = paddle.to_tensor(values.astype("float32")).astype(dtype)
    weight, stored = paddle.zeros([256, 640], "uint8"), StoredWeight(Float8BlockScaling(power_2_scale=power_2_scale))
    get_ops(backend).quantize_weight(source, weight, stored)
    codes, scale_inv = block_reference(source.astype("float32").numpy(), power_2_scale)
    codes = np.where(codes == 128, weight.numpy() & 128, codes)  # Paddle's zeros are positive
    np.testing.assert_array_equal(weight.numpy(), codes)
    found = stored.scale_inv.numpy()
    if backend == "paddle":
        np.testing.assert_allclose(found, scale_inv, rtol=1e-6)
        want = codes.view(ml_dtypes.float8_e4m3fn).astype("float32") * scale_inv.repeat(128, 0).repeat(128, 1)
        np.testing.assert_allclose(dequantize_weight(weight, stored).numpy(), want, rtol=1e-6)
    else:
        assert found.size == 2 * 64
        np.testing.assert_allclose(found[: 2 * 8].reshape([2, 8])[:, :5], scale_inv, rtol=1e-6)
        np.testing.assert_allclose(found[64 : 64 + 5 * 4].reshape([5, 4])[:, :2], scale_inv.T, rtol=1e-6)


def test_what_each_byte_stands_for():
    codes, stored = np.arange(256, dtype=np.uint8), StoredWeight()
    stored.scale_inv.set_value(paddle.to_tensor([0.25]))
    got = dequantize_weight(paddle.to_tensor(codes.reshape([16, 16])), stored).numpy()
    want = codes.view(ml_dtypes.float8_e4m3fn).astype("float32").reshape([16, 16])
    np.testing.assert_array_equal(got, want / 4)


def test_other_bytes_are_called_otherwise():
    """A checkpoint says so, and is not resumed over others."""
    recipes = [DelayedScaling(), *(Float8BlockScaling(power_2_scale=power) for power in (True, False))]
    recipes.append(Float8BlockScaling(amax_epsilon=1e-4))
    names = [stored_scaling(recipe).words for recipe in recipes]
    assert len({*names}) == len(names) and stored_scaling(Float8CurrentScaling()).words == names[0] == "fp8"


def test_a_layer_is_made_with_them(seed):
    """From the numbers that its initializer draws, and a copy has scales of its own."""
    paddle.seed(seed)
    plain = LayerNormMLP(64, 96, params_dtype="float32", backend="paddle")
    paddle.seed(seed)
    with fp8_model_init():
        layer = LayerNormMLP(64, 96, params_dtype="float32", backend="paddle")
    with fp8_model_init(enabled=False):
        assert Linear(8, 8, params_dtype="float32", backend="paddle").stored_weights == ()
    again = copy.deepcopy(layer)
    for stored in layer.fp8.stored:
        stored.scale_inv.set_value(paddle.to_tensor([0.0]))
    for name, scale in zip(layer.stored_weights, again.fp8.stored, strict=True):
        weight = getattr(again, name)
        assert weight.element_size() == 1 and weight.stop_gradient
        values = getattr(plain, name).numpy()
        # half a step of e4m3's 3 bits of mantissa, and of its smallest numbers
        bound = np.maximum(np.abs(values) / 16, np.abs(values).max() / 448 * 2.0**-10) * (1 + 1e-6)
        assert (np.abs(dequantize_weight(weight, scale).numpy() - values) <= bound).all()


def test_where_they_are_refused():
    with fp8_model_init():
        layer = Linear(128, 128, params_dtype="float32", backend="paddle")
    with pytest.raises(RuntimeError, match="exist in fp8 only: compute inside fp8_autocast"):
        layer(paddle.ones([128, 128]))
    blocks = Float8BlockScaling()
    with fp8_model_init(recipe=blocks):
        in_blocks = Linear(128, 128, params_dtype="float32", backend="paddle")
        with pytest.raises(ValueError, match="whose sizes 128 divides, and weight is \\[64, 128\\] on a rank"):
            Linear(128, 64, params_dtype="float32", backend="paddle")
    for made, recipe, scales in ((layer, blocks, "one scale"), (in_blocks, None, "a scale for each block")):
        with pytest.raises(RuntimeError, match=f"{scales}, cannot be .* under .*Scaling: give fp8_model_init"):
            with fp8_autocast(fp8_recipe=recipe):
                made(paddle.ones([128, 128]))
    with pytest.raises(TypeError, match="recipe='block'; it must be an object of one of"):
        fp8_model_init(recipe="block")
