"""Activations and the optimizer's states in host memory, and its update in backward: whole models on te, with the bits
that they have without."""

import numpy as np
import paddle
import pytest

from paddle_te.ops.te import offload
from paddle_te.optimizer import fuse_clipping, offloaded_states
from paddle_te.optimizer.compact_states import keep_compact
from paddle_te.optimizer.in_backward import OptimizerInBackward
from paddle_te.optimizer.offloaded_states import keep_on_host
from tests.gpu.test_finetune import HALF, SIZES, loss_and_gradients, whole, with_lora
from tests.small_models import TE, VOCABULARY, array, first, make, truth

LAYERS, STEPS = 5, 3
PRECISIONS = {
    "bf16": {},
    "fp8": dict(use_fp8=True),
    "fp8-norms-again": dict(use_fp8=True, recompute_modules=["layernorm"]),
}


def train(gpu, weights, ids, in_backward=False, kept=("bfloat16", "bf16_remainder"), on_host=0, **settings):
    """(losses, weights) of a few steps. kept: of keep_compact. on_host: share of the optimizer's states."""
    model = make(gpu, TE, HALF, weights, num_hidden_layers=LAYERS, **settings)
    model.train()
    optimizer = paddle.optimizer.AdamW(
        paddle.optimizer.lr.LinearWarmup(1e-2, 2, 1e-3, 1e-2), parameters=model.parameters(), multi_precision=True
    )
    updating = OptimizerInBackward(optimizer) if in_backward else fuse_clipping(optimizer)
    keep_compact(optimizer, *kept)
    keep_on_host(optimizer, on_host)
    if in_backward:
        updating.attach()
    losses = []
    for batch in ids:
        tokens = paddle.to_tensor(batch)
        loss = first(model(input_ids=tokens, labels=tokens))
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        optimizer._learning_rate.step()
        losses.append(loss.item())
    return losses, {name: array(parameter) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_they_change_no_bit(gpu, poisoned, monkeypatch, seed, precision):
    monkeypatch.setattr(offloaded_states, "LEAST", 1024)
    settings = PRECISIONS[precision]
    _, weights = truth(num_hidden_layers=LAYERS)
    ids = np.random.default_rng(seed).integers(0, VOCABULARY, [STEPS, 2, 64])
    losses, want = train(gpu, weights, ids, **settings)
    assert np.isfinite(losses).all() and len({*losses}) == STEPS
    for count, in_backward in ((LAYERS - offload.ON_DEVICE, False), (2, True)):
        got = train(gpu, weights, ids, in_backward, offload_activations=count, **settings)
        assert got[0] == losses
        for name, value in want.items():
            np.testing.assert_array_equal(got[1][name], value, err_msg=name)


@pytest.mark.parametrize("kept", [("float32", "float32"), ("int8", "bf16_remainder")])
def test_the_optimizers_states_change_no_bit(gpu, poisoned, monkeypatch, seed, kept):
    """In many small pieces, whose copies are behind and ahead of the updates."""
    monkeypatch.setattr(offloaded_states, "LEAST", 1024)
    monkeypatch.setattr(offloaded_states, "PIECE", 2048)
    monkeypatch.setattr(offloaded_states, "OFFLOADED_AT_ONCE", 4 * 2048)
    _, weights = truth(num_hidden_layers=LAYERS)
    ids = np.random.default_rng(seed).integers(0, VOCABULARY, [2 * STEPS, 2, 64])
    losses, want = train(gpu, weights, ids, kept=kept, use_fp8=True)
    assert np.isfinite(losses).all()
    for on_host, in_backward in ((1.0, False), (0.5, True)):
        got = train(gpu, weights, ids, in_backward, kept, on_host, use_fp8=True)
        assert got[0] == losses
        for name, value in want.items():
            np.testing.assert_array_equal(got[1][name], value, err_msg=name)


def test_activations_of_layers_with_lora(gpu, poisoned, monkeypatch, seed):
    """Whose weights are frozen."""
    monkeypatch.setattr(offloaded_states, "LEAST", 1024)
    _, weights = truth(num_hidden_layers=LAYERS, **SIZES)
    batch, found = whole(np.random.default_rng(seed), length=64), []
    for count in (0, 3):
        np.random.seed(seed)  # of the adapter's weights
        model = make(gpu, TE, HALF, weights, num_hidden_layers=LAYERS, use_fp8=True, offload_activations=count, **SIZES)
        found.append(loss_and_gradients(with_lora(model, "all"), batch))
    (loss, want), (other_loss, got) = found
    assert np.isfinite(loss) and loss == other_loss and len(want) == LAYERS * 14 and want.keys() == got.keys()
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)
