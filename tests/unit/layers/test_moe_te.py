"""Mixtures of experts of te on the emulated library, beside backend paddle in float32."""

import numpy as np
import paddle
import pytest

from paddle_te import fp8
from paddle_te.layers.moe import GroupedLinear, MoEConfig, MoELayer
from paddle_te.native import BackendUnavailable
from paddle_te.ops.te import moe as te_moe
from tests import emulated_te
from tests.bfloat16 import truncated
from tests.poison import poison_allocations

HIDDEN, FFN, EXPERTS, TOKENS = 64, 48, 8, 40
SIZES = dict(hidden_size=HIDDEN, moe_ffn_hidden_size=FFN, num_moe_experts=EXPERTS)
SIGMOID = dict(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_router_topk=4)
CONFIGS = {
    "mixtral": {},
    "qwen2": dict(
        moe_router_topk=3,
        moe_router_pre_softmax=True,
        moe_shared_expert_intermediate_size=FFN,
        moe_shared_expert_gate=True,
    ),
    "deepseek": dict(
        **SIGMOID,
        moe_router_num_groups=4,
        moe_router_group_topk=2,
        moe_router_topk_scaling_factor=2.5,
        moe_shared_expert_intermediate_size=FFN,
    ),
    "one_expert": dict(moe_router_topk=1, moe_router_pre_softmax=True),
    "all_experts": dict(moe_router_topk=EXPERTS),
    "losses": dict(moe_aux_loss_coeff=0.5, moe_z_loss_coeff=0.1),
    "sigmoid_losses": dict(**SIGMOID, moe_aux_loss_coeff=0.5),
    "forced": dict(moe_router_force_load_balancing=True, moe_router_topk=3),
    "recompute_act": dict(recompute_modules=("moe_act",)),
    "recompute": dict(recompute_modules=("moe",)),
}


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    emulated_te.install(monkeypatch.setattr)
    poison_allocations(monkeypatch)


def draw(layer, seed, empty=False):
    """bfloat16 numbers for tensors, input and output's gradient. empty: no token chooses the first expert."""
    generator = np.random.default_rng(seed)
    named = {**dict(layer.named_parameters()), "router.expert_bias": layer.router.expert_bias}
    values = {n: generator.standard_normal(t.shape).astype("float32") for n, t in named.items() if t is not None}
    for name, value in values.items():
        value *= value.shape[-1] ** -0.5 if value.ndim > 1 else 0.3
        value += name == "ln_weight"
    values |= {name: generator.standard_normal([TOKENS, HIDDEN]).astype("float32") for name in ("x", "dy")}
    if empty:
        values["x"][:, 0], values["ln_weight"][0] = 3.0, 1.0
        values["router.weight"][0], values["router.weight"][:, 0] = 0.0, 0.0
        values["router.weight"][0, 0] = -8.0
    return {name: truncated(value) for name, value in values.items()}


def run(config, values, dtype, steps=1, main_grads=False):
    """{name: array} of output and gradients of the last step, and the layer."""
    layer = MoELayer(config)
    tensors = {**dict(layer.named_parameters()), "router.expert_bias": layer.router.expert_bias}
    for name, tensor in tensors.items():
        if tensor is not None:
            tensor.set_value(paddle.to_tensor(values[name]).astype(tensor.dtype))
    for _ in range(steps):
        layer.clear_gradients()
        x = paddle.to_tensor(values["x"]).astype(dtype).detach()
        x.stop_gradient = False
        y = layer(x)
        y.backward(paddle.to_tensor(values["dy"]).astype(dtype))
    found = {"y": y - x, "dx": x.grad}
    for name, parameter in layer.named_parameters():
        gradient = parameter.main_grad if main_grads and "fc" in name else parameter.grad
        found[f"d{name}"] = gradient
    return {name: value.astype("float32").numpy() for name, value in found.items()}, layer


def compare(options, seed, empty=False, **more):
    te = MoEConfig(**SIZES, **options, params_dtype="bfloat16", **more)
    pd = MoEConfig(**SIZES, **options, backend="paddle")
    values = draw(MoELayer(pd), seed, empty)
    truth, reference = run(pd, values, "float32")
    found, layer = run(te, values, "bfloat16", main_grads=more.get("fuse_wgrad_accumulation", False))
    return found, truth, layer, reference


def relative(found, truth):
    return np.linalg.norm(found - truth) / max(np.linalg.norm(truth), 1e-6)


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("kind", CONFIGS)
def test_layers(kind, empty):
    """The seed is fixed: rounding to bfloat16 may choose another expert, and then a token's output is another's."""
    found, truth, layer, reference = compare(CONFIGS[kind], 37, empty)
    assert found.keys() == truth.keys()
    tokens = [one.router.statistics.tokens_per_expert.numpy() for one in (layer, reference)]
    assert (tokens[0] == tokens[1]).all()
    assert not empty or kind in ("all_experts", "forced") or tokens[0][0] == 0
    for name, value in truth.items():
        assert relative(found[name], value) < 2e-2, name


