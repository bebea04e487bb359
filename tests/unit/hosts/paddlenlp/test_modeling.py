"""The switch, and whole models against PaddleNLP's."""

import os

import numpy as np
import paddle
import pytest
from paddlenlp.transformers.llama import modeling, modeling_pp

from paddle_te.hosts.paddlenlp.families import check_packed, model_class
from paddle_te.hosts.paddlenlp.llama import LlamaForCausalLM, LlamaForCausalLMPipe
from paddle_te.hosts.paddlenlp.llama.decoder import TELlamaDecoderLayer, TELlamaDecoderLayerPipe
from paddle_te.hosts.paddlenlp.modeling import causal_mask_only
from paddle_te.layers import LayerNormMLP
from paddle_te.models.last_norm import LastNorm
from paddle_te.models.switch import replace_decoder_layers
from tests.te_weights import relative
from tests.unit.hosts.paddlenlp.native import FAMILIES, tiny_config, two_models


def test_paddlenlp_is_itself_again_after_the_switch():
    native = modeling.LlamaDecoderLayer, modeling_pp.LlamaDecoderLayerPipe
    ours = LlamaForCausalLM, LlamaForCausalLMPipe
    with replace_decoder_layers(*ours):
        assert modeling.LlamaDecoderLayer is TELlamaDecoderLayer
        assert modeling_pp.LlamaDecoderLayerPipe is TELlamaDecoderLayerPipe
    assert (modeling.LlamaDecoderLayer, modeling_pp.LlamaDecoderLayerPipe) == native
    with pytest.raises(ZeroDivisionError), replace_decoder_layers(*ours):
        raise ZeroDivisionError
    assert (modeling.LlamaDecoderLayer, modeling_pp.LlamaDecoderLayerPipe) == native
    LlamaForCausalLM(tiny_config())
    assert type(modeling.LlamaForCausalLM(tiny_config()).llama.layers[0]) is native[0]


def test_none_is_paddlenlps_own_class():
    none = tiny_config(transformer_engine_backend="none")
    assert model_class(none) is modeling.LlamaForCausalLM
    assert model_class(none, pipeline=True) is modeling_pp.LlamaForCausalLMPipe
    with pytest.raises(ValueError, match="none, paddle, transformer_engine"):
        model_class(tiny_config(transformer_engine_backend="pd"))


@pytest.mark.parametrize("settings, message", [
    (dict(tensor_parallel_degree=2, sequence_parallel=True), "Mistral has no sequence parallelism"),
    (dict(sliding_window=16), "sequences of 24 tokens with sliding_window=16: PaddleNLP's own Mistral would see all"),
])  # fmt: skip
def test_what_paddlenlps_mistral_would_leave_out_is_refused(settings, message):
    config = tiny_config("mistral", transformer_engine_backend="none", **settings)
    with pytest.raises(ValueError, match=message):
        model_class(config)
    config.transformer_engine_backend = "paddle"
    model_class(config)
    with pytest.raises(ValueError, match="no pipeline for Mistral"):
        model_class(config, pipeline=True)


@pytest.mark.parametrize("degree", ["sep_parallel_degree", "context_parallel_degree"])
def test_learned_positions_are_not_shared_out(degree):
    with pytest.raises(ValueError, match="GPT has learned positions, which would begin anew on each rank"):
        model_class(tiny_config("gpt", transformer_engine_backend="paddle", **{degree: 2}))


@pytest.mark.parametrize("family, backend", [("mistral", "none"), ("mistral", "paddle"), ("qwen2", "none")])
def test_packed_documents_where_paddlenlps_model_keeps_none_apart(family, backend):
    config = tiny_config(family, transformer_engine_backend=backend)
    if (family, backend) != ("mistral", "none"):
        return check_packed(config)
    with pytest.raises(ValueError, match="packed documents: PaddleNLP's own Mistral takes no mask"):
        check_packed(config)


