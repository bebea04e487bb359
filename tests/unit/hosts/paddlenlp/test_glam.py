"""GLaM: against transformers' GPT-2 with experts composed of torch's operations in its second layer."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddle_te.configs.families import GLAM
from paddle_te.hosts.paddlenlp.families import config_class, model_class
from paddle_te.hosts.paddlenlp.generation import left_padded
from paddle_te.hosts.paddlenlp.loading import load_model
from paddle_te.hosts.paddlenlp.lora import TELoRAModel, lora_config
from paddle_te.options.lora import Adapter
from paddle_te.weights import CheckpointError, convert
from paddle_te.weights.adapters.peft import convert_adapter
from tests import model_cases
from tests.unit.hosts.paddlenlp.native import draw_adapters

PYTHON = os.environ.get("PADDLE_TE_HF_PYTHON")
STORED = json.loads((Path(__file__).parent / "glam_transformers.json").read_text())  # see tests/glam_peers.py
SEED = 36
CONFIG = {name: size for name, size in model_cases.SIZES.items() if name != "num_key_value_heads"}
CONFIG |= dict(model_type="glam", num_experts=6, num_experts_per_tok=2, router_aux_loss_coef=0.01, dtype="float32")
ATTENTION = {
    "layernorm_qkv.ln_weight": "ln_1.weight",
    "layernorm_qkv.ln_bias": "ln_1.bias",
    "layernorm_qkv.weight": "attn.c_attn.weight",
    "layernorm_qkv.bias": "attn.c_attn.bias",
    "proj.weight": "attn.c_proj.weight",
    "proj.bias": "attn.c_proj.bias",
}
MLP = {
    "ln_weight": "ln_2.weight",
    "ln_bias": "ln_2.bias",
    "fc1_weight": "mlp.c_fc.weight",
    "fc1_bias": "mlp.c_fc.bias",
    "fc2_weight": "mlp.c_proj.weight",
    "fc2_bias": "mlp.c_proj.bias",
}
EXPERTS = {
    "ln_weight": "ln_2.weight",
    "ln_bias": "ln_2.bias",
    "router.weight": "mlp.router",
    "experts.fc1_weight": "mlp.fc1",
    "experts.fc1_bias": "mlp.fc1_bias",
    "experts.fc2_weight": "mlp.fc2",
    "experts.fc2_bias": "mlp.fc2_bias",
}
OUTSIDE = {
    "glam.embed_tokens.weight": "transformer.wte.weight",
    "glam.embed_positions.weight": "transformer.wpe.weight",
    "glam.norm.weight": "transformer.ln_f.weight",
    "glam.norm.bias": "transformer.ln_f.bias",
}


def names():
    """{our name of a parameter: theirs}."""
    found = dict(OUTSIDE)
    for layer in range(CONFIG["num_hidden_layers"]):
        half, of_half = ("moe_layer", EXPERTS) if layer == 1 else ("layernorm_mlp", MLP)
        for ours, of_part in {"self_attention": ATTENTION, half: of_half}.items():
            found |= {
                f"glam.layers.{layer}.transformer.{ours}.{mine}": f"transformer.h.{layer}.{theirs}"
                for mine, theirs in of_part.items()
            }
    return found


def turned(theirs, array):
    """Their weights [in, out] as ours [out, in], and back."""
    return np.swapaxes(array, -1, -2) if ".h." in theirs and array.ndim > 1 and "_bias" not in theirs else array


def make(seed, shapes, **settings):
    config = config_class(GLAM)(**CONFIG, transformer_engine_backend="paddle", **settings)
    model = model_class(config)(config)
    parameters = {name: parameter for name, parameter in model.named_parameters() if name != "lm_head.weight"}
    assert parameters.keys() == names().keys()
    for name, parameter in parameters.items():
        theirs = names()[name]
        value = model_cases.weight("gpt", theirs, shapes[theirs], seed)
        parameter.set_value(paddle.to_tensor(np.ascontiguousarray(turned(theirs, value))))
    return model


def relative(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def generate(model, tokens):
    prompt = left_padded(tokens[:, : model_cases.PROMPT].tolist())
    options = dict(max_new_tokens=model_cases.NEW, decode_strategy="greedy_search", eos_token_id=1000, pad_token_id=0)
    return model.generate(**prompt, **options)[0].tolist()


def check(name, seed, expected):
    """Logits, loss, gradients with those of the balance loss, and generated tokens are those of the peer."""
    settings = {"moe_expert_capacity_factor": 1.0} if name == "glam-capacity" else {}
    model, tokens = make(seed, expected["shapes"], **settings), model_cases.tokens(seed)
    if "generated" in expected:
        assert generate(model.eval() or model, tokens) == expected["generated"]
    model.train()
    loss, logits = model(paddle.to_tensor(tokens[:, :-1]), labels=paddle.to_tensor(tokens[:, 1:]))[:2]
    loss.backward()
    assert relative(model_cases.digest(logits.numpy()), np.array(expected["logits"])) < 5e-6
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-6)
    for key, parameter in model.named_parameters():
        theirs = names()[key]
        found = model_cases.digest(turned(theirs, parameter.grad.numpy()))
        assert relative(found, np.array(expected["gradients"][theirs])) < 1e-5, key


@pytest.mark.parametrize("name", STORED)
def test_as_gpt2_with_experts_computed_it(name):
    check(name, SEED, STORED[name])


@pytest.mark.skipif(not PYTHON, reason="PEERS=1 installs transformers")
def test_as_gpt2_with_experts_computes_it(seed):
    command = [PYTHON, "-m", "tests.glam_peers", str(seed)]
    root = Path(__file__).parents[4]
    answers = json.loads(subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout)
    for name, expected in answers.items():
        check(name, seed, expected)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(a folder with a model's checkpoint, its logits)."""
    folder = tmp_path_factory.mktemp("glam") / "saved"
    model = make(SEED, STORED["glam"]["shapes"])
    model.save_pretrained(str(folder))
    return folder, model.eval()(paddle.to_tensor(model_cases.tokens(SEED)))[0].numpy()


