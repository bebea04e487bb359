"""Mixtures of experts on the real library. Needs cuBLAS 13.4 to 13.6."""

import numpy as np
import paddle
import pytest

from paddle_te.layers.moe import GroupedLinear, MoEConfig, MoELayer
from paddle_te.ops.moe import Routing, get_moe_ops
from tests import moe_lora_cases
from tests.bfloat16 import truncated
from tests.moe_te_cases import CONFIGS, RECIPES, check, check_fp8, check_gradients_add_up, draw, relative, run

pytestmark = pytest.mark.usefixtures("grouped_gemms")


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("kind", CONFIGS)
def test_layers(gpu, poisoned, kind, empty):
    check(kind, 37, empty, gpu)


IN_FP8 = ["mixtral", "qwen2", "deepseek", "bias", "capacity", "recompute_act", "recompute"]
IN_FP8 += ["in_passing", "in_passing_recomputed"]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", IN_FP8)
def test_layers_in_fp8(gpu, poisoned, kind, recipe):
    check_fp8(kind, recipe, kind == "mixtral", gpu)


@pytest.mark.parametrize("recipe", moe_lora_cases.BOUNDS)
@pytest.mark.parametrize("case", moe_lora_cases.CASES)
def test_lora(gpu, poisoned, case, recipe):
    if case == "shared" and recipe == "block":
        pytest.skip("the shared expert's 48 columns are no block")
    found = {}
    for backend, dtype, device in (("paddle", "float32", "cpu"), ("transformer_engine", "bfloat16", gpu)):
        paddle.set_device(device)
        layer = moe_lora_cases.make(backend, dtype, moe_lora_cases.SEED, case, recipe)
        found[backend] = moe_lora_cases.step(layer, moe_lora_cases.SEED, recipe)
    errors = {name: relative(found["transformer_engine"][name], value) for name, value in found["paddle"].items()}
    assert max(errors.values()) < moe_lora_cases.BOUNDS[recipe], errors


def test_lora_over_weights_in_fp8_only(gpu, poisoned):
    """The numbers of weights that current scaling quantizes in each step."""
    paddle.set_device(gpu)
    given, seed = ("transformer_engine", "bfloat16", moe_lora_cases.SEED, "all", "current"), moe_lora_cases.SEED
    layers = [moe_lora_cases.make(*given, in_fp8) for in_fp8 in (False, True)]
    want, found = (moe_lora_cases.step(layer, seed, "current") for layer in layers)
    assert max(relative(found[name], value) for name, value in want.items()) < 1e-6


@pytest.mark.parametrize("activation", ["swiglu", "clamped_swiglu"])
def test_activations_times_a_number_for_each_row(gpu, poisoned, activation, seed):
    """Of the same bfloat16 numbers, many of which lie beyond clamped_swiglu's limits."""
    generator = np.random.default_rng(seed)
    x, dy = (
        truncated(scale * generator.standard_normal([96, 128 * n]).astype("float32")) for scale, n in ((6, 2), (1, 1))
    )
    scales, found = generator.random(96, "float32"), []
    for backend, dtype, device in (("paddle", "float32", "cpu"), ("transformer_engine", "bfloat16", gpu)):
        paddle.set_device(device)
        hidden = paddle.to_tensor(x).astype(dtype).detach()
        of_rows = paddle.to_tensor(scales)
        hidden.stop_gradient = of_rows.stop_gradient = False
        act = get_moe_ops(backend).scaled_activate(hidden, of_rows, activation)
        act.backward(paddle.to_tensor(dy).astype(dtype))
        found.append([tensor.astype("float32").numpy() for tensor in (act, hidden.grad, of_rows.grad)])
    for truth, got in zip(*found, strict=True):
        assert relative(got, truth) < 5e-3


ROUTINGS = [
    Routing(2),
    Routing(8, pre_softmax=True),
    Routing(1, pre_softmax=True, scaling_factor=0.5),
    Routing(4, "sigmoid", num_groups=4, group_topk=2, scaling_factor=2.5),
]


