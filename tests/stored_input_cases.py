"""Layers that keep less of the MLP for backward, also with LoRA: for the emulated library and for tests/gpu."""

from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace

import numpy as np
import paddle

from paddle_te import fp8
from paddle_te.layers import RotaryPositionEmbedding, TransformerLayer
from paddle_te.layers.lora import LoRALayerNormLinear, LoRALayerNormMLP, LoRALinear
from paddle_te.ops.te import kernel_choice, program
from tests.te_weights import relative

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, RANK = 256, 384, 4, 2, 64, 8  # 128, for block scaling, divides them
BATCH, TOKENS = 2, 64
DTYPES = {"transformer_engine": "bfloat16", "paddle": "float32"}
DELAYED = fp8.DelayedScaling(amax_history_len=2, first_step="delayed")
RECIPES = {"16bits": None, "delayed": DELAYED, "current": fp8.Float8CurrentScaling(), "block": fp8.Float8BlockScaling()}
GPT = dict(bias=True, normalization="LayerNorm", activation="gelu")
STORED = dict(activation_func_fp8_input_store=True)
AGAIN = dict(recompute_modules=("layernorm", "mlp_act"))
ADAPTERS = ("none", "lora", "lora over fp8")
E4M3 = 0.027  # what rounding to three bits of mantissa is off by, as a root mean square


@cache
def angles(device):
    """Once, so that they are nothing that a layer keeps."""
    return RotaryPositionEmbedding(HEAD_DIM)(TOKENS)


def add_lora(layer, dropout=0.0):
    """LoRA on all that a Llama's layer has."""
    attention, mlp = layer.self_attention, layer.layernorm_mlp
    kv = KV_HEADS * HEAD_DIM
    qkv = dict(q_proj=HIDDEN, k_proj=kv, v_proj=kv)
    of_mlp = {"fc1_weight": dict(gate_proj=FFN, up_proj=FFN), "fc2_weight": dict(down_proj=HIDDEN)}
    config = SimpleNamespace(r=RANK, scaling=2.0, lora_dropout=dropout)
    LoRALayerNormLinear.enable(attention.layernorm_qkv, {"weight": qkv}, (*qkv,), config)
    LoRALinear.enable(attention.proj, {"weight": dict(o_proj=HIDDEN)}, ("o_proj",), config)
    LoRALayerNormMLP.enable(mlp, of_mlp, ("gate_proj", "up_proj", "down_proj"), config)
    for name, parameter in layer.named_parameters():
        parameter.stop_gradient = "lora_" not in name


def make(seed, backend, recipe=None, adapter="none", keeps=False, **options):
    """A layer whose weights follow from the seed. keeps: the transposed copies of those that exist in fp8 only."""
    dtype = DTYPES[backend]
    with fp8.fp8_model_init(True, recipe, keeps) if adapter == "lora over fp8" else nullcontext():
        layer = TransformerLayer(HIDDEN, FFN, HEADS, KV_HEADS, params_dtype=dtype, backend=backend, **options)
        draw = np.random.default_rng(seed).standard_normal
        for parent in (layer.self_attention.layernorm_qkv, layer.self_attention.proj, layer.layernorm_mlp):
            for name, parameter in parent.named_parameters():
                value = paddle.to_tensor((0.06 if parameter.ndim == 2 else 0.3) * draw(parameter.shape, "float32"))
                value = value.astype(dtype)
                parent.store_weight(name, value) if name in parent.stored_weights else parameter.set_value(value)
    if adapter != "none":
        add_lora(layer)
        for name, parameter in layer.named_parameters():
            if "lora_" in name:
                parameter.set_value(paddle.to_tensor(0.1 * draw(parameter.shape, "float32")).astype(dtype))
    return layer


def forward(layer, x, recipe):
    with fp8.fp8_autocast(recipe is not None, recipe):
        return layer(x, None, angles(paddle.get_device()))


def inputs(seed, backend):
    """(x, the gradient of what comes of it)."""
    draw = np.random.default_rng(seed + 1).standard_normal
    x, dy = (paddle.to_tensor(draw([BATCH, TOKENS, HIDDEN], "float32")).astype(DTYPES[backend]) for _ in range(2))
    x = x.detach()
    x.stop_gradient = False
    return x, dy


def train(seed, backend, recipe=None, adapter="none", **options):
    """The output and the gradients, by name."""
    layer, (x, dy) = make(seed, backend, recipe, adapter, **options), inputs(seed, backend)
    y = forward(layer, x, recipe)
    y.backward(dy)
    found = {"y": y, "dx": x.grad} | {n: p.grad for n, p in layer.named_parameters() if not p.stop_gradient}
    return {name: value.astype("float32").numpy() for name, value in found.items()}


def check_the_gradients_error(exact, seed, recipe, adapter):
    """Forward has the same bits. To the error of matrices' gradients, compared with `exact`, of float32 without any
    fp8, the rounding of the activation's input adds at most twice its own, as a root of squares: seen were 1.6 times,
    in fc2's weight or A, whose gradient it reaches only where the activation is computed again."""
    given = seed, "transformer_engine", RECIPES[recipe], adapter
    without, of_mlp = train(*given), "layernorm_mlp."
    fc1, fc2 = ("fc1_weight", "fc2_weight") if adapter == "none" else ("up_proj.lora_A", "down_proj.lora_A")
    for options in (STORED, STORED | AGAIN):
        got = train(*given, **options)
        np.testing.assert_array_equal(got["y"], without["y"])
        for name, value in exact.items():
            error, of_rest = relative(got[name], value), relative(without[name], value)
            assert value.ndim == 1 or error**2 < of_rest**2 + (2 * E4M3) ** 2, (name, options)
        assert relative(got[of_mlp + fc1], without[of_mlp + fc1]) > E4M3 / 2
        assert (relative(got[of_mlp + fc2], without[of_mlp + fc2]) > E4M3) == (options != STORED)


def check_swiglus_kernel(seed, monkeypatch, recipe, adapter, **options):
    """What SwiGLU's kernel does in one pass, the library's functions and kernels of MXFP8 alone do: the same bits."""
    given = seed, "transformer_engine", RECIPES[recipe], adapter
    want = train(*given, **options)
    with monkeypatch.context() as patched:
        for choice in ("swiglu", "swiglu_of_stored"):
            patched.setattr(kernel_choice, choice, lambda *_: False)
        program.clear()
        got = train(*given, **options)
    program.clear()
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value, name)
