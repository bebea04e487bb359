"""--gemm_autotune: the bits that there are without, and that algorithms were timed."""

from contextlib import nullcontext

import numpy as np
import paddle
import pytest

from paddle_te import fp8, native
from paddle_te.layers import RotaryPositionEmbedding, TransformerLayer
from paddle_te.ops.te import autograd
from tests.gpu.test_memory import LAYERS, STEPS, train
from tests.small_models import VOCABULARY, array, truth


def tuned_calls():
    return native.load().counts().get(("tuned_gemm", "fp8"), 0)


@pytest.mark.parametrize("settings", [
    {},
    dict(fp8_recipe="current", cuda_graphs=True),
    dict(fp8_lm_head=True, recompute_modules=["layernorm", "mlp"]),
], ids=["delayed", "current-graphs", "head-mlp-again"])  # fmt: skip
def test_it_changes_no_bit(gpu, poisoned, monkeypatch, caplog, seed, settings):
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    _, weights = truth(num_hidden_layers=LAYERS)
    ids = np.random.default_rng(seed).integers(0, VOCABULARY, [STEPS, 2, 64])
    losses, want = train(gpu, weights, ids, use_fp8=True, **settings)
    assert np.isfinite(losses).all() and len({*losses}) == STEPS
    before = tuned_calls()
    got_losses, got = train(gpu, weights, ids, use_fp8=True, gemm_autotune=True, **settings)
    assert got_losses == losses
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)
    assert tuned_calls() - before >= 4 * LAYERS * STEPS
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("recipe", [fp8.DelayedScaling(), fp8.Float8CurrentScaling()], ids=["delayed", "current"])
def test_a_layer_of_8b_has_the_same_bits(gpu, monkeypatch, caplog, seed, recipe):
    """Forward and backward, three steps, as long as sequences are where other algorithms are faster."""
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    options = dict(num_gqa_groups=8, params_dtype="bfloat16", backend="transformer_engine")
    layers = [TransformerLayer(4096, 14336, 32, **options) for _ in range(2)]
    for parameter, same in zip(*[layer.parameters() for layer in layers], strict=True):
        same.set_value(parameter)
    freqs, results = RotaryPositionEmbedding(128)(8192), []
    for layer, launching in zip(layers, (nullcontext, autograd.gemm_autotune), strict=True):
        generator, of_steps = np.random.default_rng(seed), []
        for _ in range(3):
            numbers = generator.standard_normal([2, 1, 8192, 4096], "float32")
            x, dy = (paddle.to_tensor(n).astype("bfloat16") for n in numbers)
            x.stop_gradient = False
            with caplog.at_level("INFO", logger="paddle_te.native"), fp8.fp8_autocast(True, recipe), launching():
                y = layer(x, rotary_pos_emb=freqs)
            y.backward(dy)
            of_steps += [array(y), array(x.grad)]
        results.append(of_steps + [array(parameter.grad) for parameter in layer.parameters()])
    print(*caplog.messages, sep="\n")
    for want, got in zip(*results, strict=True):
        np.testing.assert_array_equal(got, want)
    assert np.isfinite(results[0][0]).all()
