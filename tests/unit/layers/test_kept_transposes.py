"""Transposed copies that are kept beside weights in fp8 only: backward makes none, and no bit changes."""

import copy

import numpy as np
import paddle
import pytest

from paddle_te import fp8
from paddle_te.layers import LayerNormMLP, Linear
from paddle_te.ops.te import program
from paddle_te.ops.te.counting import count_entry_points
from tests import emulated_te, moe_lora_cases, stored_input_cases
from tests.poison import poison_allocations
from tests.stored_input_cases import AGAIN, RECIPES, STORED

OPTIONS = {
    "": {},
    "parts again": STORED | AGAIN,
    "the MLP again": dict(recompute_modules=("layernorm", "mlp")),
    "in chunks": dict(mlp_chunk_tokens=32),
}
TE = "transformer_engine"


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    emulated_te.install(monkeypatch.setattr)
    poison_allocations(monkeypatch)
    program.clear()


def transposes(counts):
    return sum(count for (name, _), count in counts.items() if name == "transpose")


def two_steps(layer, step):
    """(what the second step gives, how many transposes it makes)."""
    step(layer)
    layer.clear_gradients()
    with count_entry_points() as counts:
        found = step(layer)
    return found, transposes(counts)


def check(step, made, kept):
    """Steps of two layers have the same bits, and the second layer makes no transposes."""
    (want, some), (got, none) = two_steps(made, step), two_steps(kept, step)
    assert some > none == 0 and want.keys() == got.keys()
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)


@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_layer_with_lora(seed, options, recipe):
    x, dy = stored_input_cases.inputs(seed, TE)

    def step(layer):
        x.clear_gradient()
        y = stored_input_cases.forward(layer, x, RECIPES[recipe])
        y.backward(dy)
        found = {"y": y, "dx": x.grad} | {n: p.grad for n, p in layer.named_parameters() if not p.stop_gradient}
        return {name: value.astype("float32").numpy() for name, value in found.items()}

    given = seed, TE, RECIPES[recipe], "lora over fp8"
    check(step, *(stored_input_cases.make(*given, keeps, **OPTIONS[options]) for keeps in (False, True)))


@pytest.mark.parametrize("case", ["all", "shared"])
def test_experts_with_lora(case):
    seed = moe_lora_cases.SEED
    layers = [moe_lora_cases.make(TE, "bfloat16", seed, case, "current", True, keeps) for keeps in (False, True)]
    check(lambda layer: moe_lora_cases.step(layer, seed, "current"), *layers)


def linear(weight, recipe=None):
    """A layer with that weight in fp8, which keeps the transposed copy."""
    with fp8.fp8_model_init(True, recipe, keep_transpose_cache=True):
        layer = Linear(128, 256, params_dtype="bfloat16", backend=TE)
    layer.store_weight("weight", weight)
    return layer


def gradient(layer, recipe=None):
    x = paddle.ones([16 if recipe is None else 128, 128]).astype("bfloat16").detach()
    x.stop_gradient = False
    with fp8.fp8_autocast(True, recipe):
        layer(x).sum().backward()
    return x.grad.astype("float32").numpy()


@pytest.mark.parametrize("recipe", [None, fp8.Float8BlockScaling()], ids=["a scale", "blocks"])
def test_other_weights_have_other_copies(seed, recipe):
    """Also where a backward has read the ones before; a layer's copy reads its own."""
    paddle.seed(seed)
    first, second = (paddle.randn([256, 128]).astype("bfloat16") for _ in range(2))
    layer = linear(first, recipe)
    before, again = gradient(layer, recipe), copy.deepcopy(layer)
    layer.store_weight("weight", second)
    np.testing.assert_array_equal(gradient(layer, recipe), gradient(linear(second, recipe), recipe))
    assert (gradient(layer, recipe) != before).any()
    np.testing.assert_array_equal(gradient(again, recipe), before)


def test_a_weights_copy_is_made_once_and_is_no_parameter(seed):
    paddle.seed(seed)
    layer = linear(paddle.randn([256, 128]).astype("bfloat16"))
    (stored,) = layer.fp8.stored
    kept = stored.transpose
    np.testing.assert_array_equal(kept.numpy(), layer.weight.numpy().T)
    with count_entry_points() as counts:
        for _ in range(2):
            gradient(layer)
    assert transposes(counts) == 0 and stored.transpose is kept
    assert [*layer.state_dict()] == ["weight"]


@pytest.mark.parametrize("backend, keeps", [("paddle", True), (TE, False)])
def test_where_there_is_none(backend, keeps):
    """Backend paddle reads none, and the next layers made outside have none."""
    with fp8.fp8_model_init(keep_transpose_cache=True), fp8.fp8_model_init(keep_transpose_cache=keeps):
        layer = LayerNormMLP(64, 96, params_dtype="bfloat16" if backend == TE else "float32", backend=backend)
    assert [stored.transpose for stored in layer.fp8.stored] == [None, None]
