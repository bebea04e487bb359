"""Experts of backend paddle in fp8: the rounding of grouped GEMMs against ml_dtypes, padding, and recompute."""

import ml_dtypes
import numpy as np
import paddle
import pytest

from paddle_te import fp8
from paddle_te.layers.moe import GroupedLinear, MoEConfig, MoELayer
from paddle_te.ops.pd.grouped import rows_of
from tests import block_scaling

IN, OUT, EXPERTS = 128, 256, 3
COUNTS = {"current": [32, 0, 48], "delayed": [32, 0, 48], "block": [128, 0, 256]}
RECIPES = {
    "current": fp8.Float8CurrentScaling(),
    "delayed": fp8.DelayedScaling(amax_history_len=2, first_step="delayed"),
    "block": fp8.Float8BlockScaling(),
}
TYPES = {"e4m3": (ml_dtypes.float8_e4m3fn, 448), "e5m2": (ml_dtypes.float8_e5m2, 57344)}


def rounded(x, kind, scaled=True):
    """float64 of what one scale makes of all experts' numbers together."""
    float8, greatest = TYPES[kind]
    scale = np.float32(greatest / np.abs(x).max()) if scaled else np.float32(1)
    values = np.clip(x * scale, -greatest, greatest).astype(float8)
    return values.astype("float64") * np.float64(np.float32(1) / scale)


def expected(x, weight, dy, counts, recipe):
    """(y, dx, dW), expert by expert."""
    y, dx, dw, start = [], [], [], 0
    if recipe != "block":
        scaled = recipe == "current"  # delayed scaling's first step has scales of 1
        x, weight, dy = rounded(x, "e4m3", scaled), rounded(weight, "e4m3", scaled), rounded(dy, "e5m2", scaled)
    for count, w in zip(counts, weight, strict=True):
        a, b = x[start : start + count], dy[start : start + count]
        parts = (a @ w.T, b @ w, b.T @ a) if recipe != "block" else block_scaling.gemms(a, w, b, True, dtype="float32")
        for list_, part in zip((y, dx, dw), parts, strict=True):
            list_.append(part)
        start += count
    return np.concatenate(y), np.concatenate(dx), np.stack(dw)


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


@pytest.mark.parametrize("recipe", RECIPES)
def test_grouped_linear_rounds_as_each_experts_gemm(recipe, seed):
    counts = COUNTS[recipe]
    x, weight, dy = draw(seed, sum(counts), IN), draw(seed + 1, EXPERTS, OUT, IN), draw(seed + 2, sum(counts), OUT)
    layer = GroupedLinear(EXPERTS, IN, OUT, backend="paddle")
    layer.weight.set_value(paddle.to_tensor(weight))
    given = paddle.to_tensor(x, stop_gradient=False)
    with fp8.fp8_autocast(True, RECIPES[recipe]):
        y = layer(given, counts)
    y.backward(paddle.to_tensor(dy))
    for found, value in zip((y, given.grad, layer.weight.grad), expected(x, weight, dy, counts, recipe), strict=True):
        assert np.linalg.norm(found.numpy() - value) < 2e-6 * np.linalg.norm(value)


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_rows_at_all(recipe):
    """As on a rank to whose experts no token goes."""
    layer, x = GroupedLinear(EXPERTS, IN, OUT, backend="paddle"), paddle.zeros([0, IN])
    x.stop_gradient = False
    with fp8.fp8_autocast(True, RECIPES[recipe]):
        y = layer(x, [0] * EXPERTS)
    y.sum().backward()
    assert list(y.shape) == [0, OUT] and list(x.grad.shape) == [0, IN] and not layer.weight.grad.numpy().any()


def test_rows_that_fp8_cannot_have_are_refused():
    layer = GroupedLinear(2, IN, OUT, backend="paddle")
    with fp8.fp8_autocast(True, RECIPES["block"]), pytest.raises(ValueError, match="multiple of 128, not"):
        layer(paddle.zeros([144, IN]), [128, 16])


