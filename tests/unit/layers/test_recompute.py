"""Parts of a layer that backward computes again: nothing changes but the memory, which the planner knows."""

import gc

import numpy as np
import paddle
import pytest

from paddle_te import fp8
from paddle_te.layers import LayerNormMLP, RotaryPositionEmbedding, TransformerLayer
from paddle_te.options.layers import RECOMPUTE_MODULES
from paddle_te.planner import memory
from paddle_te.planner.layout import layout as layout_of
from paddle_te.planner.model import Model
from tests import emulated_te
from tests.poison import poison_allocations

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 4, 2, 16
BATCH, TOKENS, STEPS, MICRO_BATCHES = 2, 32, 2, 2
LLAMA, GPT = {}, dict(bias=True, normalization="LayerNorm", activation="gelu")
OLMO = dict(norms="after", qk_norm_type="RMSNorm", qk_norm_before_rope=True, qk_norm_over="all")
SINKS = dict(softmax_type="learnable")
BOTH = dict(norms="both", rotary_pos_interleaved=True, qk_norm_type="RMSNorm", qk_norm_before_rope=True)
SINGLE = [(name,) for name in RECOMPUTE_MODULES if not name.startswith("moe")]  # those of layers without experts
TOGETHER = [("layernorm", "mlp_act", "core_attn"), ("layernorm", "mlp")]  # all that can be at the same time
DELAYED, CURRENT = fp8.DelayedScaling(amax_history_len=2), fp8.Float8CurrentScaling()
ANGLES = RotaryPositionEmbedding(HEAD_DIM)(TOKENS)
BACKENDS = {"transformer_engine": "bfloat16", "paddle": "float32"}


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    emulated_te.install(monkeypatch.setattr)
    poison_allocations(monkeypatch)


def make(seed, backend, parts, **options):
    """A layer whose weights follow from the seed."""
    shared = dict(params_dtype=BACKENDS[backend], backend=backend, recompute_modules=parts)
    layer = TransformerLayer(HIDDEN, FFN, HEADS, KV_HEADS, **shared, **options)
    draw = np.random.default_rng(seed).standard_normal
    for parameter in layer.parameters():
        parameter.set_value(paddle.to_tensor(0.1 * draw(parameter.shape, "float32")).astype(parameter.dtype))
    return layer


def forward(layer, x, recipe):
    with fp8.fp8_autocast(recipe is not None, recipe):
        return layer(x, None, ANGLES)


def inputs(draw, backend):
    x, dy = (paddle.to_tensor(draw([BATCH, TOKENS, HIDDEN], "float32")).astype(BACKENDS[backend]) for _ in range(2))
    x = x.detach()
    x.stop_gradient = False
    return x, dy


def train(seed, backend, parts, recipe, micro_batches, **options):
    """All outputs and gradients of two steps, by name."""
    layer, draw = make(seed, backend, parts, **options), np.random.default_rng(seed + 1).standard_normal
    found = {}
    for step in range(STEPS):
        for i in range(micro_batches):
            x, dy = inputs(draw, backend)
            with fp8.microbatch(i == 0 if micro_batches > 1 else None):
                y = forward(layer, x, recipe)
                y.backward(dy)
            found |= {f"{step} {i} y": y, f"{step} {i} dx": x.grad}
        for name, parameter in layer.named_parameters():
            main_grad = getattr(parameter, "main_grad", None)
            found[f"{step} {name}"] = (parameter.grad if main_grad is None else main_grad).clone()
    return {name: value.astype("float32").numpy() for name, value in found.items()}


@pytest.mark.parametrize("recipe", [None, DELAYED, CURRENT], ids=["16bits", "delayed", "current"])
@pytest.mark.parametrize(
    "options, micro_batches",
    [
        (dict(fuse_wgrad_accumulation=True), 2),
        (dict(fuse_wgrad_accumulation="grad"), 2),
        (GPT, 1),
        (OLMO, 1),
        (BOTH, 1),
        (SINKS, 1),
    ],
    ids=["llama", "llama in grad", "gpt", "olmo", "norms on both sides", "sinks"],
)
def test_te_gives_the_same_bits(seed, options, micro_batches, recipe):
    """With two micro-batches, whose fp8 weights are kept and whose gradients are added up, and with one."""
    check_bits(seed, "transformer_engine", recipe, micro_batches, options)


