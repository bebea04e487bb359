"""Mixtures of experts of te beside backend paddle's in float32, for tests/gpu and for the emulated library."""

import numpy as np
import paddle

from paddle_te import fp8
from paddle_te.fp8.scaling import BLOCK
from paddle_te.layers.moe import MoEConfig, MoELayer
from tests.bfloat16 import rounded, truncated

HIDDEN, FFN, EXPERTS, TOKENS = 64, 48, 8, 48
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
    "best_of_groups": dict(
        moe_router_topk=3,
        moe_router_num_groups=4,
        moe_router_group_topk=2,
        moe_router_group_best=1,
        moe_router_pre_softmax=True,
    ),
    "one_expert": dict(moe_router_topk=1, moe_router_pre_softmax=True),
    "all_experts": dict(moe_router_topk=EXPERTS),
    "losses": dict(moe_aux_loss_coeff=0.5, moe_z_loss_coeff=0.1),
    "sigmoid_losses": dict(**SIGMOID, moe_aux_loss_coeff=0.5),
    "capacity": dict(moe_expert_capacity_factor=0.8, moe_router_topk=3),
    "capacity_position": dict(moe_expert_capacity_factor=0.5, moe_token_drop_policy="position"),
    "bias": dict(bias=True, moe_router_topk=3),
    "bias_capacity": dict(bias=True, moe_expert_capacity_factor=0.5),
    "bias_shared": dict(bias=True, moe_shared_expert_intermediate_size=FFN, recompute_modules=("moe_act",)),
    "gelu": dict(activation="gelu", bias=True, normalization="LayerNorm", moe_expert_capacity_factor=1.0),
    "gelu_shared": dict(
        activation="gelu",
        moe_shared_expert_intermediate_size=FFN,
        moe_shared_expert_gate=True,
        recompute_modules=("moe_act",),
    ),
    "clamped": dict(activation="clamped_swiglu", bias=True, moe_router_bias=True, moe_router_topk=4),
    "forced": dict(moe_router_force_load_balancing=True, moe_router_topk=3),
    "recompute_act": dict(recompute_modules=("moe_act",)),
    "recompute": dict(recompute_modules=("moe",)),
    # a width that the tiles of SwiGLU's kernel divide, which casts to fp8 in passing
    "in_passing": dict(moe_ffn_hidden_size=128, moe_router_topk=3),
    "in_passing_recomputed": dict(moe_ffn_hidden_size=128, recompute_modules=("moe_act",)),
}


def draw(layer, seed, empty=False):
    """bfloat16 numbers for tensors, input and output's gradient. empty: no token chooses the first expert."""
    generator, hidden = np.random.default_rng(seed), layer.config.hidden_size
    tokens = TOKENS if hidden == HIDDEN else BLOCK  # for shared experts' GEMMs
    named = {**dict(layer.named_parameters()), "router.expert_bias": layer.router.expert_bias}
    values = {n: generator.standard_normal(t.shape).astype("float32") for n, t in named.items() if t is not None}
    for name, value in values.items():
        value *= value.shape[-1] ** -0.5 if value.ndim > 1 else 0.3
        value += name == "ln_weight"
    values |= {name: generator.standard_normal([tokens, hidden]).astype("float32") for name in ("x", "dy")}
    if empty:
        values["x"][:, 0], values["ln_weight"][0] = 3.0, 1.0
        values["router.weight"][0], values["router.weight"][:, 0] = 0.0, 0.0
        values["router.weight"][0, 0] = -8.0
    return {name: truncated(value) for name, value in values.items()}


def run(config, values, dtype, steps=1, main_grads=False, recipe=None, clears=True):
    """{name: array} of output and gradients of the last step, of all steps without clears, and the layer."""
    layer = MoELayer(config)
    tensors = {**dict(layer.named_parameters()), "router.expert_bias": layer.router.expert_bias}
    for name, tensor in tensors.items():
        if tensor is not None:
            tensor.set_value(paddle.to_tensor(values[name]).astype(tensor.dtype))
    for _ in range(steps):
        if clears:
            layer.clear_gradients()
        x = paddle.to_tensor(values["x"]).astype(dtype).detach()
        x.stop_gradient = False
        with fp8.fp8_autocast(recipe is not None, recipe):
            y = layer(x)
        y.backward(paddle.to_tensor(values["dy"]).astype(dtype))
    found = {"y": y - x, "dx": x.grad}
    for name, parameter in layer.named_parameters():
        gradient = parameter.main_grad if main_grads and "fc" in name else parameter.grad
        found[f"d{name}"] = gradient
    return {name: value.astype("float32").numpy() for name, value in found.items()}, layer


