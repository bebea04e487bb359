"""te's layers with TE's kernels emulated in NumPy (tests/emulated_te.py): their logic, on any machine.

tests/gpu/test_layers.py, whose cases these are, asks the same of the real library on a GPU.
"""

import paddle
import pytest

from paddle_te import fp8
from tests import emulated_te
from tests.gpu.test_layers import KINDS, RECIPES, case, check_main_gradients, make, relative, run, te
from tests.poison import poison_allocations


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    emulated_te.install(monkeypatch.setattr)
    poison_allocations(monkeypatch)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_bf16(seed, kind, kv_heads):
    values, inputs, grads, truth = case(kind, 4, kv_heads, 2, 24, seed)
    got = run(te(kind, 4, kv_heads), values, inputs, grads, "bfloat16")
    assert got.keys() == truth.keys()
    for name, want in truth.items():
        assert relative(got[name], want) < 2e-2, name


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind, kv_heads", [("linear", 4), ("transformer", 4), ("transformer", 2)])
def test_fp8(seed, kind, kv_heads, recipe):
    values, inputs, grads, truth = case(kind, 4, kv_heads, 2, 32, seed)
    emulated_layer, _ = make(kind, 4, kv_heads, backend="paddle", params_dtype="float32")
    emulated = run(emulated_layer, values, inputs, grads, "float32", RECIPES[recipe], steps=3)
    got = run(te(kind, 4, kv_heads), values, inputs, grads, "bfloat16", RECIPES[recipe], steps=3)
    for name, want in truth.items():
        error, bound = relative(got[name], want), relative(emulated[name], want)
        assert error <= 1.2 * bound + 1e-2, (name, error, bound)
        assert bound > 1e-2 or error < 2e-2, (name, error, bound)


@pytest.mark.parametrize("recipe", [None, "delayed", "current"])
def test_main_gradients_accumulate_inside_the_gemms(seed, recipe):
    check_main_gradients("cpu", case("transformer", 4, 2, 2, 32, seed), RECIPES.get(recipe))


@pytest.mark.parametrize("recipe", [None, "delayed", "current"])
@pytest.mark.parametrize("frozen", ["input", "weights", "norms"])
def test_what_is_frozen_gets_no_gradient_and_changes_no_other(seed, frozen, recipe):
    values, inputs, grads, _ = case("transformer", 4, 4, 2, 32, seed)
    want = run(te("transformer", 4, 4), values, inputs, grads, "bfloat16", RECIPES.get(recipe))
    layer = te("transformer", 4, 4)
    for name, parameter in layer.named_parameters():
        parameter.set_value(paddle.to_tensor(values[name]).astype("bfloat16"))
        parameter.stop_gradient = frozen == ("weights" if parameter.ndim == 2 else "norms")
    x = paddle.to_tensor(inputs[0]).astype("bfloat16").detach()
    x.stop_gradient = frozen == "input"
    with fp8.fp8_autocast(recipe is not None, RECIPES.get(recipe)):
        layer(x).backward(paddle.to_tensor(grads[0]).astype("bfloat16"))
    got = {f"d{name}": p for name, p in layer.named_parameters()} | {"dx0": x}
    for name, tensor in got.items():
        assert (tensor.grad is None) == tensor.stop_gradient, name
        if tensor.grad is not None:
            assert (tensor.grad.astype("float32").numpy() == want[name]).all(), name