@pytest.mark.parametrize("multiple", [1, 16])
def test_without_a_token_there_is_padding(multiple):
    """Paddle has no kernel for a tensor of no rows on nvgpu, where such a rank ended its run."""
    places = rows_of(paddle.zeros([5, 3], "bool"), 2, multiple)
    assert places.counts == [multiple, 0, 0]
    assert places.tokens.tolist() == [5] * multiple and places.rows.tolist() == [[multiple] * 2] * 5


@pytest.mark.parametrize("multiple", [1, 16, 128])
def test_rows_of_an_expert_are_padded(multiple, seed):
    generator, tokens, experts = np.random.default_rng(seed), 50, 4
    routing_map = generator.random([tokens, experts]) < [0.0, 0.3, 0.6, 1.0]
    places = rows_of(paddle.to_tensor(routing_map), 3, multiple)
    assert places.counts == [-(-n // multiple) * multiple for n in routing_map.sum(0)]
    of_rows, start = places.tokens.numpy(), 0
    for expert, count in enumerate(places.counts):
        mine = np.flatnonzero(routing_map[:, expert])
        here = of_rows[start : start + count]
        assert (here[: len(mine)] == mine).all() and (here[len(mine) :] == tokens).all()
        assert (places.experts.numpy()[start : start + count] == expert).all()
        start += count
    for token, rows in enumerate(places.rows.numpy()):
        assert sorted(of_rows[rows[rows < start]]) == [token] * routing_map[token].sum()


SIZES = dict(hidden_size=IN, moe_ffn_hidden_size=IN, num_moe_experts=4, moe_router_topk=2, backend="paddle")
SHARED = dict(moe_shared_expert_intermediate_size=IN, bias=True)


def train(recipe, seed, steps=3, **options):
    """Outputs and gradients of some steps."""
    paddle.seed(seed % 2**31)
    layer = MoELayer(MoEConfig(**SIZES, **options))
    for i, parameter in enumerate(layer.parameters()):
        parameter.set_value(paddle.to_tensor(0.1 * draw(seed + 10 + i, *parameter.shape)))
    found = []
    for step in range(steps):
        layer.clear_gradients()
        # fewer tokens than rows of padding; block scaling's GEMM of all tokens wants 128
        x = paddle.to_tensor(draw(seed + 2 * step, 2, 64, IN), stop_gradient=False)
        with fp8.fp8_autocast(recipe is not None, recipe):
            y = layer(x)
        y.backward(paddle.to_tensor(draw(seed + 2 * step + 1, 2, 64, IN)))
        found += [y.numpy(), x.grad.numpy(), *[p.grad.numpy() for p in layer.parameters()]]
    return found


@pytest.mark.parametrize("options", [{}, SHARED, dict(moe_expert_capacity_factor=0.5)], ids=["", "shared", "capacity"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_is_as_near_to_float32_as_fp8_is(recipe, options, seed):
    found, truth = train(RECIPES[recipe], seed, **options), train(None, seed, **options)
    last = len(found) // 3
    errors = [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(found, truth, strict=True)][-last:]
    assert errors[0] > 1e-5 and max(errors) < 0.2


@pytest.mark.parametrize("part", ["moe", "moe_act"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_computed_again_nothing_changes(recipe, part, seed):
    again = train(RECIPES[recipe], seed, recompute_modules=(part,), **SHARED)
    for a, b in zip(train(RECIPES[recipe], seed, **SHARED), again, strict=True):
        assert np.array_equal(a, b)


def test_weights_in_fp8_only_have_one_scale():
    block = fp8.fp8_model_init(True, fp8.Float8BlockScaling())
    with block, pytest.raises(NotImplementedError, match="fp8_recipe=block.*one scale"):
        MoELayer(MoEConfig(**SIZES))
