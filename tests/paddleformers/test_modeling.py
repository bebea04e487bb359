"""PaddleFormers' Llama with the decoder layers of backend pd against its own, in float32."""

import numpy as np
import paddle
import pytest

pytest.importorskip("paddleformers", reason="needs PaddleFormers: HOST=paddleformers bash scripts/test.sh")

from paddle_te.hosts.paddleformers.configuration import decoder_config
from paddle_te.native import BackendUnavailable
from paddle_te.ops import documents
from tests.paddleformers.llama import LlamaConfig, model_class, tiny_config, tokens, two_models
from tests.te_weights import relative, te_gradients

ROPES = {
    "default": {},
    "theta": dict(rope_theta=5e5),
    "linear": dict(rope_scaling={"rope_type": "linear", "factor": 2.0}),
    "llama3": dict(
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    ),
    "yarn": dict(rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}),
}


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 32,
}


def compare(host, ours, input_ids, **inputs):
    """The loss, the logits and all gradients of both."""
    labels = paddle.roll(input_ids, -1, 1)
    (loss, logits), (our_loss, our_logits) = (model(input_ids, labels=labels, **inputs)[:2] for model in (host, ours))
    assert relative(our_logits, logits) < 1e-5
    assert abs(float(our_loss) - float(loss)) < 1e-5 * float(loss)
    loss.backward(), our_loss.backward()
    for source, target in zip(host.model.layers, ours.model.layers, strict=True):
        wanted = te_gradients(source)
        for name, parameter in target.transformer.named_parameters():
            assert relative(parameter.grad, wanted[name]) < 1e-4, name
    theirs = dict(host.named_parameters())
    for name, parameter in ours.named_parameters():
        if ".layers." not in name:
            assert relative(parameter.grad, theirs[name].grad) < 1e-4, name


def test_outer_layers_in_16_bits():
    flags = dict(use_fp8=True, fp8_recipe="current", fp8_skip_layers="last:1", num_hidden_layers=2)
    model = model_class(config := tiny_config(**flags))(config)
    assert [layer.fp8_recipe is not None for layer in model.model.layers] == [True, False]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_same_loss_and_gradients(seed, kv_heads):
    generator = np.random.default_rng(seed)
    compare(*two_models(generator, num_key_value_heads=kv_heads), tokens(generator, 2, 24))


@pytest.mark.parametrize("rope", ROPES)
def test_rotary_positions(seed, rope):
    generator = np.random.default_rng(seed)
    compare(*two_models(generator, **ROPES[rope]), tokens(generator, 2, 40))


def test_theta_is_read_where_the_hosts_layers_read_it():
    """A config.json of transformers 5 has it in rope_parameters alone, and config.rope_theta is another then."""
    config = LlamaConfig.from_dict(
        tiny_config().to_dict() | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    )
    assert decoder_config(config).rope_theta == 5e5


def test_packed_documents(seed):
    """As PaddleFormers' recipes give them: rows for FlashMask, with a last dimension of one, and positions."""
    generator = np.random.default_rng(seed)
    rows = [[9, 15], [1, 20, 3]]
    mask = paddle.to_tensor(documents.flash_mask(rows)).unsqueeze(-1)
    inputs = dict(attn_mask_startend_row_indices=mask, position_ids=paddle.to_tensor(documents.positions(rows)))
    compare(*two_models(generator), tokens(generator, 2, 24), **inputs)


def test_padding_mask(seed):
    """Padding on the right, whose own outputs nobody reads."""
    generator = np.random.default_rng(seed)
    host, ours = two_models(generator)
    input_ids, mask = tokens(generator, 2, 24), paddle.ones([2, 24], "int64")
    mask[1, 17:] = 0
    logits, our_logits = (model(input_ids, attention_mask=mask)[0] for model in (host, ours))
    assert relative(our_logits[0], logits[0]) < 1e-5
    assert relative(our_logits[1, :17], logits[1, :17]) < 1e-5


RECOMPUTE = {
    "full": dict(recompute_method="uniform", recompute_num_layers=1),
    "selective": dict(recompute_modules=["mlp_act", "layernorm"]),
}


@pytest.mark.parametrize("granularity", RECOMPUTE)
def test_recompute_changes_nothing(seed, granularity):
    generator = np.random.default_rng(seed)
    settings = dict(recompute_granularity=granularity, **RECOMPUTE[granularity])
    compare(*two_models(generator, **settings), tokens(generator, 2, 24))


def test_selective_recompute_is_that_of_our_layers():
    modules = dict(recompute_modules=["mlp_act"])
    assert decoder_config(tiny_config(recompute_granularity="selective", **modules)).recompute_modules == ["mlp_act"]
    assert decoder_config(tiny_config(**modules)).recompute_modules is None


def test_a_cache_gives_the_logits_of_whole_sequences(seed):
    generator = np.random.default_rng(seed)
    _, ours = two_models(generator)
    input_ids = tokens(generator, 2, 12)
    whole = ours(input_ids)[0]
    first = ours(input_ids[:, :8], use_cache=True, return_dict=True)
    second = ours(input_ids[:, 8:], past_key_values=first.past_key_values, use_cache=True, return_dict=True)
    assert relative(paddle.concat([first.logits, second.logits], 1), whole) < 1e-5


def test_generates_what_paddleformers_generates(seed):
    generator = np.random.default_rng(seed)
    models, prompts = two_models(generator), tokens(generator, 2, 7)
    texts = [model.generate(prompts, max_new_tokens=6, do_sample=False)[0].tolist() for model in models]
    assert texts[0] == texts[1]


def test_none_is_paddleformers_own():
    host = model_class(tiny_config("none"))
    assert host.__module__ == "paddleformers.transformers.llama.modeling"
    model_class(tiny_config())(tiny_config())
    assert type(host(tiny_config("none")).model.layers[0]).__module__ == host.__module__  # nothing stays replaced


@pytest.mark.parametrize(
    "settings, says",
    [
        (dict(context_parallel_size=2), "context_parallel_size=2: PaddleFormers' Llama has no attention"),
        (dict(attention_bias=True), "attention_bias=True.*backend none"),
        (dict(is_lora=True, mlp_chunk_tokens=64), "mlp_chunk_tokens: 64 with fine_tuning=lora: .* have no chunks"),
        (dict(use_fp8=True), "fp8_recipe='delayed'.*'current'"),
        (dict(fp8_lm_head=True, use_fp8=True, fp8_recipe="current"), "fp8_lm_head: true: .*PaddleFormers"),
        (dict(offload_activations=1), "offload_activations: 1 needs transformer_engine_backend"),
        (dict(transformer_engine_backend="transformer_engine"), "Transformer Engine|float32"),
        (dict(transformer_engine_backend="torch"), "transformer_engine_backend='torch'"),
        (dict(rope_scaling=LONGROPE), "longrope"),
    ],
)
def test_refused(settings, says):
    config = tiny_config(**settings)
    with pytest.raises((ValueError, BackendUnavailable), match=says):
        model_class(config)(config)