@pytest.mark.parametrize("empty", [False, True])
def test_gradients_go_to_main_grads(empty):
    found, truth, layer, _ = compare({}, 37, empty, fuse_wgrad_accumulation=True)
    for name, value in truth.items():
        assert relative(found[name], value) < 2e-2, name
    weight = layer.experts.fc1_weight
    assert weight.grad is None and weight.main_grad.dtype == paddle.float32


def test_main_grads_add_up():
    config = MoEConfig(**SIZES, params_dtype="bfloat16", fuse_wgrad_accumulation=True)
    values = draw(MoELayer(config), 37, empty=True)
    once, _ = run(config, values, "bfloat16", main_grads=True)
    twice, _ = run(config, values, "bfloat16", steps=2, main_grads=True)
    for name in ("dexperts.fc1_weight", "dexperts.fc2_weight"):
        assert relative(twice[name], 2 * once[name]) < 1e-5


def test_recompute_changes_no_bit():
    values = draw(MoELayer(MoEConfig(**SIZES, backend="paddle")), 37)
    runs = [
        run(MoEConfig(**SIZES, params_dtype="bfloat16", recompute_modules=parts), values, "bfloat16")[0]
        for parts in ((), ("moe_act",), ("moe",))
    ]
    for name, value in runs[0].items():
        assert all((again[name] == value).all() for again in runs[1:]), name


def test_a_recorded_program_serves_any_routing():
    """The second batch has other experts without tokens; no program is recorded for it."""
    from paddle_te.ops.te import program

    program.clear()
    config = MoEConfig(**SIZES, params_dtype="bfloat16")
    layer, made = MoELayer(config), []
    for shift in (1, 2):
        x = paddle.randn([TOKENS, HIDDEN]).astype("bfloat16")
        x.stop_gradient = False
        layer(x + shift).sum().backward()
        made.append(program.program_of.cache_info().misses)
    assert made[0] == made[1] > 0


def test_grouped_linear(seed):
    generator, counts = np.random.default_rng(seed), [3, 0, 5, 0]
    layer = GroupedLinear(4, 16, 24, params_dtype="bfloat16")
    weight = truncated(generator.standard_normal([4, 24, 16]).astype("float32"))
    layer.weight.set_value(paddle.to_tensor(weight).astype("bfloat16"))
    value, dy = (truncated(generator.standard_normal([8, n]).astype("float32")) for n in (16, 24))
    for given in (counts, paddle.to_tensor(counts)):
        layer.clear_gradients()
        x = paddle.to_tensor(value).astype("bfloat16").detach()
        x.stop_gradient = False
        y = layer(x, given)
        y.backward(paddle.to_tensor(dy).astype("bfloat16"))
        of_rows, experts = weight[np.repeat(range(4), counts)], np.repeat(range(4), counts)
        assert relative(y.astype("float32").numpy(), np.einsum("ri,roi->ro", value, of_rows)) < 1e-2
        assert relative(x.grad.astype("float32").numpy(), np.einsum("ro,roi->ri", dy, of_rows)) < 1e-2
        expected = [dy[experts == e].T @ value[experts == e] for e in range(4)]
        assert relative(layer.weight.grad.astype("float32").numpy(), np.stack(expected)) < 1e-2
    with pytest.raises(ValueError, match="do not sum up to the 8 rows"):
        layer(x, [3, 0, 4, 0])


@pytest.mark.parametrize("options, words", [
    (dict(activation="gelu"), "activation gelu"),
    (dict(bias=True), "biases of experts"),
    (dict(moe_expert_capacity_factor=1.0), "a capacity"),
])  # fmt: skip
def test_what_has_no_kernels_is_refused(options, words):
    with pytest.raises(BackendUnavailable, match=f"(?s){words}.*use backend paddle"):
        MoELayer(MoEConfig(**SIZES, **options))


@pytest.mark.parametrize("version", [(13, 1), (13, 3), (13, 7)])
def test_a_cublas_without_grouped_gemms_is_refused(version, monkeypatch):
    monkeypatch.setattr(te_moe, "cublas_version", lambda: version)
    with pytest.raises(BackendUnavailable, match=r"(?s)cuBLAS 13.4 to 13.6, not 13\.\d.*nvidia-cublas"):
        MoELayer(MoEConfig(**SIZES))


def test_fp8_is_refused():
    layer = MoELayer(MoEConfig(**SIZES, params_dtype="bfloat16"))
    with fp8.fp8_autocast(), pytest.raises(NotImplementedError, match="16 bits only"):
        layer(paddle.randn([TOKENS, HIDDEN]).astype("bfloat16"))


def test_sizes_that_kernels_cannot_read_are_refused():
    layer = MoELayer(MoEConfig(HIDDEN, 12, EXPERTS, params_dtype="bfloat16"))
    with pytest.raises(ValueError, match="moe_ffn_hidden_size 12 must be multiples of 8"):
        layer(paddle.randn([TOKENS, HIDDEN]).astype("bfloat16"))
