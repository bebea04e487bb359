"""LoRA on a MoELayer, for tests/gpu and for the emulated library."""

from types import SimpleNamespace

import numpy as np
import paddle

from paddle_te import fp8
from paddle_te.layers import stored_weights
from paddle_te.layers.moe import MoEConfig, MoELayer
from paddle_te.layers.moe.lora import LoRAGroupedMLP, LoRASharedExpertMLP
from tests.bfloat16 import truncated
from tests.moe_te_cases import RECIPES, SIZES, SIZES_OF

LORA = SimpleNamespace(r=8, scaling=2.0, lora_dropout=0.0)
ALL = ("gate_proj", "up_proj", "down_proj")
CASES = {
    "all": (ALL, {}),
    "up": (("up_proj",), {}),
    "gate, down": (("gate_proj", "down_proj"), dict(recompute_modules=("moe_act",), bias=True)),
    "shared": (ALL, dict(moe_shared_expert_intermediate_size=48)),
}
SEED = 38  # with which rounding chooses no other expert
BOUNDS = {None: 0.01, "delayed": 0.1, "current": 0.1, "block": 0.06}  # of te's errors against backend paddle


def make(backend, dtype, seed, case, recipe=None, in_fp8=False, keeps=False):
    """A MoELayer with LoRA, of drawn numbers. in_fp8: over weights that exist in fp8 only. keeps: the transposed copies
    of these, too."""
    names, options = CASES[case]
    sizes = SIZES_OF.get(recipe, SIZES)
    with fp8.fp8_model_init(in_fp8, RECIPES.get(recipe), keeps):
        layer = MoELayer(MoEConfig(**sizes, **options, params_dtype=dtype, backend=backend))
    stored = stored_weights(layer)
    add(layer, names)
    generator = np.random.default_rng(seed)
    for name, parameter in layer.named_parameters():
        value = generator.standard_normal(parameter.shape).astype("float32") * parameter.shape[-1] ** -0.5
        value = truncated(value + (name == "ln_weight"))
        if name in stored:
            held, weight = stored[name]
            held.store_weight(weight, paddle.to_tensor(value))
        else:
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
