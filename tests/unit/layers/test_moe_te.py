"""Mixtures of experts of te on the emulated library, beside backend paddle in float32."""

import numpy as np
import paddle
import pytest

from paddle_te import fp8
from paddle_te.layers import TransformerLayer
from paddle_te.layers.moe import GroupedLinear, MoEConfig, MoELayer
from paddle_te.native import BackendUnavailable
from paddle_te.ops.moe import GroupedLowRank, GroupedProjection, get_moe_ops
from paddle_te.ops.te import grouped_gemms, kernel_choice, program
from tests import emulated_experts, emulated_te
from tests.bfloat16 import truncated
from tests.moe_te_cases import (
    CONFIGS,
    EXPERTS,
    HIDDEN,
    RECIPES,
    SIZES,
    SIZES_OF,
    TOKENS,
    check,
    check_fp8,
    check_gradients_add_up,
    compare,
    draw,
    relative,
    run,
)
from tests.poison import poison_allocations


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    emulated_te.install(monkeypatch.setattr)
    poison_allocations(monkeypatch)


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("kind", CONFIGS)
def test_layers(kind, empty):
    check(kind, 37, empty)


@pytest.mark.parametrize("empty", [False, True])
def test_gradients_go_to_main_grads(empty):
    found, truth, layer, _ = compare({}, 37, empty, fuse_wgrad_accumulation=True)
    for name, value in truth.items():
        assert relative(found[name], value) < 2e-2, name
    weight = layer.experts.fc1_weight
    assert weight.grad is None and weight.main_grad.dtype == paddle.float32


@pytest.mark.parametrize("recipe", [None, "current"])
@pytest.mark.parametrize("where", [True, "grad"])
def test_gradients_add_up_inside_the_gemms(where, recipe):
    check_gradients_add_up(where, recipe)


def test_recompute_changes_no_bit():
    values = draw(MoELayer(MoEConfig(**SIZES, backend="paddle")), 37)
    runs = [
        run(MoEConfig(**SIZES, params_dtype="bfloat16", recompute_modules=parts), values, "bfloat16")[0]
        for parts in ((), ("moe_act",), ("moe",))
    ]
    for name, value in runs[0].items():
        assert all((again[name] == value).all() for again in runs[1:]), name


@pytest.mark.parametrize("kind", ["in_passing", "in_passing_recomputed"])
def test_casts_in_passing_are_casts_of_what_was_stored(kind, monkeypatch):
    """To the bit with current scaling, which rounds before it casts; but for the router's gradients: sums differ."""
    config = MoEConfig(**SIZES | CONFIGS[kind], params_dtype="bfloat16")
    values, launched, found = draw(MoELayer(config), 37), [], []
    real = emulated_experts.launch
    monkeypatch.setattr(emulated_experts, "launch", lambda name, *more: launched.append(name) or real(name, *more))
    for takes in (kernel_choice.experts_swiglu, lambda *_: False):
        monkeypatch.setattr(kernel_choice, "experts_swiglu", takes)
        program.clear()
        launched.clear()
        found.append(run(config, values, "bfloat16", recipe=RECIPES["current"])[0])
        fused = any(name.startswith("experts_dswiglu") for name in launched)
        assert fused == (len(found) == 1)
    for name, value in found[0].items():
        exact = name in ("y", "dexperts.fc1_weight", "dexperts.fc2_weight")
        assert (value == found[1][name]).all() if exact else relative(value, found[1][name]) < 1e-2, name


def test_a_recorded_program_serves_any_routing():
    """The second batch has other experts without tokens; no program is recorded for it."""
    program.clear()
    config = MoEConfig(**SIZES, params_dtype="bfloat16")
    layer, made = MoELayer(config), []
    for shift in (1, 2):
        x = paddle.randn([TOKENS, HIDDEN]).astype("bfloat16")
        x.stop_gradient = False
        layer(x + shift).sum().backward()
        made.append(program.program_of.cache_info().misses)
    assert made[0] == made[1] > 0


WAITS = ("numpy", "tolist", "item", "__array__", "__bool__", "__int__", "__float__", "__index__")


