"""Mixtures of experts of backend paddle against transformers' and against float64 NumPy."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddle_te.layers.moe import (
    GroupedLinear,
    MoEAuxLossAutoScaler,
    MoEConfig,
    MoELayer,
    update_expert_bias,
)
from paddle_te.layers.moe.config import BALANCING
from tests import moe_cases
from tests.moe_cases import EXPERTS, FAMILIES, FFN, HIDDEN, TOKENS

PYTHON = os.environ.get("PADDLE_TE_HF_PYTHON")
STORED = json.loads((Path(__file__).parent / "moe_transformers.json").read_text())  # see tests/moe_peers.py
SIZES = dict(hidden_size=HIDDEN, moe_ffn_hidden_size=FFN, num_moe_experts=EXPERTS, backend="paddle")
EPS = 1e-20  # the norm then divides by the root of the mean square


def family_config(family):
    options = dict(FAMILIES[family][0])
    if "moe_shared_expert_intermediate_size" in options:
        options["moe_shared_expert_intermediate_size"] = moe_cases.shared_columns(family)
    return MoEConfig(**SIZES, **options)


def make(config, values):
    layer = MoELayer(config)
    tensors = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    for name, value in values.items():
        if name in tensors:
            tensors[name].set_value(paddle.to_tensor(value))
    return layer


def without_norm(layer, x):
    """The layer's experts, with what they are given as x: what transformers' modules and the references compute."""
    y = layer.experts(x, *layer.router(x))
    return y + layer.shared_experts(x) if layer.config.moe_shared_expert_intermediate_size else y


def run(layer, values):
    """{name: array} of output and gradients."""
    x = paddle.to_tensor(values["x"], stop_gradient=False)
    y = without_norm(layer, x)
    y.backward(paddle.to_tensor(values["dy"]))
    found = {"y": y, "dx": x.grad, "logits": layer.router.logits(x)}
    found |= {f"d{name}": parameter.grad for name, parameter in layer.named_parameters() if "ln_" not in name}
    return {name: value.numpy() for name, value in found.items()}


def relative(found, expected):
    return np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-12)


def check_family(family, seed, expected):
    found = run(make(family_config(family), values := moe_cases.values(family, seed)), values)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert relative(moe_cases.digest(found[name]), np.array(value)) < 1e-5, name


@pytest.mark.parametrize("family", FAMILIES)
def test_as_transformers_computed_it(family):
    check_family(family, 37, STORED[family])


@pytest.mark.skipif(not PYTHON, reason="PEERS=1 installs transformers")
def test_as_transformers_computes_it(seed):
    root = Path(__file__).parents[3]
    command = [PYTHON, "-m", "tests.moe_peers", str(seed)]
    answers = json.loads(subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout)
    for family in FAMILIES:
        check_family(family, seed, answers[family])


CONFIGS = {
    "one_expert": dict(moe_router_topk=1, moe_router_pre_softmax=True),
    "all_experts": dict(moe_router_topk=EXPERTS),
    "bias_gelu": dict(activation="gelu", bias=True),
    "clamped": dict(activation="clamped_swiglu", bias=True, moe_router_bias=True, moe_router_topk=4),
    "capacity": dict(moe_expert_capacity_factor=0.8),
    "capacity_position": dict(moe_expert_capacity_factor=0.8, moe_token_drop_policy="position"),
    "capacity_bias": dict(moe_router_topk=3, moe_expert_capacity_factor=1.0, bias=True),
    "capacity_for_all": dict(moe_expert_capacity_factor=100.0),
    "shared_bias": dict(bias=True, moe_shared_expert_intermediate_size=5),
    "sigmoid": dict(moe_router_score_function="sigmoid", moe_router_topk=3),
    "sigmoid_of_one": dict(moe_router_score_function="sigmoid", moe_router_topk=1),
    "softmax_groups": dict(moe_router_num_groups=2, moe_router_group_topk=1, moe_router_pre_softmax=True),
    "best_of_groups": dict(  # as DeepSeek-V2
        moe_router_topk=3,
        moe_router_num_groups=4,
        moe_router_group_topk=2,
        moe_router_group_best=1,
        moe_router_pre_softmax=True,
    ),
    "losses": dict(moe_aux_loss_coeff=0.7, moe_z_loss_coeff=0.3),
    "sigmoid_losses": dict(
        moe_router_score_function="sigmoid",
        moe_router_topk=3,
        moe_router_enable_expert_bias=True,
        moe_aux_loss_coeff=0.7,
    ),
    "capacity_losses": dict(moe_aux_loss_coeff=0.7, moe_z_loss_coeff=0.3, moe_expert_capacity_factor=0.5),
    "recompute_act": dict(recompute_modules=("moe_act",), bias=True),
}


def draw(layer, seed, empty=False):
    """empty: no token chooses the first expert, and all choose the last."""
    generator = np.random.default_rng(seed)
    named = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    values = {n: generator.standard_normal(t.shape).astype("float32") for n, t in named.items() if "_tokens" not in n}
    values |= {name: generator.standard_normal([TOKENS, HIDDEN]).astype("float32") for name in ("x", "dy")}
    if empty:
        values["x"][:, 0], values["router.weight"][[0, -1]] = 1.0, 0.0
        values["router.weight"] *= 0.3
        values["router.weight"][[0, -1], 0] = -5.0, 5.0
    return values


def reference_loss(values, config):
    out, balance, z = moe_cases.layer(values, config)
    return (out * values["dy"]).sum() + config.moe_aux_loss_coeff * balance + (config.moe_z_loss_coeff or 0.0) * z


def derivative(values, name, direction, config, step=1e-6):
    ends = []
    for sign in 1, -1:
        moved = {n: value.astype("float64") for n, value in values.items()}
        moved[name] = moved[name] + sign * step * direction
        ends.append(reference_loss(moved, config))
    return (ends[0] - ends[1]) / (2 * step)


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("kind", CONFIGS)
def test_as_token_by_token(kind, empty, seed):
    """The output, and of each gradient its product with a random direction."""
    config = MoEConfig(**SIZES, **CONFIGS[kind])
    values = draw(MoELayer(config), seed, empty)
    found = run(make(config, values), values)
    expected = moe_cases.layer(values, config)[0]
    assert relative(found["y"], expected) < 1e-5
    generator = np.random.default_rng(seed + 1)
    for name in [n for n in values if n not in ("dy", "ln_weight", "router.expert_bias")]:
        gradient = found["dx" if name == "x" else f"d{name}"].astype("float64")
        direction = generator.standard_normal(gradient.shape)
        scale = max(np.linalg.norm(gradient) * np.linalg.norm(direction), 1e-3)
        difference = abs((gradient * direction).sum() - derivative(values, name, direction, config))
        assert difference / scale < 1e-5, name


NAMES = {
    "ln_weight",
    "router.weight",
    "router.expert_bias",
    "experts.fc1_weight",
    "experts.fc2_weight",
    "shared_experts.fc1_weight",
    "shared_experts.fc2_weight",
}


def trained(config, seed, steps=2):
    """(layer, outputs and gradients of some steps), of the whole layer with its norm and residual."""
    layer = MoELayer(config)
    values = draw(layer, seed)
    layer, found = make(config, values), []
    for step in range(steps):
        x = paddle.to_tensor(values["x"] * (1 + step), stop_gradient=False)
        y = layer(x.reshape([1, *x.shape]))
        y.backward(paddle.to_tensor(values["dy"]).unsqueeze(0))
        found += [y.numpy(), x.grad.numpy(), *[p.grad.numpy() for p in layer.parameters()]]
    return layer, found


def test_the_layer_adds_its_experts_to_its_input(seed):
    config = family_config("deepseek_v3")
    layer, (y, *_) = trained(config, seed)
    values = draw(layer, seed)
    assert {*layer.state_dict()} == NAMES
    normed = values["x"] / np.sqrt((values["x"].astype("float64") ** 2).mean(-1, keepdims=True) + 1e-5)
    expected = values["x"] + moe_cases.layer(values | {"x": normed * values["ln_weight"]}, config)[0]
    assert relative(y[0], expected) < 1e-5


@pytest.mark.parametrize("part", ["moe", "moe_act"])
def test_computed_again_nothing_changes(part, seed):
    options = CONFIGS["sigmoid_losses"]
    layer, found = trained(MoEConfig(**SIZES, **options), seed)
    again, expected = trained(MoEConfig(**SIZES, **options, recompute_modules=(part,)), seed)
    for a, b in zip(found, expected, strict=True):
        assert np.array_equal(a, b)
    assert np.array_equal(layer.router._tokens, again.router._tokens)  # each token counts once
    assert layer.router._tokens.sum().item() == 2 * TOKENS * 3


def test_the_bias_moves_towards_balance(seed):
    config = family_config("deepseek_v3")
    layer, _ = trained(config, seed)
    tokens, before = layer.router._tokens.numpy(), layer.router.expert_bias.numpy()
    update_expert_bias(layer)
    moved = layer.router.expert_bias.numpy() - before
    assert np.allclose(moved, np.sign(tokens.mean() - tokens) * 1e-3, atol=1e-7)
    assert not layer.router._tokens.numpy().any()
    layer.eval()
    layer(paddle.randn([3, HIDDEN]))
    assert not layer.router._tokens.numpy().any()


def test_a_frozen_routers_bias_stays(seed):
    layer, _ = trained(family_config("deepseek_v3"), seed)
    layer.router.weight.stop_gradient, before = True, layer.router.expert_bias.numpy()
    update_expert_bias(layer)
    assert (layer.router.expert_bias.numpy() == before).all()


def test_forced_balance_is_even_and_trains_the_router(seed):
    config = MoEConfig(**SIZES, moe_router_topk=3, moe_router_force_load_balancing=True)
    values = draw(MoELayer(config), seed)
    values = {n: v[:1].repeat(16, 0) if n in ("x", "dy") else v for n, v in values.items()}  # all would choose alike
    layer = make(config, values)
    found = run(layer, values)
    assert (layer.router.statistics.tokens_per_expert.numpy() == 16 * 3 / EXPERTS).all()
    assert np.abs(found["drouter.weight"]).max() > 1e-4


def test_statistics_count_what_is_dropped(seed):
    config = MoEConfig(**SIZES, moe_expert_capacity_factor=0.5, moe_aux_loss_coeff=0.5, moe_z_loss_coeff=0.25)
    layer = MoELayer(config)
    values = draw(layer, seed, empty=True)
    layer = make(config, values)
    found, seen = run(layer, values), layer.router.statistics
    assert seen.tokens_per_expert[-1].item() == TOKENS and seen.tokens_per_expert[0].item() == 0
    kept = np.minimum(seen.tokens_per_expert.numpy(), config.capacity(TOKENS))
    assert seen.dropped.item() == seen.tokens_per_expert.numpy().sum() - kept.sum()
    logits = found["logits"].astype("float64")
    assert seen.aux_loss.item() == pytest.approx(0.5 * moe_cases.balance_loss(logits, config), rel=1e-5)
    assert seen.z_loss.item() == pytest.approx(0.25 * moe_cases.z_loss(logits), rel=1e-5)
    layer.eval()
    layer.router(paddle.randn([3, HIDDEN]))
    assert layer.router.statistics.aux_loss is None and layer.router.statistics.z_loss is None


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_the_sequences_loss_is_the_mean_of_each_ones(scores, seed, monkeypatch):
    """A layer's input [sequences, tokens, hidden] says which tokens are a sequence."""
    options = dict(moe_aux_loss_coeff=0.5, moe_router_score_function=scores)
    configs = {k: MoEConfig(**SIZES, **options, moe_router_load_balancing_type=k) for k in BALANCING}
    values = draw(MoELayer(configs["aux_loss"]), seed)
    of_all, of_each, none = (make(configs[kind], values) for kind in BALANCING)
    x = paddle.to_tensor(np.random.default_rng(seed).standard_normal([3, TOKENS, HIDDEN]).astype("float32"))
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", 1 / 3)
    losses = []
    for sequence in x:
        of_all(sequence).sum().backward()
        losses.append(of_all.router.statistics.aux_loss.item())
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", 1.0)
    of_each(x).sum().backward()
    assert of_each.router.statistics.aux_loss.item() == pytest.approx(np.mean(losses), rel=1e-5)
    assert relative(of_each.router.weight.grad.numpy(), of_all.router.weight.grad.numpy()) < 1e-5
    none(x)
    assert none.router.statistics.aux_loss is None


