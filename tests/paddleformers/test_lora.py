"""LoRA on the decoder layers of backend pd against PaddleFormers' own, in float32; adapters in files."""

import numpy as np
import paddle
import pytest

pytest.importorskip("paddleformers", reason="needs PaddleFormers: HOST=paddleformers bash scripts/test.sh")

from paddleformers.peft import LoRAConfig, LoRAModel

from paddle_te.hosts.paddleformers.lora import TELoRAModel
from tests.paddleformers.llama import model_class, tiny_config, tokens, two_models
from tests.te_weights import relative

PLACES = {
    "self_attn.q_proj": "transformer.self_attention.layernorm_qkv.q_proj",
    "self_attn.k_proj": "transformer.self_attention.layernorm_qkv.k_proj",
    "self_attn.v_proj": "transformer.self_attention.layernorm_qkv.v_proj",
    "self_attn.o_proj": "transformer.self_attention.proj.o_proj",
    "mlp.gate_proj": "transformer.layernorm_mlp.gate_proj",
    "mlp.up_proj": "transformer.layernorm_mlp.up_proj",
    "mlp.down_proj": "transformer.layernorm_mlp.down_proj",
}


def ours_name(name):
    for theirs, ours in PLACES.items():
        name = name.replace(f".{theirs}.", f".{ours}.")
    return name


def lora_config(targets=("q", "k", "v", "o", "gate", "up", "down"), **settings):
    modules = [f".*{target}_proj.*" for target in targets]  # as PaddleFormers' recipes have them
    return LoRAConfig(target_modules=modules, r=4, lora_alpha=8, **settings)


def adapters(lora):
    return {name: value for name, value in lora.model.state_dict().items() if "lora_" in name}


def draw(lora, generator):
    for value in adapters(lora).values():
        value.set_value(0.2 * generator.standard_normal(value.shape).astype("float32"))


def lora_pair(generator, targets=("q", "k", "v", "o", "gate", "up", "down"), **sizes):
    """PaddleFormers' LoRAModel and ours, with the same weights and the same random A and B."""
    host, ours = two_models(generator, **sizes)
    host, ours = LoRAModel(host, lora_config(targets)), TELoRAModel(ours, lora_config(targets))
    draw(host, generator)
    mine = adapters(ours)
    assert mine.keys() == {ours_name(name) for name in adapters(host)}
    for name, value in adapters(host).items():
        mine[ours_name(name)].set_value(value)
    return host, ours


@pytest.mark.parametrize("targets", [("q", "k", "v", "o", "gate", "up", "down"), ("q", "v", "up")])
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_same_loss_and_gradients(seed, kv_heads, targets):
    generator = np.random.default_rng(seed)
    host, ours = lora_pair(generator, targets, num_key_value_heads=kv_heads)
    input_ids = tokens(generator, 2, 24)
    labels = paddle.roll(input_ids, -1, 1)
    (loss, logits), (our_loss, our_logits) = (lora(input_ids, labels=labels)[:2] for lora in (host, ours))
    assert relative(our_logits, logits) < 1e-5
    assert abs(float(our_loss) - float(loss)) < 1e-5 * float(loss)
    ours.disable_lora()
    assert relative(ours(input_ids)[0], logits) > 0.05, "LoRA makes no difference"
    loss.backward(), our_loss.backward()
    mine = dict(ours.model.named_parameters())
    theirs = {ours_name(name): p for name, p in host.model.named_parameters() if not p.stop_gradient}
    assert {name for name, p in mine.items() if not p.stop_gradient} == theirs.keys()
    for name, parameter in theirs.items():
        assert relative(mine[name].grad, parameter.grad) < 1e-4, name


def test_merged_and_taken_out(seed):
    generator = np.random.default_rng(seed)
    _, ours = lora_pair(generator)
    input_ids = tokens(generator, 2, 12)
    apart = ours(input_ids)[0]
    ours.merge()
    assert relative(ours(input_ids)[0], apart) < 1e-5
    model = ours.restore_original_model()
    assert relative(model(input_ids)[0], apart) < 1e-5
    assert not any("lora_" in name for name in model.state_dict())


@pytest.mark.parametrize("targets", [("q", "k", "v", "o", "gate", "up", "down"), ("v", "down")])
def test_adapters_of_both_are_the_same(seed, tmp_path, targets):
    """What ours saves, PaddleFormers loads, and the other way round, bit for bit."""
    generator = np.random.default_rng(seed)
    host, ours = lora_pair(generator, targets)
    wanted = {name: value.numpy() for name, value in adapters(ours).items()}
    for lora, folder in ((host, tmp_path / "host"), (ours, tmp_path / "ours")):
        lora.save_pretrained(str(folder))
        draw(lora, generator)
    read = LoRAModel.from_pretrained(host.model, str(tmp_path / "ours"))
    for name, value in adapters(read).items():
        np.testing.assert_array_equal(value.numpy(), wanted[ours_name(name)], err_msg=name)
    for folder in ("host", "ours"):
        config = tiny_config()
        read = TELoRAModel.from_pretrained(model_class(config)(config), str(tmp_path / folder))
        assert adapters(read).keys() == wanted.keys()
        for name, value in adapters(read).items():
            np.testing.assert_array_equal(value.numpy(), wanted[name], err_msg=name)


def test_an_adapter_of_other_layers_is_refused(seed, tmp_path):
    generator = np.random.default_rng(seed)
    host, _ = lora_pair(generator, ("q", "v"))
    host.save_pretrained(str(tmp_path))
    config = tiny_config(num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"not those of this model \(for instance model.layers.1"):
        TELoRAModel.from_pretrained(model_class(config)(config), str(tmp_path))


def test_no_adapter_is_an_error(tmp_path):
    config = tiny_config()
    with pytest.raises(FileNotFoundError, match="peft_model.safetensors.index.json: no such file"):
        TELoRAModel.from_pretrained(model_class(config)(config), str(tmp_path))


@pytest.mark.parametrize(
    "settings, says",
    [
        (dict(loraga=True), "no loraga"),
        (dict(trainable_bias="all"), "no trainable_bias"),
        (dict(targets=("w1",)), "match nothing"),
    ],
)
def test_refused(settings, says):
    config = tiny_config()
    with pytest.raises(ValueError, match=says):
        TELoRAModel(model_class(config)(config), lora_config(**settings))