def test_what_learned_positions_cannot_is_refused():
    config = tiny_config("gpt", pipeline_parallel_degree=2)
    with pytest.raises(ValueError, match="packed documents: PaddleNLP's pipeline of GPT"):
        check_packed(config)
    with pytest.raises(ValueError, match="sequences of 65 tokens: the model has learned 64 positions"):
        model_class(config)(config)(paddle.zeros([1, 65], "int64"))


@pytest.mark.parametrize("settings", [dict(normalize_before=False), dict(scale_qk_coeff=2.0)])
def test_what_our_gpt_has_not_is_refused(settings):
    config = tiny_config("gpt", **settings)
    with pytest.raises(ValueError, match=f"{next(iter(settings))}=.*backends pd and te have only"):
        model_class(config)(config)


def test_the_environment_is_restored():
    os.environ.pop("USE_CASUAL_MASK", None)
    with causal_mask_only():
        assert modeling.get_use_casual_mask()
    assert not modeling.get_use_casual_mask() and "USE_CASUAL_MASK" not in os.environ


@pytest.mark.parametrize("family, tied", [
    ("llama", False), ("llama", True), ("qwen2", False), ("qwen2", True), ("mistral", False), ("gpt", True)
])  # fmt: skip
def test_same_loss_and_gradients_as_paddlenlp(seed, family, tied):
    native, ours = two_models(family, tie_word_embeddings=tied)
    assert sum(isinstance(layer, LastNorm) for layer in ours.sublayers()) == 1
    ids = paddle.randint(0, 96, [2, 24])
    losses = []
    for model in (native, ours):
        loss = model(input_ids=ids, labels=ids)[0]
        loss.backward()
        losses.append(loss.item())
    assert abs(losses[0] - losses[1]) < 1e-6 * losses[0]
    theirs = dict(native.named_parameters())
    mine = {name: parameter for name, parameter in ours.named_parameters() if ".layers." not in name}
    assert len(mine) == (4 if family == "gpt" else 2 if tied else 3)
    for name, parameter in mine.items():
        assert relative(parameter.grad, theirs[name].grad) < 1e-5, name


def test_sequence_parallelism_takes_one_length():
    model = LlamaForCausalLM(tiny_config(transformer_engine_backend="paddle", seq_length=8))
    model.config.sequence_parallel = True
    with pytest.raises(ValueError, match="sequences of 4 tokens: with sequence_parallel all have 8"):
        model(paddle.zeros([2, 4], "int64"))


def test_initialised_as_paddlenlps_layer(seed):
    """Mean and standard deviation of each weight, from samples large enough to tell 2 % apart."""
    paddle.seed(seed)
    config = tiny_config(hidden_size=256, intermediate_size=512, num_hidden_layers=3, initializer_range=0.03)
    native, ours = modeling.LlamaForCausalLM(config), LlamaForCausalLM(config)
    reference = {
        "self_attention.layernorm_qkv.weight": "self_attn.q_proj.weight",
        "self_attention.proj.weight": "self_attn.o_proj.weight",
        "layernorm_mlp.fc1_weight": "mlp.gate_proj.weight",
        "layernorm_mlp.fc2_weight": "mlp.down_proj.weight",
    }
    for layer in range(3):
        theirs = native.llama.layers[layer].state_dict()
        mine = ours.llama.layers[layer].transformer.state_dict()
        for name, other in reference.items():
            got, want = mine[name].numpy(), theirs[other].numpy()
            assert abs(got.std() / want.std() - 1) < 0.02, name
            assert abs(got.mean()) < 5 * want.std() / np.sqrt(got.size)
        for name in ("self_attention.layernorm_qkv.ln_weight", "layernorm_mlp.ln_weight"):
            assert (mine[name].numpy() == 1).all()
    assert relative(ours.lm_head.weight.std(), native.lm_head.weight.std()) < 0.05


def losses(config, seed, enable, steps=4):
    paddle.seed(seed)
    model = model_class(config)(config)
    model.train()
    if enable:
        model.recompute_enable()
    optimizer = paddle.optimizer.AdamW(1e-3, parameters=model.parameters())
    result = []
    for _ in range(steps):
        ids = paddle.randint(0, 96, [2, 24])
        loss = model(input_ids=ids, labels=ids)[0]
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        result.append(loss.item())
    return result