@pytest.mark.parametrize("scale", [3.0, paddle.full([1], 3.0)])
def test_the_losses_take_the_main_losss_scale(scale, seed, monkeypatch):
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", 1.0)
    config = MoEConfig(**SIZES, moe_aux_loss_coeff=0.5)
    values = draw(MoELayer(config), seed) | {"dy": np.zeros([TOKENS, HIDDEN], "float32")}
    once = run(make(config, values), values)["drouter.weight"]
    MoEAuxLossAutoScaler.set_loss_scale(scale)
    assert relative(run(make(config, values), values)["drouter.weight"], 3 * once) < 1e-5


def test_grouped_linear_of_ragged_and_empty_experts(seed):
    generator, counts = np.random.default_rng(seed), [3, 0, 5, 0]
    layer = GroupedLinear(4, HIDDEN, FFN, bias=True, backend="paddle")
    layer.bias.set_value(paddle.to_tensor(generator.standard_normal([4, FFN]).astype("float32")))
    x = paddle.to_tensor(generator.standard_normal([8, HIDDEN]).astype("float32"), stop_gradient=False)
    y = layer(x, paddle.to_tensor(counts))
    y.sum().backward()
    experts = np.repeat(np.arange(4), counts)
    weights = layer.weight.numpy()[experts]
    assert np.allclose(y, np.einsum("rh,rfh->rf", x.numpy(), weights) + layer.bias.numpy()[experts], atol=1e-5)
    assert np.allclose(x.grad, weights.sum(1), atol=1e-5)
    expected = [np.tile(x.numpy()[experts == e].sum(0), [FFN, 1]) for e in range(4)]
    assert np.allclose(layer.weight.grad, expected, atol=1e-5)
    assert np.allclose(layer.bias.grad, np.tile(np.array(counts)[:, None], [1, FFN]))
    with pytest.raises(ValueError, match=r"\[3, 0, 4, 0\].*8 rows"):
        layer(x, [3, 0, 4, 0])


