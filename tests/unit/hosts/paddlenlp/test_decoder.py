"""The decoder layer of backend pd against PaddleNLP's own."""

from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddle.distributed import fleet
from paddlenlp.transformers.llama import modeling

from paddle_te import fp8
from paddle_te.configs.spec import spec_of
from paddle_te.hosts.paddlenlp.families import model_class
from paddle_te.hosts.paddlenlp.llama.decoder import TELlamaDecoderLayerPipe
from paddle_te.models.decoder import recipe_of, rotary_embedding
from paddle_te.ops.te import quantized
from tests import emulated_te, rope_formulas
from tests.te_weights import copy_layer, randomise, relative, te_gradients
from tests.unit.hosts.paddlenlp.native import FAMILIES, paddlenlps, tiny_config

ROTARY = [family for family in FAMILIES if family != "gpt"]


def both(config, generator):
    native, ours = paddlenlps(config, "DecoderLayer")(config), model_class(config).decoder_class(config)
    randomise(native, generator)
    copy_layer(native, ours)
    return native, ours


def run(layer, x, dy, position_ids=None, mask=None):
    x = paddle.to_tensor(x, stop_gradient=False)
    positions = {} if position_ids is None else dict(position_ids=position_ids)
    y = layer(x, attention_mask=mask, **positions)
    y = y[0] if isinstance(y, tuple) else y
    y.backward(paddle.to_tensor(dy))
    return y.numpy(), x.grad.numpy()


@pytest.mark.parametrize("family, kv_heads", [("gpt", 4), *[(family, n) for family in ROTARY for n in (4, 2, 1)]])
@pytest.mark.parametrize("batch, sequence", [(1, 24), (3, 17)])
def test_same_output_and_gradients_as_paddlenlp(seed, kv_heads, batch, sequence, family):
    generator = np.random.default_rng(seed)
    config = tiny_config(family, num_key_value_heads=kv_heads)
    native, ours = both(config, generator)
    x, dy = (generator.standard_normal([batch, sequence, 64]).astype("float32") for _ in range(2))
    positions = None if family == "gpt" else paddle.arange(sequence).expand([batch, sequence])
    causal = paddle.triu(paddle.full([batch, 1, sequence, sequence], -1e30), 1)
    want, want_dx = run(native, x, dy, positions, causal)
    got, got_dx = run(ours, x, dy)
    assert relative(got, want) < 1e-5
    assert relative(got_dx, want_dx) < 1e-5
    gradients = te_gradients(native)
    for name, parameter in ours.transformer.named_parameters():
        got, want = parameter.grad.numpy(), gradients[name]
        if name.endswith("bias"):  # that of k's is zero but for rounding: it adds the same to all scores of a query
            np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max(), rtol=1e-4)
        else:
            assert relative(got, want) < 1e-5, name


def test_a_window_is_that_of_a_mask(seed):
    """PaddleNLP's Mistral has no window, but takes a mask; a token itself is one of sliding_window."""
    generator = np.random.default_rng(seed)
    native, ours = both(tiny_config("mistral", sliding_window=5), generator)
    x, dy = (generator.standard_normal([2, 19, 64]).astype("float32") for _ in range(2))
    distance = np.arange(19)[:, None] - np.arange(19)
    mask = np.where((distance >= 0) & (distance < 5), 0, -1e30).astype("float32") + np.zeros([2, 1, 1, 1], "float32")
    positions = paddle.arange(19).expand([2, 19])
    want, want_dx = run(native, x, dy, positions, paddle.to_tensor(mask))
    got, got_dx = run(ours, x, dy)
    assert relative(got, want) < 1e-5 and relative(got_dx, want_dx) < 1e-5
    assert relative(run(both(tiny_config("mistral"), generator)[1], x, dy)[0], want) > 1e-3


def test_a_window_and_attention_in_fp8_are_refused_before_anything_runs():
    config = tiny_config("mistral", sliding_window=5, use_fp8=True, fp8_dpa=True)
    with pytest.raises(ValueError, match="fp8_dpa: attention in fp8 has no sliding_window=5"):
        model_class(config)(config)
    config.sliding_window = None
    model_class(config)(config)