@pytest.mark.parametrize("recipe", [None, "delayed"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_the_host_reads_no_tensor(kind, recipe, monkeypatch):
    """Beside their sizes, once a step has been recorded. `tests/multiprocess/ops/test_moe.py` asks the device."""
    layer = MoELayer(MoEConfig(**SIZES | CONFIGS[kind], params_dtype="bfloat16"))

    def step():
        x = paddle.randn([2, TOKENS, HIDDEN]).astype("bfloat16").detach()
        x.stop_gradient = False
        with fp8.fp8_autocast(recipe is not None, RECIPES.get(recipe)):
            layer(x).sum().backward()

    def refuse(tensor, *_):
        raise AssertionError("the host waits for a tensor")

    step()
    for name in WAITS:
        monkeypatch.setattr(paddle.Tensor, name, refuse)
    step()


def test_grouped_linear(seed):
    generator, counts = np.random.default_rng(seed), [3, 0, 5, 0]
    layer = GroupedLinear(4, 16, 24, bias=True, params_dtype="bfloat16")
    weight, bias = (truncated(generator.standard_normal(s).astype("float32")) for s in ([4, 24, 16], [4, 24]))
    layer.weight.set_value(paddle.to_tensor(weight).astype("bfloat16"))
    layer.bias.set_value(paddle.to_tensor(bias).astype("bfloat16"))
    value, dy = (truncated(generator.standard_normal([8, n]).astype("float32")) for n in (16, 24))
    for given in (counts, paddle.to_tensor(counts)):
        layer.clear_gradients()
        x = paddle.to_tensor(value).astype("bfloat16").detach()
        x.stop_gradient = False
        y = layer(x, given)
        y.backward(paddle.to_tensor(dy).astype("bfloat16"))
        of_rows, experts = weight[np.repeat(range(4), counts)], np.repeat(range(4), counts)
        expected = np.einsum("ri,roi->ro", value, of_rows) + bias[experts]
        assert relative(y.astype("float32").numpy(), expected) < 1e-2
        assert relative(x.grad.astype("float32").numpy(), np.einsum("ro,roi->ri", dy, of_rows)) < 1e-2
        expected = [dy[experts == e].T @ value[experts == e] for e in range(4)]
        assert relative(layer.weight.grad.astype("float32").numpy(), np.stack(expected)) < 1e-2
        expected = np.stack([dy[experts == e].sum(0) for e in range(4)])
        assert relative(layer.bias.grad.astype("float32").numpy(), expected) < 1e-2
    with pytest.raises(ValueError, match="do not sum up to the 8 rows"):
        layer(x, [3, 0, 4, 0])


@pytest.mark.parametrize("recipe", RECIPES)
def test_grouped_linear_in_fp8(recipe, seed):
    """As backend paddle emulates it, whose numbers are rounded to bfloat16 in fewer places."""
    generator, found, one = np.random.default_rng(seed), [], 128 if recipe == "block" else 16
    counts, shapes = [0, 2 * one, one, 0], ([4, 3 * one, one], [3 * one, one], [3 * one, 3 * one])
    weight, value, dy = (truncated(generator.standard_normal(shape).astype("float32")) for shape in shapes)
    for backend, dtype in (("paddle", "float32"), ("transformer_engine", "bfloat16")):
        layer = GroupedLinear(4, one, 3 * one, params_dtype=dtype, backend=backend)
        layer.weight.set_value(paddle.to_tensor(weight).astype(dtype))
        x = paddle.to_tensor(value).astype(dtype).detach()
        x.stop_gradient = False
        with fp8.fp8_autocast(True, RECIPES[recipe]):
            y = layer(x, counts)
            with pytest.raises(ValueError, match=rf"multiple of {one}, not \[8, "):
                layer(x, [8, 3 * one - 8, 0, 0])
        y.backward(paddle.to_tensor(dy).astype(dtype))
        found.append([tensor.astype("float32").numpy() for tensor in (y, x.grad, layer.weight.grad)])
    for a, b in zip(*found, strict=True):
        assert relative(b, a) < 4e-3


def test_an_activation_without_kernels_is_refused():
    with pytest.raises(BackendUnavailable, match="(?s)activation relu.*use backend paddle"):
        MoELayer(MoEConfig(**SIZES, activation="relu"))


@pytest.mark.parametrize("version", [(13, 1), (13, 3), (13, 7)])
def test_a_cublas_without_grouped_gemms_is_refused(version, monkeypatch):
    monkeypatch.setattr(grouped_gemms, "cublas_version", lambda: version)
    with pytest.raises(BackendUnavailable, match=r"(?s)13.4 to 13.6, not 13\.\d.*nvidia-cublas.*CUDA_LIBRARIES="):
        MoELayer(MoEConfig(**SIZES))


BLOCK_KINDS = "mixtral", "deepseek", "capacity", "bias_shared"  # whose sizes are greater, and whose tests are slower
FP8_KINDS = [
    (kind, recipe)
    for recipe in RECIPES
    for kind in CONFIGS
    if "losses" not in kind and (recipe != "block" or kind in BLOCK_KINDS)
]


@pytest.mark.parametrize("kind, recipe", FP8_KINDS)
def test_layers_in_fp8(kind, recipe):
    check_fp8(kind, recipe, empty=kind == "mixtral")


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_kept_weights_are_the_same(recipe):
    """In a step's later micro-batches the GEMMs read the copies that the first has kept."""
    config = MoEConfig(**SIZES_OF.get(recipe, SIZES), params_dtype="bfloat16")
    values, found = draw(MoELayer(config), 37), []
    for first, later in ((None, None), (True, False)):
        layer = MoELayer(config)
        for name, parameter in layer.named_parameters():
            parameter.set_value(paddle.to_tensor(values[name]).astype("bfloat16"))
        for is_first in (first, later):
            x = paddle.to_tensor(values["x"]).astype("bfloat16").detach()
            x.stop_gradient = False
            with fp8.fp8_autocast(True, RECIPES[recipe]), fp8.microbatch(is_first):
                y = layer(x)
                y.backward(paddle.to_tensor(values["dy"]).astype("bfloat16"))
        tensors = y, x.grad, layer.experts.fc1_weight.grad, layer.experts.fc2_weight.grad
        found.append([tensor.astype("float32").numpy() for tensor in tensors])
    for a, b in zip(*found, strict=True):
        assert (a == b).all()


@pytest.mark.parametrize("recipe", [None, "current"])
@pytest.mark.parametrize("frozen", ["fc1_weight", "fc2_weight"])
def test_frozen_weights(frozen, recipe):
    config, found = MoEConfig(**SIZES, params_dtype="bfloat16"), []
    values = draw(MoELayer(config), 37)
    for freeze in (False, True):
        layer = MoELayer(config)
        for name, parameter in layer.named_parameters():
            parameter.set_value(paddle.to_tensor(values[name]).astype("bfloat16"))
            parameter.stop_gradient = freeze and name.endswith(frozen)
        x = paddle.to_tensor(values["x"]).astype("bfloat16").detach()
        x.stop_gradient = False
        with fp8.fp8_autocast(recipe is not None, RECIPES.get(recipe)):
            y = layer(x)
        y.backward(paddle.to_tensor(values["dy"]).astype("bfloat16"))
        others = [p.grad for n, p in layer.named_parameters() if not n.endswith(frozen)]
        found.append([tensor.astype("float32").numpy() for tensor in (y, x.grad, *others)])
    assert getattr(layer.experts, frozen).grad is None
    for a, b in zip(*found, strict=True):
        assert (a == b).all()


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0)])
def test_other_gpus_are_refused(capability, monkeypatch):
    monkeypatch.setattr(emulated_te.Stream, "capability", capability)
    with pytest.raises(BackendUnavailable, match="(?s)as Hopper has them.*use backend paddle"):
        MoELayer(MoEConfig(**SIZES))


