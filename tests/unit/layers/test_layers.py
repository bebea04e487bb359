"""Layers of backend paddle against float64 NumPy and Paddle's own functions."""

from copy import deepcopy

import numpy as np
import paddle
import pytest

from paddle_te.distributed import ContextParallel
from paddle_te.layers import (
    DotProductAttention,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    MultiHeadAttention,
    RMSNorm,
    RotaryPositionEmbedding,
    TransformerLayer,
)
from tests import emulated_te


def draw(generator, *shape):
    return generator.standard_normal(shape).astype("float32")


def norm64(x, weight, eps, bias=None):
    x = x.astype("float64")
    if bias is not None:
        x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight + (0 if bias is None else bias)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gelu(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS = {  # of fc1's output, or of its gate and the rest
    "swiglu": lambda gate, up: gate * sigmoid(gate) * up,
    "geglu": lambda gate, up: gelu(gate) * up,
    "gelu": gelu,
    "relu": lambda x: np.maximum(x, 0),
}


def close(got, want):
    np.testing.assert_allclose(got.numpy(), want, rtol=2e-5, atol=2e-5 * np.abs(want).max())


def filled(layer, generator):
    """The layer with fresh parameters, and their values in float64."""
    for parameter in layer.parameters():
        parameter.set_value(draw(generator, *parameter.shape))
    return layer, {name: p.numpy().astype("float64") for name, p in layer.named_parameters()}


@pytest.mark.parametrize("zero_centered_gamma", [False, True])
@pytest.mark.parametrize("make", [RMSNorm, LayerNorm])
def test_norms(seed, make, zero_centered_gamma):
    generator = np.random.default_rng(seed)
    new = make(24, eps=1e-3, zero_centered_gamma=zero_centered_gamma, backend="paddle")
    x = draw(generator, 2, 5, 24)
    close(new(paddle.to_tensor(x)), norm64(x, 1.0, 1e-3, 0.0 if make is LayerNorm else None))
    layer, values = filled(new, generator)
    weight = values["weight"] + (1 if zero_centered_gamma else 0)
    close(layer(paddle.to_tensor(x)), norm64(x, weight, 1e-3, values.get("bias")))


@pytest.mark.parametrize("bias", [False, True])
def test_linear_adds_bias_and_residual(seed, bias):
    generator = np.random.default_rng(seed)
    layer, values = filled(Linear(12, 20, bias=bias, backend="paddle"), generator)
    x, residual = draw(generator, 3, 12), draw(generator, 3, 20)
    assert layer.weight.shape == [20, 12]
    want = x @ values["weight"].T + values.get("bias", 0)
    close(layer(paddle.to_tensor(x)), want)
    close(layer(paddle.to_tensor(x), paddle.to_tensor(residual)), want + residual)


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_layernorm_linear_returns_its_input_as_residual(seed, normalization):
    generator = np.random.default_rng(seed)
    layer = LayerNormLinear(12, 20, bias=True, normalization=normalization, backend="paddle")
    layer, values = filled(layer, generator)
    x = draw(generator, 3, 12)
    y, residual = layer(paddle.to_tensor(x))
    normed = norm64(x, values["ln_weight"], 1e-5, values.get("ln_bias"))
    close(y, normed @ values["weight"].T + values["bias"])
    assert (residual.numpy() == x).all()


@pytest.mark.parametrize("normalization, bias", [("RMSNorm", False), ("LayerNorm", True)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_layernorm_mlp(seed, activation, normalization, bias):
    generator = np.random.default_rng(seed)
    options = dict(activation=activation, normalization=normalization, bias=bias)
    layer, values = filled(LayerNormMLP(12, 28, backend="paddle", **options), generator)
    x = draw(generator, 3, 12)
    normed = norm64(x, values["ln_weight"], 1e-5, values.get("ln_bias"))
    hidden = normed @ values["fc1_weight"].T + values.get("fc1_bias", 0)
    act = ACTIVATIONS[activation](*np.split(hidden, hidden.shape[1] // 28, -1))
    close(layer(paddle.to_tensor(x)), x + act @ values["fc2_weight"].T + values.get("fc2_bias", 0))


@pytest.mark.parametrize("norms", ["after", "both"])
def test_norms_behind_the_mlp(seed, norms):
    generator = np.random.default_rng(seed)
    layer, values = filled(LayerNormMLP(12, 28, norms=norms, backend="paddle"), generator)
    x = draw(generator, 3, 12)
    normed = norm64(x, values["ln_weight"], 1e-5) if norms == "both" else x
    hidden = normed @ values["fc1_weight"].T
    out = ACTIVATIONS["swiglu"](*np.split(hidden, 2, -1)) @ values["fc2_weight"].T
    close(layer(paddle.to_tensor(x)), x + norm64(out, values["post_norm.weight"], 1e-5))
    assert ("ln_weight" in values) == (norms == "both")


@pytest.mark.parametrize("heads, groups", [(4, 4), (4, 2), (6, 1)])
def test_attention_is_causal_and_groups_heads(seed, heads, groups):
    generator = np.random.default_rng(seed)
    q, k, v = draw(generator, 2, 7, heads, 8), draw(generator, 2, 7, groups, 8), draw(generator, 2, 7, groups, 8)
    got = DotProductAttention(8, backend="paddle")(*map(paddle.to_tensor, (q, k, v)))
    k, v = (np.repeat(t, heads // groups, 2) for t in (k, v))
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(8)
    scores = np.where(np.tri(7, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    close(got, np.einsum("bhqk,bkhd->bqhd", weights, v).reshape(2, 7, heads * 8))


@pytest.mark.parametrize("backend", ["paddle", "transformer_engine"])
@pytest.mark.parametrize("queries, masked", [(13, False), (13, True), (1, False), (4, False)])
def test_a_query_sees_its_window(seed, monkeypatch, backend, queries, masked):
    """window_size=(4, 0): itself and four before it. Fewer queries than keys, with a cache, are the last ones; a mask
    hides keys besides."""
    emulated_te.install(monkeypatch.setattr)
    generator = np.random.default_rng(seed)
    q, k, v = draw(generator, 2, queries, 4, 8), draw(generator, 2, 13, 2, 8), draw(generator, 2, 13, 2, 8)
    distance = np.arange(13 - queries, 13)[:, None] - np.arange(13)
    seen = np.broadcast_to((distance >= 0) & (distance <= 4), (2, 1, queries, 13)).copy()
    mask = None
    if masked:
        hidden = generator.random((2, 1, queries, 13)) < 0.5
        hidden &= ~np.eye(13, dtype=bool)
        mask = paddle.to_tensor(np.where(hidden | (distance < 0), -1e9, 0).astype("float32"))
        seen &= ~hidden
    dtype = {"paddle": "float32", "transformer_engine": "bfloat16"}[backend]
    layer = DotProductAttention(8, backend, window_size=(4, 0))
    got = layer(*(paddle.to_tensor(t).astype(dtype) for t in (q, k, v)), mask).astype("float32").numpy()
    k, v = (np.repeat(t, 2, 2) for t in (k, v))
    scores = np.where(seen, np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(8), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    want = np.einsum("bhqk,bkhd->bqhd", weights, v).reshape(2, queries, 32)
    assert np.linalg.norm(got - want) < {"paddle": 1e-5, "transformer_engine": 2e-2}[backend] * np.linalg.norm(want)


def test_rotary_angles():
    angles = RotaryPositionEmbedding(8, rotary_base=100.0)(5)
    want = np.outer(np.arange(5), 100.0 ** (-np.arange(0, 8, 2) / 8))
    np.testing.assert_allclose(angles, np.concatenate([want, want], -1), rtol=1e-6)


def test_rotary_angles_stay_float32_when_a_model_is_cast():
    rope = RotaryPositionEmbedding(64)
    want = rope(512).numpy()
    model = paddle.nn.Sequential(rope)
    model.to(dtype="bfloat16")
    for length in 512, 600:  # known, and computed anew
        assert rope(length).dtype == paddle.float32
        np.testing.assert_array_equal(rope(length)[:512], want)


@pytest.mark.parametrize("backend", ["paddle", "transformer_engine"])
def test_a_copied_layer_has_weights_of_its_own(backend):
    layer = TransformerLayer(32, 48, 4, backend=backend)
    copy = deepcopy(layer)
    names = dict(copy.named_parameters())
    for name, weight in layer.named_parameters():
        assert names[name] is not weight and (names[name].numpy() == weight.numpy()).all()
    assert copy.self_attention.ops is layer.self_attention.ops
    assert copy.layernorm_mlp.fp8 is not layer.layernorm_mlp.fp8


def test_flat_tokens_must_be_whole_sequences():
    layer = MultiHeadAttention(32, 4, max_sequence_length=16, backend="paddle")
    freqs = RotaryPositionEmbedding(8)(16)
    assert layer(paddle.randn([48, 32]), freqs).shape == [48, 32]
    with pytest.raises(ValueError, match="24 tokens, flat, are no whole number of .* max_sequence_length=16"):
        layer(paddle.randn([24, 32]), freqs)
    with pytest.raises(ValueError, match="max_sequence_length=None"):
        MultiHeadAttention(32, 4, backend="paddle")(paddle.randn([16, 32]), freqs)


def test_ranks_that_share_sequences_need_whole_heads_and_no_cache(monkeypatch):
    monkeypatch.setattr(ContextParallel, "from_fleet", lambda comm_type: ContextParallel(None, 0, 2, comm_type))
    with pytest.raises(ValueError, match="num_gqa_groups of a rank=1 is not divisible by the 2 ranks that share it"):
        MultiHeadAttention(8, 2, 1, cp_comm_type="a2a", backend="paddle")
    layer = MultiHeadAttention(8, 2, cp_comm_type="a2a", backend="paddle")
    with pytest.raises(ValueError, match="a cache needs whole sequences; leave cp_comm_type out"):
        layer(paddle.zeros([1, 4, 8]), RotaryPositionEmbedding(4)(8), use_cache=True)


@pytest.mark.parametrize(
    "given, what",
    [
        (dict(attention_mask=paddle.zeros([1, 1, 8, 8])), "attention mask"),
        (dict(cu_seqlens=paddle.to_tensor([0, 8], "int32")), "packed documents"),
    ],
)
def test_ring_attention_is_plainly_causal(monkeypatch, given, what):
    monkeypatch.setattr(ContextParallel, "from_fleet", lambda comm_type: ContextParallel(None, 0, 2, comm_type))
    layer = MultiHeadAttention(8, 2, cp_comm_type="p2p", backend="paddle")
    with pytest.raises(ValueError, match=f"plainly causal and has no {what}.*'a2a' has"):
        layer(paddle.zeros([1, 4, 8]), RotaryPositionEmbedding(4)(8), **given)
    for name, value in dict(window_size=(2, 0), attention_dropout=0.1, attn_mask_type="no_mask").items():
        with pytest.raises(ValueError, match=f"{name}.*: ring attention .* is plainly causal"):
            MultiHeadAttention(8, 2, cp_comm_type="p2p", backend="paddle", **{name: value})


def test_no_angles_are_angles_of_zero():
    layer, x = TransformerLayer(32, 48, 4, backend="paddle"), paddle.randn([2, 8, 32])
    assert (layer(x) == layer(x, rotary_pos_emb=paddle.zeros([8, 8]))).all()
    assert not (layer(x) == layer(x, rotary_pos_emb=RotaryPositionEmbedding(8)(8))).all()


LLAMAS_PARAMETERS = {
    "self_attention.layernorm_qkv.ln_weight": [32],
    "self_attention.layernorm_qkv.weight": [64, 32],
    "self_attention.proj.weight": [32, 32],
    "layernorm_mlp.ln_weight": [32],
    "layernorm_mlp.fc1_weight": [96, 32],
    "layernorm_mlp.fc2_weight": [32, 48],
}
GPTS_PARAMETERS = LLAMAS_PARAMETERS | {
    "self_attention.layernorm_qkv.ln_bias": [32],
    "self_attention.layernorm_qkv.bias": [64],
    "self_attention.proj.bias": [32],
    "layernorm_mlp.ln_bias": [32],
    "layernorm_mlp.fc1_weight": [48, 32],
    "layernorm_mlp.fc1_bias": [48],
    "layernorm_mlp.fc2_bias": [32],
}


@pytest.mark.parametrize("options, parameters", [
    ({}, LLAMAS_PARAMETERS),
    (dict(add_qkv_bias=True), LLAMAS_PARAMETERS | {"self_attention.layernorm_qkv.bias": [64]}),
    (dict(bias=True, normalization="LayerNorm", activation="gelu"), GPTS_PARAMETERS),
])  # fmt: skip
def test_parameters_have_the_integrations_names_and_shapes(options, parameters):
    layer = TransformerLayer(32, 48, 4, 2, backend="paddle", **options)
    assert {name: parameter.shape for name, parameter in layer.named_parameters()} == parameters


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: TransformerLayer(30, 48, 4, backend="paddle"), "hidden_size=30"),
        (lambda: TransformerLayer(32, 48, 4, 3, backend="paddle"), "num_gqa_groups=3"),
        (lambda: TransformerLayer(32, 48, 4, backend="pd"), "'paddle' or 'transformer_engine'"),
        (
            lambda: LayerNormLinear(8, 8, normalization="rms", backend="paddle"),
            "normalization='rms'.*'RMSNorm', 'LayerNorm'",
        ),
        (
            lambda: LayerNormMLP(8, 8, activation="silu", backend="paddle"),
            "activation='silu'.*'swiglu', 'geglu', 'gelu', 'relu'",
        ),
        (lambda: LayerNormMLP(8, 8, norms="behind", backend="paddle"), "norms='behind'; .*'both'"),
        (lambda: Linear(8, 8, parallel_mode="rows", backend="paddle"), "parallel_mode='rows'"),
        (lambda: DotProductAttention(8, "paddle", window_size=(4, 4)), "window_size=.* must be .left, 0."),
        (lambda: RMSNorm(8, sequence_parallel=True, backend="paddle"), "tensor_parallel_degree > 1"),
        (lambda: MultiHeadAttention(8, 2, sequence_parallel=True, backend="paddle"), "max_sequence_length"),
        (lambda: MultiHeadAttention(8, 2, cp_comm_type="all_gather", backend="paddle"), "it may be 'a2a' or 'p2p'"),
        (lambda: MultiHeadAttention(8, 2, cp_comm_type="a2a", backend="paddle"), "needs fleet's .* sep_degree above 1"),
    ],
)
def test_wrong_arguments_say_so(make, message):
    with pytest.raises(ValueError, match=message):
        make()