FP8, DROPOUT = dict(use_fp8=True), dict(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.2)


@pytest.mark.parametrize("family, settings", [
    ("llama", {}), ("llama", FP8), ("qwen2", FP8), ("mistral", {}), ("gpt", FP8 | DROPOUT)
])  # fmt: skip
def test_recompute_gives_the_same_losses(seed, family, settings):
    plain = losses(tiny_config(family, **settings), seed, enable=False)
    for granularity in ("core_attn", "full"):
        config = tiny_config(family, recompute_granularity=granularity, recompute=True, **settings)
        assert losses(config, seed, enable=True) == plain, granularity


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_chunks_of_the_mlp_give_the_same_losses(seed, family):
    """The option reaches the layers; with full recompute each chunk is computed twice more."""
    plain = losses(tiny_config(family), seed, enable=False)
    config = tiny_config(family, mlp_chunk_tokens=20, recompute_granularity="full", recompute=True)
    model = model_class(config)(config)
    assert {layer.recompute.chunk_tokens for layer in model.sublayers() if isinstance(layer, LayerNormMLP)} == {20}
    np.testing.assert_allclose(losses(config, seed, enable=True), plain, rtol=1e-6)


def peak_memory(granularity):
    """Host bytes at the peak of a forward and backward, above those before it."""
    paddle.seed(0)
    config = tiny_config(seq_length=64, num_hidden_layers=6, recompute_granularity=granularity, recompute=True)
    model = LlamaForCausalLM(config)
    model.train()
    if granularity:
        model.recompute_enable()
    ids = paddle.randint(0, 96, [8, 64])
    core = paddle.base.core
    core.host_memory_stat_reset_peak_value("Allocated", 0)
    before = core.host_memory_stat_current_value("Allocated", 0)
    model(input_ids=ids, labels=ids)[0].backward()
    return core.host_memory_stat_peak_value("Allocated", 0) - before


def test_core_attention_with_a_mask_is_recomputed_too(seed, monkeypatch):
    """Packed samples: same gradients, attention run once more in backward."""
    paddle.seed(seed)
    ours = LlamaForCausalLM(tiny_config(recompute=True, recompute_granularity="core_attn", initializer_range=0.1))
    ours.train()
    ids, mask = paddle.randint(0, 96, [2, 16]), np.tril(np.ones([2, 1, 16, 16], bool))
    mask[..., 7:, :7] = False  # two documents
    runs, calls = [], []
    attention = ours.llama.layers[0].transformer.self_attention.core_attention
    attend = type(attention).attend
    monkeypatch.setattr(type(attention), "attend", lambda *arguments: calls.append(1) or attend(*arguments))
    for enable in (False, True):
        if enable:
            ours.recompute_enable()
        calls.clear()
        ours(input_ids=ids, labels=ids, attention_mask=paddle.to_tensor(mask))[0].backward()
        runs.append((len(calls), {name: p.grad.numpy() for name, p in ours.named_parameters()}))
        ours.clear_gradients()
    assert [count for count, _ in runs] == [2, 4]
    for name, value in runs[0][1].items():
        np.testing.assert_array_equal(runs[1][1][name], value)


def test_recompute_needs_less_memory():
    full, core_attn, none = (peak_memory(granularity) for granularity in ("full", "core_attn", None))
    assert full < 0.4 * none and core_attn < 0.9 * none


@pytest.mark.parametrize("family", FAMILIES)
def test_save_and_load_give_the_same_bits(seed, tmp_path, family):
    _, model = two_models(family)
    model.save_pretrained(str(tmp_path))
    again = type(model).from_pretrained(str(tmp_path), config=tiny_config(family))
    for name, value in model.state_dict().items():
        assert (value.numpy() == again.state_dict()[name].numpy()).all(), name