@pytest.mark.parametrize("options", [GPT, SINKS], ids=["gpt", "sinks"])
@pytest.mark.parametrize("recipe", [None, DELAYED], ids=["float32", "delayed"])
def test_pd_gives_the_same_bits(seed, recipe, options):
    check_bits(seed, "paddle", recipe, 1, options)


def check_bits(seed, backend, recipe, micro_batches, options):
    want = train(seed, backend, (), recipe, micro_batches, **options)
    for parts in TOGETHER:
        got = train(seed, backend, parts, recipe, micro_batches, **options)
        for name, value in want.items():
            assert (got[name] == value).all(), (parts, name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_input_without_gradient(seed, backend):
    """As behind an embedding that is frozen: the weights get the gradients that they get otherwise."""
    x, dy = inputs(np.random.default_rng(seed).standard_normal, backend)
    x.stop_gradient = True
    gradients = []
    for parts in ((), ("layernorm", "mlp")):
        layer = make(seed, backend, parts)
        forward(layer, x, None).backward(dy)
        gradients.append([parameter.grad.astype("float32").numpy() for parameter in layer.parameters()])
    for want, got in zip(*gradients, strict=True):
        assert (want == got).all()


def allocated():
    """Bytes that Paddle's tensors on the host take."""
    gc.collect()  # what earlier tests have left in circles would go at some moment between two calls
    return paddle.base.core.host_memory_stat_current_value("Allocated", 0)


def kept_bytes(seed, parts, recipe, **options):
    """What te's layer keeps for its backward, from one forward to the next."""
    layer = make(seed, "transformer_engine", parts, **options)
    x, dy = inputs(np.random.default_rng(seed).standard_normal, "transformer_engine")
    forward(layer, x, recipe).backward(dy)  # makes scales and tables that stay
    before = allocated()
    y = forward(layer, x, recipe)
    kept = allocated() - before
    return kept - y.numel().item() * y.element_size()


@pytest.mark.parametrize("options", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("precision, recipe", [("bf16", None), ("fp8", DELAYED)])
def test_the_planner_knows_the_bytes(seed, precision, recipe, options):
    """To the byte: these sizes are multiples of 256, to which allocations are aligned."""
    llama = not options
    model = Model(HIDDEN, FFN, 1, HEADS, KV_HEADS, HIDDEN // HEADS, 1, gated=llama, bias=not llama)
    for parts in [(), *SINGLE, *TOGETHER]:
        layout = layout_of(1, TOKENS, batch=BATCH, precision=precision, recompute_modules=parts)
        of_a_token = memory.kept_of_a_layer(model, layout) - 2 * HIDDEN  # the layer's input was there before
        want = BATCH * TOKENS * of_a_token + memory.fp8_copies_of_a_layer(model, layout)
        got = kept_bytes(seed, parts, recipe, **options)
        assert got == want, parts


def test_paddle_keeps_less(seed):
    """Plain autograd has other tensors than te; each part's are fewer where it is computed again."""

    def kept(parts):
        layer = make(seed, "paddle", parts)
        x, _ = inputs(np.random.default_rng(seed).standard_normal, "paddle")
        before = allocated()
        y = forward(layer, x, None)
        return allocated() - before, y

    everything, _ = kept(())
    for parts in SINGLE:
        assert kept(parts)[0] < everything - BATCH * TOKENS * HIDDEN, parts


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="recompute_modules='norm'; it may be one of 'layernorm'"):
        LayerNormMLP(64, 64, recompute_modules=("norm",), backend="paddle")
    with pytest.raises(ValueError, match="'mlp' computes the activation again"):
        TransformerLayer(64, 64, 4, recompute_modules=("mlp", "mlp_act"), backend="paddle")