@pytest.mark.parametrize("experts", [8, 64, 128])
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_the_router_is_backend_paddles(gpu, poisoned, routing, experts, seed):
    generator = np.random.default_rng(seed)
    logits, grad = (generator.standard_normal([300, experts]).astype("float32") for _ in range(2))
    bias = generator.random(experts, "float32") if routing.score_function == "sigmoid" else None
    found = []
    for backend, device in (("paddle", "cpu"), ("transformer_engine", gpu)):
        paddle.set_device(device)
        x = paddle.to_tensor(logits, stop_gradient=False)
        given = None if bias is None else paddle.to_tensor(bias)
        probs, routing_map = get_moe_ops(backend).route(x, routing, given)
        probs.backward(paddle.to_tensor(grad))
        found.append((routing_map.numpy(), probs.numpy(), x.grad.numpy()))
    assert (found[0][0] == found[1][0]).all()
    for a, b in zip(found[0][1:], found[1][1:], strict=True):
        assert relative(b, a) < 1e-5


@pytest.mark.parametrize("in_features, out_features", [(256, 512), (768, 768)])
def test_grouped_linear(gpu, poisoned, in_features, out_features, seed):
    """Ragged and empty experts, at the beginning, between others and at the end."""
    generator, counts = np.random.default_rng(seed), [0, 37, 256, 0, 91, 1, 0]
    layer = GroupedLinear(len(counts), in_features, out_features, bias=True, params_dtype="bfloat16")
    bias = generator.standard_normal(layer.bias.shape).astype("float32")
    layer.bias.set_value(paddle.to_tensor(bias).astype("bfloat16"))
    x = paddle.randn([sum(counts), in_features]).astype("bfloat16").detach()
    x.stop_gradient = False
    dy = paddle.to_tensor(generator.standard_normal([sum(counts), out_features]).astype("float32")).astype("bfloat16")
    y = layer(x, counts)
    y.backward(dy)
    numbers = lambda t: t.astype("float32").numpy()  # noqa: E731
    weight, rows, grad = numbers(layer.weight), numbers(x), numbers(dy)
    start = 0
    for expert, count in enumerate(counts):
        mine = slice(start, start + count)
        start += count
        dw = numbers(layer.weight.grad[expert])
        if not count:
            assert not dw.any()
            continue
        assert relative(numbers(y)[mine], rows[mine] @ weight[expert].T + bias[expert]) < 5e-3
        assert relative(numbers(layer.bias.grad[expert]), grad[mine].sum(0)) < 5e-3
        assert relative(numbers(x.grad)[mine], grad[mine] @ weight[expert]) < 5e-3
        assert relative(dw, grad[mine].T @ rows[mine]) < 5e-3


@pytest.mark.parametrize("recipe", [None, "current"])
@pytest.mark.parametrize("where", [True, "grad"])
def test_gradients_add_up_inside_the_gemms(gpu, where, recipe):
    check_gradients_add_up(where, recipe)


@pytest.mark.parametrize("recipe", [None, *RECIPES])
@pytest.mark.parametrize("experts, topk, hidden, ffn", [(8, 2, 512, 1024), (128, 8, 256, 96)])
def test_twice_is_the_same_to_the_bit(gpu, poisoned, experts, topk, hidden, ffn, recipe, seed):
    """And main gradients add up."""
    ffn = -(-ffn // 128) * 128 if recipe == "block" else ffn
    sizes = dict(hidden_size=hidden, moe_ffn_hidden_size=ffn, num_moe_experts=experts, moe_router_topk=topk)
    config = MoEConfig(**sizes, params_dtype="bfloat16", fuse_wgrad_accumulation=True)
    values = draw(MoELayer(config), seed)
    generator = np.random.default_rng(seed)
    values |= {name: generator.standard_normal([777, hidden]).astype("float32") for name in ("x", "dy")}
    given = dict(main_grads=True, recipe=RECIPES.get(recipe))
    runs = [run(config, values, "bfloat16", steps, **given)[0] for steps in (1, 1, 2)]
    for name, value in runs[0].items():
        assert np.isfinite(value).all() and (runs[1][name] == value).all(), name
    for name in ("dexperts.fc1_weight", "dexperts.fc2_weight"):
        bound = 0.1 if recipe in ("delayed", "from_scale_1") else 1e-5  # whose second step has other scales
        assert relative(runs[2][name], 2 * runs[0][name]) < bound
