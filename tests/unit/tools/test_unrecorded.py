"""The benchmark's ops without recorded programs compute what recorded ones do, to the bit, on the emulated library."""

import numpy as np
import paddle
import pytest

from paddle_te import fp8
from paddle_te.layers import TransformerLayer
from paddle_te.layers.rotary import RotaryPositionEmbedding
from paddle_te.ops.te import autograd
from tests import emulated_te
from tests.poison import poison_allocations
from tools.benchmark.unrecorded import unrecorded

RECIPES = {"bf16": None, "delayed": fp8.DelayedScaling(amax_history_len=3), "current": fp8.Float8CurrentScaling()}


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    emulated_te.install(monkeypatch.setattr)
    poison_allocations(monkeypatch)


def train(recipe, seed, fuse):
    """Outputs, gradients and main gradients of two steps with two micro-batches each."""
    paddle.seed(seed)
    paddle.set_default_dtype("bfloat16")
    try:
        layer = TransformerLayer(
            64, 96, 4, num_gqa_groups=2, backend="transformer_engine", fuse_wgrad_accumulation=fuse
        )
    finally:
        paddle.set_default_dtype("float32")
    freqs, generator, found = RotaryPositionEmbedding(16)(32), np.random.default_rng(seed), []
    for _ in range(2):
        for first in (True, False):
            x = paddle.to_tensor(generator.standard_normal([1, 32, 64]).astype("float32")).astype("bfloat16").detach()
            x.stop_gradient = False
            with fp8.fp8_autocast(recipe is not None, recipe), fp8.microbatch(first):
                y = layer(x, rotary_pos_emb=freqs)
                y.astype("float32").square().mean().backward()
            found += [y, x.grad]
    for weight in layer.parameters():
        found.append(weight.main_grad if getattr(weight, "main_grad", None) is not None else weight.grad)
    return [tensor.astype("float32").numpy() for tensor in found]


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_same_bits(seed, recipe, fuse):
    recorded, op_apply = train(RECIPES[recipe], seed, fuse), autograd.apply
    with unrecorded():
        assert autograd.apply is not op_apply
        again = train(RECIPES[recipe], seed, fuse)
    assert autograd.apply is op_apply
    for one, other in zip(recorded, again, strict=True):
        assert np.isfinite(one).all() and (one == other).all()