def test_an_additive_mask_is_applied(seed):
    generator = np.random.default_rng(seed)
    native, ours = both(tiny_config(), generator)
    x, dy = (generator.standard_normal([2, 10, 64]).astype("float32") for _ in range(2))
    mask = np.triu(np.full([2, 1, 10, 10], -1e30, "float32"), 1)
    mask[1, :, :, 0] = -1e30  # the second sequence is padded on the left
    mask[1, :, 0, 0] = 0
    want, _ = run(native, x, dy, paddle.arange(10).expand([2, 10]), paddle.to_tensor(mask))
    got, _ = run(ours, x, dy, mask=paddle.to_tensor(mask))
    assert relative(got, want) < 1e-5
    assert relative(run(ours, x, dy)[0], want) > 1e-3


@pytest.mark.parametrize(
    "scaling",
    [
        dict(rope_scaling_type="linear", rope_scaling_factor=4.0),
        dict(rope_scaling_type="ntk", rope_scaling_factor=2.0),
        dict(rope_scaling_type="dynamic_ntk", rope_scaling_factor=2.0, max_position_embeddings=32),
        dict(rope_scaling_type="dynamic_ntk", rope_scaling_factor=2.0, max_position_embeddings=64),
        dict(rope_theta=500000.0),
        dict(
            rope_scaling=dict(
                rope_type="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
            )
        ),
    ],
)
def test_rope_angles_are_paddlenlps(scaling):
    config = tiny_config(**scaling)
    angles = rotary_embedding(spec_of(config))(48)
    rope = modeling.LlamaAttention(config).rotary_emb
    cos, sin = rope(paddle.zeros([1]), seq_len=48)
    np.testing.assert_allclose(angles.cos(), cos[0, :, 0], atol=2e-5)
    np.testing.assert_allclose(angles.sin(), sin[0, :, 0], atol=2e-5)


def test_unknown_rope_scaling_is_refused():
    with pytest.raises(ValueError, match="rope type 'longrope' is not supported; it may be default, linear"):
        spec_of(tiny_config(rope_scaling_type="longrope"))


YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)


@pytest.mark.parametrize("family", ROTARY)
def test_yarn_is_a_layer_with_its_cosines_and_sines(seed, family):
    """PaddleNLP has none; its own layer computes it when its tables are YaRN's, longer by the attention factor."""
    generator = np.random.default_rng(seed)
    native, ours = both(tiny_config(family, rope_scaling=YARN, sequence_parallel=False), generator)
    frequencies = [rope_formulas.yarn(pair, 16, 10000.0, 4.0, 16) for pair in range(8)]
    angles = np.arange(64)[:, None] * np.tile(frequencies, 2)
    longer, rope = rope_formulas.yarn_attention_factor(4.0), native.self_attn.rotary_emb
    rope.cos_cached, rope.sin_cached = (
        paddle.to_tensor((longer * part(angles)).astype("float32")).reshape(rope.cos_cached.shape)
        for part in (np.cos, np.sin)
    )
    x, dy = (generator.standard_normal([2, 40, 64]).astype("float32") for _ in range(2))
    causal = paddle.triu(paddle.full([2, 1, 40, 40], -1e30), 1)
    want, want_dx = run(native, x, dy, paddle.arange(40).expand([2, 40]), causal)
    got, got_dx = run(ours, x, dy)
    assert relative(got, want) < 1e-5 and relative(got_dx, want_dx) < 1e-5


@pytest.mark.parametrize("family", ROTARY)
def test_what_paddlenlps_own_layers_would_leave_out_is_refused(family):
    for scaling in (YARN, dict(rope_type="linear", factor=2.0)):
        config = tiny_config(family, rope_scaling=scaling, transformer_engine_backend="none")
        with pytest.raises(ValueError, match="PaddleNLP's own .* would leave it out; use backend paddle or"):
            model_class(config)


def test_dynamic_scaling_beyond_its_length_takes_whole_sequences_only():
    config = tiny_config(rope_scaling_type="dynamic_ntk", rope_scaling_factor=2.0, max_position_embeddings=32)
    layer = model_class(config).decoder_class(config)
    x, cache = paddle.randn([1, 33, 64]), (paddle.randn([1, 32, 2, 16]),) * 2
    layer(x)
    layer(x[:, :32], position_ids=paddle.arange(32).unsqueeze(0))
    for given in (dict(position_ids=paddle.arange(33).unsqueeze(0)), dict(past_key_value=cache, use_cache=True)):
        with pytest.raises(ValueError, match="rope type dynamic: in a sequence of .* angles depend on the length"):
            layer(x, **given)


