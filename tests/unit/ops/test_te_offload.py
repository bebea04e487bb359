"""paddle_te.ops.te.offload: the same bits, whenever the copies run, and the bytes that leave the device."""

import numpy as np
import paddle
import pytest

from paddle_te import fp8
from paddle_te.layers import RotaryPositionEmbedding, TransformerLayer
from paddle_te.ops.te import offload
from paddle_te.planner import memory
from paddle_te.planner.layout import layout as layout_of
from paddle_te.planner.model import Model
from tests import emulated_te
from tests.poison import poison_allocations

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 4, 2, 16
BATCH, TOKENS, LAYERS, STEPS = 2, 32, 5, 2
DELAYED = fp8.DelayedScaling(amax_history_len=2)
ANGLES = RotaryPositionEmbedding(HEAD_DIM)(TOKENS)


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    """Copies run when they are waited for, and not before; all that is allocated is NaN until it is written."""
    emulated_te.install(monkeypatch.setattr)
    poison_allocations(monkeypatch)
    monkeypatch.setattr(offload, "LEAST", 1024)


class Layers(paddle.nn.Layer):
    """A stack of layers, of which the first `count` keep their activations on the host; None: no offload."""

    def __init__(self, seed, count=None, **options):
        super().__init__()
        shared = dict(params_dtype="bfloat16", backend="transformer_engine")
        self.stack = paddle.nn.LayerList(
            [TransformerLayer(HIDDEN, FFN, HEADS, KV_HEADS, **shared, **options) for _ in range(LAYERS)]
        )
        self.offload = None if count is None else offload.ActivationOffload(LAYERS, count)
        draw = np.random.default_rng(seed).standard_normal
        for parameter in self.parameters():
            parameter.set_value(paddle.to_tensor(0.1 * draw(parameter.shape, "float32")).astype(parameter.dtype))

    def forward(self, x, recipe):
        for number, layer in enumerate(self.stack):
            with fp8.fp8_autocast(recipe is not None, recipe):
                if self.offload is None:
                    x = layer(x, None, ANGLES)
                    continue
                with self.offload.forward_of(number):
                    x = layer(x, None, ANGLES)
        return x


def given(draw):
    x, dy = (paddle.to_tensor(draw([BATCH, TOKENS, HIDDEN], "float32")).astype("bfloat16") for _ in range(2))
    x = x.detach()
    x.stop_gradient = False
    return x, dy


def train(seed, count, recipe, micro_batches, **options):
    """All outputs and gradients of two steps, in float32. Between the steps there is a forward without gradients."""
    layers, draw = Layers(seed, count, **options), np.random.default_rng(seed + 1).standard_normal
    found = []
    for _ in range(STEPS):
        for i in range(micro_batches):
            x, dy = given(draw)
            with fp8.microbatch(i == 0 if micro_batches > 1 else None):
                y = layers(x, recipe)
                y.backward(dy)
            found += [y, x.grad]
        for parameter in layers.parameters():
            main_grad = getattr(parameter, "main_grad", None)
            found.append((parameter.grad if main_grad is None else main_grad).clone())
        with paddle.no_grad():
            layers.eval()
            layers(x, recipe)
            layers.train()
    return [tensor.astype("float32").numpy() for tensor in found]


@pytest.mark.parametrize("recipe", [None, DELAYED], ids=["bf16", "fp8"])
@pytest.mark.parametrize(
    "options, micro_batches", [(dict(recompute_modules=("layernorm",)), 1), (dict(fuse_wgrad_accumulation=True), 2)]
)
def test_the_same_bits(seed, recipe, options, micro_batches):
    want = train(seed, None, recipe, micro_batches, **options)
    assert np.isfinite(want[0]).all()
    for count in (1, LAYERS - offload.ON_DEVICE):
        got = train(seed, count, recipe, micro_batches, **options)
        for one, other in zip(want, got, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("missing", ["hold", "copy"])
def test_each_wait_is_needed(seed, monkeypatch, missing):
    """The test above would see numbers that come too late, or not at all."""
    monkeypatch.setattr(
        *dict(hold=(emulated_te.Event, "hold"), copy=(emulated_te.CopyStream, "copy"))[missing], lambda *a: None
    )
    want, got = (train(seed, count, None, 1) for count in (None, 2))
    assert any((one != other).any() for one, other in zip(want, got, strict=True))


def allocated():
    """Bytes that Paddle's tensors on the host take, which stands for the device here; HostMemory is NumPy's."""
    return paddle.base.core.host_memory_stat_current_value("Allocated", 0)


def kept_bytes(seed, count, recipe):
    """What the layers keep on the device after a forward."""
    layers = Layers(seed, count)
    x, dy = given(np.random.default_rng(seed).standard_normal)
    layers(x, recipe).backward(dy)  # makes scales and tables that stay
    before = allocated()
    y = layers(x, recipe)
    kept = allocated() - before - y.numel().item() * y.element_size()
    y.backward(dy)
    return kept


@pytest.mark.parametrize("precision, recipe", [("bf16", None), ("fp8", DELAYED)])
def test_the_planner_knows_the_bytes_that_leave(seed, precision, recipe, monkeypatch):
    monkeypatch.setattr(offload, "LEAST", 0)
    model = Model(HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HIDDEN // HEADS, 1)
    layout = layout_of(1, TOKENS, batch=BATCH, precision=precision)
    of_a_layer = memory.offloaded_bytes(model, layout)
    whole, offloaded = (kept_bytes(seed, count, recipe) for count in (None, 3))
    assert whole - offloaded == 3 * of_a_layer - BATCH * TOKENS * 2 * HIDDEN  # x, which is the first's, stays


def test_layers_that_must_stay():
    with pytest.raises(ValueError, match="offload_activations 4: of the model's 5 layers 2 .*at most 3"):
        offload.ActivationOffload(5, 4)