@pytest.mark.parametrize("recipe, version, words", [
    ("current", (13, 4), "fp8 need cuBLAS 13.5, not 13.4"),
    ("block", (13, 5), "fp8 with block scaling need cuBLAS 13.6, not 13.5"),
])  # fmt: skip
def test_fp8_on_an_older_cublas_is_refused(recipe, version, words, monkeypatch):
    monkeypatch.setattr(grouped_gemms, "cublas_version", lambda: version)
    layer = MoELayer(MoEConfig(**SIZES_OF.get(recipe, SIZES), params_dtype="bfloat16"))
    with fp8.fp8_autocast(True, RECIPES[recipe]), pytest.raises(BackendUnavailable, match=words):
        layer(paddle.randn([TOKENS, layer.config.hidden_size]).astype("bfloat16"))


def test_a_low_rank_product_without_an_mlp_is_refused():
    ops, (x, weight, a, b) = get_moe_ops("transformer_engine"), (paddle.zeros([1, 16, 16], "bfloat16"),) * 4
    with pytest.raises(NotImplementedError, match="no low-rank product; experts_mlp has"):
        ops.grouped_linear(x[0], GroupedProjection(weight, low_rank=GroupedLowRank(a, b)), [16])


def test_sizes_that_kernels_cannot_read_are_refused():
    layer = MoELayer(MoEConfig(HIDDEN, 12, EXPERTS, params_dtype="bfloat16"))
    with pytest.raises(ValueError, match="moe_ffn_hidden_size 12 must be multiples of 8"):
        layer(paddle.randn([TOKENS, HIDDEN]).astype("bfloat16"))