@pytest.mark.parametrize("family, argument", [
    ("llama", "output_attentions"),
    ("llama", "alibi"),
    ("qwen2", "output_attentions"),
    ("mistral", "output_attentions"),
])  # fmt: skip
def test_what_the_layer_does_not_have_is_refused(family, argument):
    config = tiny_config(family)
    layer = model_class(config).decoder_class(config)
    with pytest.raises(NotImplementedError, match=argument):
        layer(paddle.zeros([1, 4, 64]), **{argument: True})


def test_a_pipelines_additive_mask_is_applied_and_passed_on(monkeypatch):
    strategy = SimpleNamespace(pipeline_configs={"accumulate_steps": 1})
    monkeypatch.setattr(fleet.fleet, "_user_defined_strategy", strategy, raising=False)
    layer, x = TELlamaDecoderLayerPipe(tiny_config()), paddle.randn([1, 8, 64])
    causal = paddle.triu(paddle.full([1, 1, 8, 8], -1e30), 1)
    out, mask = layer((x, causal))
    np.testing.assert_array_equal(out, layer(x))
    np.testing.assert_array_equal(mask, causal)


def test_fp8_recipe_follows_the_flags():
    assert recipe_of(tiny_config()) is None
    recipe = recipe_of(tiny_config(use_fp8=True, fp8_amax_history_len=16))
    assert (recipe.amax_history_len, recipe.amax_compute_algo, recipe.margin) == (16, "max", 0)
    assert not recipe.fp8_dpa and recipe.fp8_dpa_bwd and recipe.reduce_amax
    assert not recipe_of(tiny_config(use_fp8=True, fp8_reduce_amax=False)).reduce_amax
    recipe = recipe_of(tiny_config(use_fp8=True, fp8_dpa=True, fp8_dpa_bwd=False))
    assert recipe.fp8_dpa and not recipe.fp8_dpa_bwd
    with pytest.raises(ValueError, match="no fp8 attention with current scaling"):
        recipe_of(tiny_config(use_fp8=True, fp8_recipe="current", fp8_dpa=True))
    with pytest.raises(ValueError, match="fp8_recipe='other'; it must be one of delayed, current, block"):
        recipe_of(tiny_config(use_fp8=True, fp8_recipe="other"))
    assert recipe_of(tiny_config(use_fp8=True, fp8_recipe="block")) == fp8.Float8BlockScaling()
    assert recipe_of(tiny_config(use_fp8=True, fp8_recipe="current")).fp8_format is fp8.Format.HYBRID


BLOCK = dict(use_fp8=True, fp8_recipe="block", hidden_size=128, intermediate_size=128)


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_layers_with_block_scaling(family):
    """Of the sizes that 128 divides; the others are refused when a layer is made."""
    layer = model_class(config := tiny_config(family, **BLOCK)).decoder_class(config)
    assert layer(paddle.ones([2, 64, 128])).shape == [2, 64, 128]
    for name, size, weight in (("hidden_size", 64, "layernorm_qkv.weight"), ("intermediate_size", 192, "fc.*_weight")):
        with pytest.raises(
            ValueError, match=f"fp8_recipe=block needs weights whose sizes 128 divides, and .*{weight} is"
        ):
            model_class(config).decoder_class(tiny_config(family, **BLOCK | {name: size}))


@pytest.mark.parametrize("capability, cublas, message", [
    ((9, 0), (12, 9), None),
    ((8, 9), (13, 1), "GPUs of compute capability 9.0, Hopper's, not 8.9"),
    ((10, 0), (13, 1), "GPUs of compute capability 9.0, Hopper's, not 10.0"),
    ((9, 0), (12, 8), "cuBLAS 12.9 or newer, not 12.8"),
])  # fmt: skip
def test_machines_with_block_scaling(monkeypatch, capability, cublas, message):
    emulated_te.install(monkeypatch.setattr)
    monkeypatch.setattr(emulated_te.Stream, "capability", capability)
    monkeypatch.setattr(quantized, "cublas_version", lambda: cublas)
    config = tiny_config(**BLOCK, transformer_engine_backend="transformer_engine")
    if message is None:
        model_class(config).decoder_class(config)
        return
    with pytest.raises(ValueError, match=f"fp8_recipe=block needs {message}; .*delayed or"):
        model_class(config).decoder_class(config)
