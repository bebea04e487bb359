"""LayerNormMLP in chunks of tokens, for tests/gpu on the real library and for the emulated one."""

import numpy as np
import paddle

from paddle_te import fp8
from paddle_te.layers import LayerNormMLP
from tests.te_weights import relative

HIDDEN, FFN, BATCH, TOKENS, CHUNK = 128, 256, 2, 192, 256  # 384 tokens: a chunk and half a one
LLAMA, IN_GRAD = dict(fuse_wgrad_accumulation=True), dict(fuse_wgrad_accumulation="grad")
GPT = dict(bias=True, normalization="LayerNorm", activation="gelu")
DTYPES = {"transformer_engine": "bfloat16", "paddle": "float32"}
RECIPES = {
    "16bits": None,
    "delayed": fp8.DelayedScaling(amax_history_len=2, first_step="delayed"),
    "from_current": fp8.DelayedScaling(amax_history_len=2),
    "current": fp8.Float8CurrentScaling(),
    "block": fp8.Float8BlockScaling(),
}


def train(seed, backend, recipe, micro_batches=1, frozen=(), **options):
    """({name: float32 array} of all outputs and gradients of two steps, the fp8 state behind them)."""
    draw, found, dtype = np.random.default_rng(seed).standard_normal, {}, DTYPES[backend]
    layer = LayerNormMLP(HIDDEN, FFN, params_dtype=dtype, backend=backend, **options)
    for name, parameter in layer.named_parameters():
        parameter.set_value(paddle.to_tensor(0.1 * draw(parameter.shape, "float32")).astype(parameter.dtype))
        parameter.stop_gradient = name in frozen
    for step in range(2):
        for i in range(micro_batches):
            x, dy = (paddle.to_tensor(draw([BATCH, TOKENS, HIDDEN], "float32")).astype(dtype) for _ in range(2))
            x = x.detach()
            x.stop_gradient = "x" in frozen
            paddle.seed(step)
            first = i == 0 if micro_batches > 1 else None
            with fp8.fp8_autocast(recipe is not None, recipe), fp8.microbatch(first):
                y = layer(x)
            y.backward(dy)
            found |= {f"{step} {i} y": y, f"{step} {i} dx": x.grad}
        for name, parameter in layer.named_parameters():
            main_grad = getattr(parameter, "main_grad", None)
            gradient = parameter.grad if main_grad is None else main_grad
            found[f"{step} {name}"] = None if gradient is None else gradient.clone()
    values = {name: value.astype("float32").numpy() for name, value in found.items() if value is not None}
    return values, fp8.state_dict(layer, recipe)["modules"] if recipe is not None else {}


def check(want, got, bound):
    assert want.keys() == got.keys()
    for name, value in want.items():
        assert relative(got[name], value) < bound, name
