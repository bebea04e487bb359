"""LoRA on a MoELayer: of backend paddle beside merged weights, and of te beside backend paddle."""

from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from paddle_te.layers.moe import GroupedMLP
from paddle_te.layers.moe.experts import SharedExpertMLP
from paddle_te.layers.moe.lora import LoRAGroupedMLP
from tests import emulated_te
from tests.moe_lora_cases import BOUNDS, CASES, LORA, SEED, make, step
from tests.moe_te_cases import SIZES, relative
from tests.poison import poison_allocations


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


@pytest.mark.parametrize("recipe", BOUNDS)
@pytest.mark.parametrize("case", [case for case in CASES if case != "shared"])
def test_te_computes_what_pd_does(case, recipe, monkeypatch):
    """With fp8 beside fp8, which pd emulates; the factors' products are in 16 bits in both."""
    emulated_te.install(monkeypatch.setattr)
    poison_allocations(monkeypatch)
    want = step(make("paddle", "float32", SEED, case, recipe), SEED, recipe)
    found = step(make("transformer_engine", "bfloat16", SEED, case, recipe), SEED, recipe)
    assert found.keys() == want.keys() and any("lora" in name for name in found)
    errors = {name: relative(found[name], want[name]) for name in want}
    assert max(errors.values()) < BOUNDS[recipe], errors


@pytest.mark.parametrize("backend, dtype", [("paddle", "float32"), ("transformer_engine", "bfloat16")])
@pytest.mark.parametrize("case", CASES)
def test_over_weights_in_fp8_only(case, backend, dtype, monkeypatch):
    """The same numbers as over weights in 16 bits, which current scaling rounds alike in each step."""
    if backend == "transformer_engine":
        emulated_te.install(monkeypatch.setattr)
        poison_allocations(monkeypatch)
    layers = [make(backend, dtype, SEED, case, "current", in_fp8) for in_fp8 in (False, True)]
    assert layers[1].experts.fc1_weight.dtype == paddle.uint8
    want, found = (step(layer, SEED, "current") for layer in layers)
    assert want.keys() == found.keys()
    for name, value in want.items():
        assert relative(found[name], value) < 1e-6, name
    with pytest.raises(RuntimeError, match="fp8 only"):
        layers[1].experts.merge()


def test_what_experts_cannot_have_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="lora_dropout=0.1: experts have no dropout"):
        LoRAGroupedMLP.enable(None, {}, (), SimpleNamespace(lora_dropout=0.1))
    emulated_te.install(monkeypatch.setattr)
    monkeypatch.setattr(LORA, "r", 4)
    layer = make("transformer_engine", "bfloat16", 1, "up")
    with pytest.raises(ValueError, match="4 columns between A and B of fc1.*multiple of 8"):
        step(layer, 1)