def compare(options, seed, empty=False, device="cpu", **more):
    """(te's results, backend paddle's in float32 on the CPU, the layers), of MoEConfigs with these options."""
    te = MoEConfig(**SIZES | options, params_dtype="bfloat16", **more)
    pd = MoEConfig(**SIZES | options, backend="paddle")
    paddle.set_device("cpu")
    values = draw(MoELayer(pd), seed, empty)
    truth, reference = run(pd, values, "float32")
    paddle.set_device(device)
    found, layer = run(te, values, "bfloat16", main_grads=more.get("fuse_wgrad_accumulation", False))
    return found, truth, layer, reference


def check_gradients_add_up(where, recipe):
    """Three micro-batches leave three times an expert's gradient. where: fuse_wgrad_accumulation."""
    config = MoEConfig(**SIZES, params_dtype="bfloat16", fuse_wgrad_accumulation=where)
    values = draw(MoELayer(config), 37, empty=True)
    given = dict(main_grads=where is True, recipe=RECIPES.get(recipe), clears=False)
    once, sums = (run(config, values, "bfloat16", steps, **given)[0] for steps in (1, 3))
    for name in ("dexperts.fc1_weight", "dexperts.fc2_weight"):
        assert relative(sums[name], 3 * once[name]) < (1e-5 if where is True else 5e-3)
        if where == "grad":  # Paddle rounds each gradient before it adds
            assert (sums[name] != rounded(3 * once[name])).any()


def relative(found, truth):
    return np.linalg.norm(found - truth) / max(np.linalg.norm(truth), 1e-6)


def check(kind, seed, empty, device="cpu"):
    """te's error against float32 is bfloat16's.

    Rounding may choose another expert, and then a token's output is another's: the seed is one where it does not.
    """
    found, truth, layer, reference = compare(CONFIGS[kind], seed, empty, device)
    assert found.keys() == truth.keys()
    tokens = [one.router.statistics.tokens_per_expert.numpy() for one in (layer, reference)]
    assert (tokens[0] == tokens[1]).all()
    assert not empty or kind in ("all_experts", "forced") or tokens[0][0] == 0
    for name, value in truth.items():
        assert relative(found[name], value) < 2e-2, name


RECIPES = {
    "delayed": fp8.DelayedScaling(amax_history_len=2),
    "from_scale_1": fp8.DelayedScaling(amax_history_len=2, first_step="delayed"),
    "current": fp8.Float8CurrentScaling(),
    "block": fp8.Float8BlockScaling(),
}
SIZES_OF = {"block": SIZES | dict(hidden_size=256, moe_ffn_hidden_size=128)}  # what blocks divide
SEEDS = {"block": 40}  # with which rounding chooses no other expert


def check_fp8(kind, recipe, empty, device="cpu", steps=3):
    """te's error against float32, in the last of some steps, is the emulation's own."""
    sizes = SIZES_OF.get(recipe, SIZES)
    options = {
        n: sizes["moe_ffn_hidden_size"] if "shared" in n and n.endswith("_size") else v
        for n, v in CONFIGS[kind].items()
    }
    pd = MoEConfig(**sizes | options, backend="paddle")
    paddle.set_device("cpu")
    values = draw(MoELayer(pd), SEEDS.get(recipe, 37), empty)
    truth, _ = run(pd, values, "float32")
    emulated, _ = run(pd, values, "float32", steps, recipe=RECIPES[recipe])
    paddle.set_device(device)
    te = MoEConfig(**sizes | options, params_dtype="bfloat16")
    found, _ = run(te, values, "bfloat16", steps, recipe=RECIPES[recipe])
    for name, value in truth.items():
        error, bound = relative(found[name], value), relative(emulated[name], value)
        assert error < 1.1 * bound + 1e-2, (name, error, bound)
        slack = 3e-2 if "bias" in kind else 2e-2  # behind a GEMM and behind its bias te rounds to 16 bits
        assert relative(found[name], emulated[name]) < 0.5 * bound + slack, name  # the same rounding, not as much
