"""A ModelSpec says what a configuration says, whichever family it is of."""

from dataclasses import replace

import pytest

from paddle_te import configs
from paddle_te.configs.spec import AttentionSpec, DenseSpec, NormSpec, RotationSpec, spec_of

LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
SMALL = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4)


def test_a_llama():
    config = SMALL | dict(num_key_value_heads=2, rms_norm_eps=1e-5, rope_scaling=LLAMA3 | {"rope_type": "llama3"})
    spec = spec_of(config)
    rotation = RotationSpec(10000.0, (("rope_type", "llama3"), *LLAMA3.items()))
    assert spec.layer.attention == AttentionSpec(4, 2, 8, rotation)
    assert spec.layer.feed_forward == DenseSpec(48, "swiglu")
    assert spec.layer.norm == spec.norm == NormSpec("RMSNorm", 1e-5)
    assert (spec.hidden, spec.vocabulary, len(spec.layers), spec.tied) == (32, 64, 3, False)


def test_a_gpt():
    spec = spec_of(SMALL | dict(model_type="gpt", hidden_activation="relu", hidden_dropout_prob=0.3))
    assert spec.layer.attention == AttentionSpec(4, 4, 8, qkv_bias=True, proj_bias=True, dropout=0.1)
    assert spec.layer.feed_forward == DenseSpec(48, "relu", gated=False, bias=True)
    assert (spec.layer.norm, spec.layer.dropout) == (NormSpec("LayerNorm", 1e-5), 0.3)
    assert spec.learned_positions and spec.tied and spec.positions == 1024


@pytest.mark.parametrize(
    "said, window", [({"sliding_window": 8}, 8), ({"sliding_window": None}, None), ({"model_type": "llama"}, None)]
)
def test_the_window_of_a_layer(said, window):
    """transformers' Mistral means 4096 where its config.json leaves the key out; null says that there is none."""
    spec = spec_of(SMALL | {"model_type": "mistral"} | said)
    assert [layer.attention.window for layer in spec.layers] == [window] * 3


@pytest.mark.parametrize("window, kept", [(64, 64), (100, 100), (256, None)])
def test_a_window_that_some_sequence_is_longer_than_is_kept(window, kept):
    """Scaled by yarn, sequences may be four times as long as the first training's."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    config = SMALL | dict(model_type="mistral", max_position_embeddings=64, rope_scaling=yarn, sliding_window=window)
    assert spec_of(config).layer.attention.window == kept


def test_head_dim_is_read():
    attention = spec_of(SMALL | {"head_dim": 16}).layer.attention
    assert (attention.head_dim, attention.q_size, attention.kv_size, attention.queries) == (16, 64, 64, 1)


def test_gpt_oss():
    """A window in every other layer, sinks and biases in all; its auxiliary loss is not read."""
    sizes = dict(num_hidden_layers=4, num_local_experts=8, router_aux_loss_coef=0.9, sliding_window=32)
    spec = spec_of(SMALL | sizes | dict(model_type="gpt_oss", max_position_embeddings=64))
    assert [layer.attention.window for layer in spec.layers] == [32, None, 32, None]
    attention, experts = spec.layer.attention, spec.experts
    assert attention.sinks and attention.qkv_bias and attention.proj_bias and attention.rotation.theta == 150000
    assert (experts.activation, experts.bias, experts.router_bias) == ("clamped_swiglu", True, True)
    assert (experts.topk, experts.pre_softmax, experts.aux_loss_coeff) == (4, False, 0.0)


def test_granites_factors():
    """A residual multiplier changes what goes through the layers and the eps of the norms that read it."""
    factors = dict(embedding_multiplier=12.0, residual_multiplier=0.5, attention_multiplier=0.1, logits_scaling=8.0)
    spec = spec_of(SMALL | factors | dict(model_type="granite", rms_norm_eps=1e-5))
    assert (spec.embedding_scale, spec.logit_scale, spec.layer.attention.scale) == (12.0, 0.125, 0.1)
    assert (spec.layer.residual_scale, spec.layer.stream_scale, spec.layer.input_eps) == (0.5, 2.0, 4e-5)
    with pytest.raises(ValueError, match="residual_scale=0.5 needs norms='before', not 'both'"):
        replace(spec.layer, norms="both")


@pytest.mark.parametrize("name", configs.known_names())
def test_a_models_host_says_the_same(name):
    """PaddleNLP's object of a config.json and the file itself are one model."""
    from paddle_te.hosts.paddlenlp.loading import read_config

    assert spec_of(configs.read(name)) == spec_of(read_config(configs.resolve(name)))
