"""LoRA on a MoELayer: of backend paddle beside merged weights, and of te beside backend paddle."""

from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from paddle_te import fp8
from paddle_te.layers.moe import GroupedMLP, MoEConfig, MoELayer
from paddle_te.layers.moe.experts import SharedExpertMLP
from paddle_te.layers.moe.lora import LoRAGroupedMLP, LoRASharedExpertMLP
from tests import emulated_te
from tests.bfloat16 import truncated
from tests.moe_te_cases import EXPERTS, RECIPES, SIZES, SIZES_OF, relative
from tests.poison import poison_allocations

LORA = SimpleNamespace(r=8, scaling=2.0, lora_dropout=0.0)
ALL = ("gate_proj", "up_proj", "down_proj")
CASES = {
    "all": (ALL, {}),
    "up": (("up_proj",), {}),
    "gate, down": (("gate_proj", "down_proj"), dict(recompute_modules=("moe_act",), bias=True)),
    "shared": (ALL, dict(moe_shared_expert_intermediate_size=48)),
}


def make(backend, dtype, seed, case, recipe=None):
    """A MoELayer with LoRA, of drawn numbers."""
    names, options = CASES[case]
    sizes = SIZES_OF.get(recipe, SIZES)
    layer = MoELayer(MoEConfig(**sizes, **options, params_dtype=dtype, backend=backend))
    add(layer, names)
    generator = np.random.default_rng(seed)
    for name, parameter in layer.named_parameters():
        value = generator.standard_normal(parameter.shape).astype("float32") * parameter.shape[-1] ** -0.5
        value = truncated(value + (name == "ln_weight"))
        parameter.set_value(paddle.to_tensor(value).astype(dtype))
    return layer


def add(layer, names):
    for parameter in layer.parameters():
        parameter.stop_gradient = True
    for place, lora_class in (("experts", LoRAGroupedMLP), ("shared_experts", LoRASharedExpertMLP)):
        if place in layer._sub_layers:
            held = layer._sub_layers[place]
            rows, out = held.fc2_weight.shape[-1], held.fc2_weight.shape[-2]
            parts = {"fc1_weight": {"gate_proj": rows, "up_proj": rows}, "fc2_weight": {"down_proj": out}}
            lora_class.enable(held, parts, names, LORA)


def step(layer, seed, recipe=None):
    """{name: array} of the output and all gradients."""
    hidden, tokens = layer.config.hidden_size, 128 if recipe == "block" else 48
    generator = np.random.default_rng(seed + 1)
    value, dy = (truncated(generator.standard_normal([tokens, hidden]).astype("float32")) for _ in range(2))
    x = paddle.to_tensor(value).astype(layer.ln_weight.dtype).detach()
    x.stop_gradient = False
    with fp8.fp8_autocast(recipe is not None, RECIPES.get(recipe)):
        y = layer(x)
    y.backward(paddle.to_tensor(dy).astype(x.dtype))
    found = {"y": y - x, "dx": x.grad} | {n: p.grad for n, p in layer.named_parameters() if p.grad is not None}
    return {name: tensor.astype("float32").numpy() for name, tensor in found.items()}


@pytest.mark.parametrize("case", CASES)
def test_as_merged_weights_compute(case, seed):
    """The output, and the factors' gradients by the chain rule from those of the weights."""
    layer = make("paddle", "float32", seed, case)
    found = step(layer, seed)
    assert all("lora" in name for name in found if name not in ("y", "dx"))
    factors = {name: parameter.numpy() for name, parameter in layer.named_parameters() if "lora" in name}
    for held in (layer._sub_layers[place] for place in ("experts", "shared_experts") if place in layer._sub_layers):
        held.merge()
        held.disable()
    assert type(layer.experts) is GroupedMLP and case != "shared" or type(layer.shared_experts) is SharedExpertMLP
    for parameter in layer.parameters():
        parameter.stop_gradient = False
    merged = step(layer, seed)
    assert relative(found["y"], merged["y"]) < 1e-5 and relative(found["dx"], merged["dx"]) < 1e-5
    for name in factors:
        if not name.startswith("experts."):
            continue
        part, factor = name.split(".")[1:]
        whole = merged[f"experts.{'fc2' if part == 'down_proj' else 'fc1'}_weight"]
        ffn = SIZES["moe_ffn_hidden_size"]
        dw = {"gate_proj": whole[:, :ffn], "up_proj": whole[:, ffn:], "down_proj": whole}[part] * LORA.scaling
        a, b = (factors[f"experts.{part}.{each}"] for each in ("lora_A", "lora_B"))
        expected = np.einsum("eor,eoi->eri", b, dw) if factor == "lora_A" else np.einsum("eoi,eri->eor", dw, a)
        assert relative(found[name], expected) < 1e-5, name


def test_merging_and_back_changes_little(seed):
    layer = make("paddle", "float32", seed, "all")
    want = step(layer, seed)
    layer.experts.merge()
    assert relative(step(layer, seed)["y"], want["y"]) < 1e-5
    layer.experts.unmerge()
    layer.experts.disable_lora = True
    without = step(layer, seed)["y"]
    layer.experts.disable_lora = False
    assert relative(step(layer, seed)["y"], want["y"]) < 1e-5 < relative(without, want["y"])


@pytest.mark.parametrize("recipe, bound", [(None, 0.01), ("delayed", 0.1), ("current", 0.1), ("block", 0.06)])
@pytest.mark.parametrize("case", [case for case in CASES if case != "shared"])
def test_te_computes_what_pd_does(case, recipe, bound, monkeypatch):
    """With fp8 beside fp8, which pd emulates; the factors' products are in 16 bits in both."""
    emulated_te.install(monkeypatch.setattr)
    poison_allocations(monkeypatch)
    seed = 38  # with which rounding chooses no other expert
    want = step(make("paddle", "float32", seed, case, recipe), seed, recipe)
    layer = make("transformer_engine", "bfloat16", seed, case, recipe)
    found = step(layer, seed, recipe)
    assert found.keys() == want.keys() and any("lora" in name for name in found)
    errors = {name: relative(found[name], want[name]) for name in want}
    assert max(errors.values()) < bound, errors
    assert layer.experts.adapters and len(layer.experts.fc1_weight) == EXPERTS


def test_what_experts_cannot_have_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="lora_dropout=0.1: experts have no dropout"):
        LoRAGroupedMLP.enable(None, {}, (), SimpleNamespace(lora_dropout=0.1))
    with pytest.raises(ValueError, match="ranks divide cannot be saved yet"):
        LoRAGroupedMLP.enable(SimpleNamespace(ep=object()), {}, (), LORA)
    emulated_te.install(monkeypatch.setattr)
    monkeypatch.setattr(LORA, "r", 4)
    layer = make("transformer_engine", "bfloat16", 1, "up")
    with pytest.raises(ValueError, match="4 columns between A and B of fc1.*multiple of 8"):
        step(layer, 1)