def test_a_checkpoint_of_its_own(saved, tmp_path):
    """It is read again, also by way of two tensor parallel ranks; no library has another layout of it."""
    folder, want = saved
    ids = paddle.to_tensor(model_cases.tokens(SEED))
    convert(folder, tmp_path / "shares", "reshard", tensor_parallel_degree=2, progress=False)
    convert(tmp_path / "shares", tmp_path / "whole", "reshard", tensor_parallel_degree=1, progress=False)
    for each in (folder, tmp_path / "whole"):
        assert (load_model(each, "paddle").eval()(ids)[0].numpy() == want).all()
    for mode, library in {"te2hf": "transformers", "te2pd": "PaddleNLP"}.items():
        with pytest.raises(CheckpointError, match=f"--mode {mode}: {library} has no class for GLaM, and so no layout"):
            convert(folder, tmp_path / mode, mode)


def test_lora_beside_all_weights(saved, tmp_path):
    folder, _ = saved
    ids = paddle.to_tensor(model_cases.tokens(SEED))
    lora = TELoRAModel(load_model(folder, "paddle"), lora_config(Adapter(rank=4, alpha=8)))
    draw_adapters(lora)
    want = lora(ids)[0].numpy()
    lora.save_pretrained(str(tmp_path / "ours"))
    convert(folder, tmp_path / "merged", lora_path=tmp_path / "ours", progress=False)
    assert relative(load_model(tmp_path / "merged", "paddle")(ids)[0].numpy(), want) < 1e-5
    assert any(name.endswith("experts.up_proj.lora_A") for name, _ in lora.named_parameters())
    with pytest.raises(CheckpointError, match="transformers has no class for GLaM, and so PEFT no adapter"):
        convert_adapter(tmp_path / "ours", tmp_path / "peft", "te2hf")


def test_positions(saved):
    """More tokens than positions are refused; packed documents have positions of their own."""
    model = load_model(saved[0], "paddle").eval()
    with pytest.raises(ValueError, match=r"sequences of 65 tokens: the model has learned 64 positions"):
        model(paddle.zeros([1, 65], "int64"))
    ids = paddle.to_tensor(model_cases.tokens(SEED)[:1, :32])
    positions = paddle.concat([paddle.arange(20), paddle.arange(12)]).unsqueeze(0)
    packed = model(ids, positions, cu_seqlens=paddle.to_tensor([0, 20, 32], dtype="int32"))[0].numpy()
    each = [model(ids[:, part])[0].numpy() for part in (slice(0, 20), slice(20, 32))]
    assert relative(packed, np.concatenate(each, 1)) < 1e-6
