"""The MLP's SwiGLU in fp8 by our kernel and by TE's functions: cases of tests on the emulated library and on a GPU."""

import numpy as np
import paddle

from paddle_te import fp8
from paddle_te.layers import LayerNormMLP
from paddle_te.ops.te import program, swiglu
from paddle_te.ops.te.counting import count_entry_points

TOKENS, HIDDEN, FFN = (2, 24), 32, 80
RECIPES = {
    "delayed": fp8.DelayedScaling(amax_history_len=2, first_step="delayed"),
    "delayed_e4m3": fp8.DelayedScaling(amax_history_len=2, fp8_format=fp8.Format.E4M3, first_step="delayed"),
    "delayed_from_current": fp8.DelayedScaling(amax_history_len=2, first_step="current"),
    "current": fp8.Float8CurrentScaling(),
}
RECOMPUTED = [(), ("mlp_act",), ("mlp",)]


def draw(random, shape):
    return paddle.to_tensor(random.standard_normal(shape), "float32").astype("bfloat16").detach()


def steps(seed, recipe, **options):
    """Outputs and gradients of three steps, and the names of what the last step called."""
    program.clear()
    random, seen = np.random.default_rng(seed), []
    layer = LayerNormMLP(HIDDEN, FFN, params_dtype="bfloat16", **options)
    for weight in layer.parameters():
        weight.set_value(draw(random, weight.shape))
    for _ in range(3):
        x, dy = draw(random, (*TOKENS, HIDDEN)), draw(random, (*TOKENS, HIDDEN))
        x.stop_gradient = False
        with count_entry_points() as calls, fp8.fp8_autocast(True, recipe):
            y = layer(x)
            y.backward(dy)
        tensors = y, x.grad, *(weight.grad for weight in layer.parameters())
        seen += [tensor.astype("float32").numpy() for tensor in tensors]
        layer.clear_gradients()
    return seen, {name for name, _ in calls}


def check_the_librarys_bits(seed, monkeypatch, recipe, recompute_modules):
    """Outputs and gradients with our kernel are those with TE's functions, which then run instead."""
    got, calls = steps(seed, recipe, recompute_modules=recompute_modules)
    monkeypatch.setattr(swiglu, "takes", lambda *_: False)
    want, of_library = steps(seed, recipe, recompute_modules=recompute_modules)
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert not any("swiglu" in name for name in calls)
    assert any("swiglu" in name for name in of_library)
