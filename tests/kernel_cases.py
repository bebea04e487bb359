"""Layers in fp8 by our kernels and by TE's functions: cases of tests on the emulated library and on a GPU."""

import numpy as np
import paddle

from paddle_te import fp8
from paddle_te.layers import LayerNormMLP, RotaryPositionEmbedding, TransformerLayer
from paddle_te.ops.te import kernel_choice, program
from paddle_te.ops.te.counting import count_entry_points

TOKENS, HIDDEN, FFN, HEADS = (2, 24), 512, 80, 8
RECIPES = {
    "delayed": fp8.DelayedScaling(amax_history_len=2, first_step="delayed"),
    "delayed_e4m3": fp8.DelayedScaling(amax_history_len=2, fp8_format=fp8.Format.E4M3, first_step="delayed"),
    "delayed_from_current": fp8.DelayedScaling(amax_history_len=2, first_step="current"),
    "current": fp8.Float8CurrentScaling(),
}
OPTIONS = {  # of the MLP
    "kept": {},
    "mlp_act_again": dict(recompute_modules=("mlp_act",)),
    "mlp_again": dict(recompute_modules=("mlp",)),
    "main_gradients": dict(fuse_wgrad_accumulation=True),  # whose later micro-batches have a backward of their own
}
OF_TRANSFORMER = {  # of a whole layer
    "heads": {},
    "groups": dict(num_gqa_groups=2),
    "recompute": dict(num_gqa_groups=2, recompute_modules=("layernorm", "core_attn", "mlp")),
    "main_gradients": dict(fuse_wgrad_accumulation=True),
}


def mlp(**options):
    return LayerNormMLP(HIDDEN, FFN, params_dtype="bfloat16", **options)


def transformer(**options):
    """A TransformerLayer that takes no angles."""
    layer = TransformerLayer(HIDDEN, FFN, HEADS, params_dtype="bfloat16", **options)
    angles, forward = RotaryPositionEmbedding(dim=HIDDEN // HEADS)(TOKENS[1]), layer.forward
    layer.forward = lambda x: forward(x, rotary_pos_emb=angles)
    return layer


def draw(random, shape):
    return paddle.to_tensor(random.standard_normal(shape), "float32").astype("bfloat16").detach()


def steps(seed, recipe, make=mlp, **options):
    """Outputs and gradients of three steps of two layers, which share what is recorded, and the names of what the last
    step called."""
    program.clear()
    random, seen = np.random.default_rng(seed), []
    layers = [make(**options) for _ in range(2)]
    weights = [weight for layer in layers for weight in layer.parameters()]
    for weight in weights:
        weight.set_value(draw(random, weight.shape))
    for _ in range(3):
        x, dy = draw(random, (*TOKENS, HIDDEN)), draw(random, (*TOKENS, HIDDEN))
        x.stop_gradient = False
        with count_entry_points() as calls, fp8.fp8_autocast(True, recipe):
            y = layers[1](layers[0](x))
            y.backward(dy)
        tensors = y, x.grad, *(getattr(weight, "main_grad", weight.grad) for weight in weights)
        seen += [tensor.astype("float32").numpy() for tensor in tensors]
        for layer in layers:
            layer.clear_gradients()
    return seen, {name for name, _ in calls}


def check_the_librarys_bits(seed, monkeypatch, recipe, options, make=mlp):
    """Outputs and gradients with our kernels are those with TE's functions, which then run instead."""
    got, calls = steps(seed, recipe, make, **options)
    for choice in ("swiglu", "cast", "norm"):
        monkeypatch.setattr(kernel_choice, choice, lambda *_: False)
    want, of_library = steps(seed, recipe, make, **options)
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert not {"swiglu", "dswiglu", "dswiglu_cast_transpose", "quantize", "rmsnorm_fwd"} & calls
    assert any("swiglu" in name for name in of_library) and {"quantize", "memcpy_async"} <= of_library
    # the norm copies the residual, unless the projection is an op of its own
    assert ("memcpy_async" in calls) == ("core_attn" in options.get("recompute_modules", ()))
