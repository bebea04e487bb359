"""Decoder layers of backend te in PaddleFormers' Llama, TE's kernels emulated in NumPy, against its own in float32."""

import numpy as np
import paddle
import pytest

pytest.importorskip("paddleformers", reason="needs PaddleFormers: HOST=paddleformers bash scripts/test.sh")

from tests.paddleformers.llama import model_class, tiny_config, two_models
from tests.te_weights import copy_layer, relative, te_gradients


def in_bfloat16(config):
    paddle.set_default_dtype("bfloat16")
    try:
        return model_class(config)(config)
    finally:
        paddle.set_default_dtype("float32")


def run(layer, x, dy, *arguments):
    """A layer's output and its input's gradient, in float32."""
    x = x.detach()
    x.stop_gradient = False
    y = layer(x, *arguments)
    y.backward(dy)
    return y.astype("float32"), x.grad.astype("float32")


@pytest.mark.parametrize("settings, bound", [({}, 0.04), (dict(use_fp8=True, fp8_recipe="current"), 0.3)])
def test_a_layer(seed, te, settings, bound):
    """The bounds are some times what rounding to bfloat16 (2⁻⁹) and fp8 (2⁻⁴) gives in a layer's eight GEMMs."""
    generator = np.random.default_rng(seed)
    host, _ = two_models(generator)
    model = in_bfloat16(tiny_config("transformer_engine", **settings))
    theirs, ours = host.model.layers[0], model.model.layers[0]
    copy_layer(theirs, ours)
    x, dy = (paddle.to_tensor(generator.standard_normal([2, 24, 64]).astype("float32")) for _ in range(2))
    positions = paddle.arange(24).expand([2, 24])
    causal = paddle.triu(paddle.full([2, 1, 24, 24], -1e30), 1)
    want, want_dx = run(theirs, x, dy, causal, None, positions, host.model.rotary_emb(x, positions))
    got, got_dx = run(ours, x.astype("bfloat16"), dy.astype("bfloat16"), None, None, positions)
    assert relative(got, want) < bound
    assert relative(got_dx, want_dx) < bound
    wanted = te_gradients(theirs)
    for name, parameter in ours.transformer.named_parameters():
        assert relative(parameter.grad.astype("float32"), wanted[name]) < bound, name