IN_LAYER = dict(num_moe_experts=EXPERTS, moe_router_topk=3, moe_shared_expert_intermediate_size=32)


def in_transformer(backend, dtype, **options):
    feed_forward = MoELayer.in_layer(**IN_LAYER)
    return TransformerLayer(HIDDEN, 48, 4, feed_forward=feed_forward, backend=backend, params_dtype=dtype, **options)


def test_in_a_transformer_layer():
    """te beside backend paddle in float32; parameters are filed under moe_layer."""
    layers = in_transformer("paddle", "float32"), in_transformer("transformer_engine", "bfloat16")
    names = [name for name, _ in layers[0].named_parameters()]
    assert {"moe_layer.ln_weight", "moe_layer.router.weight", "moe_layer.experts.fc1_weight"} < {*names}
    assert not any("layernorm_mlp" in name for name in names)
    generator, found = np.random.default_rng(38), []
    values = {
        name: generator.standard_normal(p.shape) * p.shape[-1] ** -0.5 for name, p in layers[0].named_parameters()
    }
    x, dy = (truncated(generator.standard_normal([1, TOKENS, HIDDEN]).astype("float32")) for _ in range(2))
    for layer in layers:
        for name, parameter in layer.named_parameters():
            value = truncated(values[name].astype("float32")) + name.endswith("ln_weight")
            parameter.set_value(paddle.to_tensor(truncated(value)).astype(parameter.dtype))
        given = paddle.to_tensor(x).astype(layer.moe_layer.router.weight.dtype).detach()
        given.stop_gradient = False
        y = layer(given)
        y.backward(paddle.to_tensor(dy).astype(y.dtype))
        moe = layer.moe_layer
        tensors = moe.router.statistics.tokens_per_expert, y, given.grad, moe.experts.fc1_weight.grad
        found.append([tensor.astype("float32").numpy() for tensor in tensors])
    assert (found[0][0] == found[1][0]).all()  # with this seed rounding chooses no other expert
    for a, b in zip(*found, strict=True):
        assert relative(b, a) < 3e-2


def test_a_transformer_layers_recompute_is_the_mixtures():
    layer = in_transformer("paddle", "float32", recompute_modules=("core_attn", "moe_act", "mlp"))
    assert layer.moe_layer.config.recompute_modules == ("moe_act",)
    for options, words in (
        (dict(recompute_modules=("layernorm",)), "leave 'layernorm' out"),
        (dict(mlp_chunk_tokens=128), "mlp_chunk_tokens: a mixture"),
        (dict(activation_func_fp8_input_store=True), "activation_func_fp8_input_store: a mixture"),
    ):
        with pytest.raises(ValueError, match=words):
            in_transformer("paddle", "float32", **options)