WRONG = {
    "moe_router_topk=9": dict(moe_router_topk=9),
    "moe_router_topk=0": dict(moe_router_topk=0),
    "moe_router_score_function='tanh'": dict(moe_router_score_function="tanh"),
    "moe_router_load_balancing_type='sinkhorn'": dict(moe_router_load_balancing_type="sinkhorn"),
    "'seq_aux_loss' with sequence_parallel needs max_sequence_length": dict(
        moe_router_load_balancing_type="seq_aux_loss", sequence_parallel=True, set_parallel_mode=True
    ),
    "moe_token_drop_policy='last'": dict(moe_token_drop_policy="last"),
    "activation='silu'": dict(activation="silu"),
    "recompute_modules='mlp'": dict(recompute_modules=("mlp",)),
    "leave 'moe_act' out": dict(recompute_modules=("moe", "moe_act")),
    "score_function='sigmoid'": dict(moe_router_enable_expert_bias=True),
    "score_function='softmax'": dict(moe_router_score_function="sigmoid", moe_router_pre_softmax=True),
    "set moe_router_pre_softmax": dict(moe_router_topk=1),
    "need each other": dict(moe_router_num_groups=2),
    "must divide the 8 experts": dict(moe_router_num_groups=3, moe_router_group_topk=1),
    "2 groups of 2 experts": dict(moe_router_num_groups=4, moe_router_group_topk=2, moe_router_topk=6),
    "moe_expert_capacity_factor=0": dict(moe_expert_capacity_factor=0),
    "moe_shared_expert_gate needs": dict(moe_shared_expert_gate=True),
    "activation='clamped_swiglu' with moe_shared_expert_intermediate_size": dict(
        activation="clamped_swiglu", moe_shared_expert_intermediate_size=5
    ),
    "the gate multiplies": dict(moe_shared_expert_gate=True, moe_shared_expert_intermediate_size=5, bias=True),
    "hidden_dropout=1": dict(hidden_dropout=1),
}


@pytest.mark.parametrize("words", WRONG)
def test_what_does_not_fit_is_refused(words):
    with pytest.raises(ValueError, match=words):
        MoEConfig(**SIZES, **WRONG[words])
