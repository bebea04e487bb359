"""Families that have a model class of ours: against transformers, from folders as they are downloaded."""

import json
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import paddle
import pytest
from paddlenlp.utils.log import logger
from safetensors.numpy import load_file, save_file

from paddle_te.configs import ConfigError
from paddle_te.configs.families import family_of
from paddle_te.configs.spec import spec_of
from paddle_te.hosts.paddlenlp.generation import left_padded
from paddle_te.hosts.paddlenlp.loading import layout_of, load_config, load_model
from paddle_te.hosts.paddlenlp.lora import TELoRAModel, load_lora, lora_config
from paddle_te.options.lora import Adapter
from paddle_te.weights import CheckpointError, convert, safetensors
from paddle_te.weights.adapters.peft import convert_adapter
from paddle_te.weights.dims import Dims
from paddle_te.weights.layouts import hf_layout
from tests import model_cases
from tests.unit.hosts.paddlenlp.native import draw_adapters

PYTHON = os.environ.get("PADDLE_TE_HF_PYTHON")
STORED = json.loads((Path(__file__).parent / "model_transformers.json").read_text())  # see tests/model_peers.py
SEED = 36


def save(folder, name, seed, shapes):
    """The model as transformers saves it."""
    folder.mkdir()
    config = model_cases.config(name) | {"torch_dtype": "float32", "transformers_version": "4.51.3"}
    (folder / "config.json").write_text(json.dumps(config))
    weights = {key: model_cases.weight(name, key, shape, seed) for key, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def folder(tmp_path, name):
    return save(tmp_path / "hf", name, SEED, STORED[name]["shapes"])


def gradients(model):
    """{transformers' name: array} of the gradients of a model of ours."""
    ours, config = layout_of(model.config), model.config
    theirs = hf_layout(config.tie_word_embeddings, family_of(config))
    dims, parts = Dims(spec_of(config)), {}
    for name, parameter in model.named_parameters():
        parts |= dims.take_apart(ours.place(name), parameter.grad.numpy())
    places = [place for place in theirs.tensors(dims.spec) if place.slot.parts != ("expert_bias",)]  # has no gradient
    return {theirs.full_name(place): dims.put_together(place, parts) for place in places}


def relative(found, expected):
    return np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-12)  # 0 of an expert without tokens


def check(folder, seed, expected):
    """The model in a folder computes what transformers' does."""
    tokens = model_cases.tokens(seed)
    model = load_model(folder, "paddle")
    prompt = left_padded(tokens[:, : model_cases.PROMPT].tolist())
    made = model.generate(
        **prompt, max_new_tokens=model_cases.NEW, decode_strategy="greedy_search", eos_token_id=1000, pad_token_id=0
    )
    assert made[0].tolist() == expected["generated"]
    model.train()
    loss, logits = model(paddle.to_tensor(tokens[:, :-1]), labels=paddle.to_tensor(tokens[:, 1:]))[:2]
    loss.backward()
    assert relative(model_cases.digest(logits.numpy()), np.array(expected["logits"])) < 5e-6
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-6)
    found = gradients(model)
    assert found.keys() == expected["gradients"].keys()
    for key, value in expected["gradients"].items():
        assert relative(model_cases.digest(found[key]), np.array(value)) < 1e-5, key


@pytest.mark.parametrize("name", model_cases.MODELS)
def test_as_transformers_computed_it(folder, name):
    check(folder, SEED, STORED[name])


@pytest.mark.skipif(not PYTHON, reason="PEERS=1 installs transformers")
def test_as_transformers_computes_it(tmp_path, seed):
    root = Path(__file__).parents[4]
    command = [PYTHON, "-m", "tests.model_peers", str(seed)]
    answers = json.loads(subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout)
    for name, expected in answers.items():
        check(save(tmp_path / name, name, seed, expected["shapes"]), seed, expected)


@pytest.mark.parametrize("name", model_cases.MODELS)
def test_there_and_back(folder, tmp_path, name):
    """The same bits and names, by way of shares of two tensor parallel ranks and, where the head has a weight of its
    own, three pipeline stages."""
    convert(folder, tmp_path / "te", "hf2te", progress=False)
    stages = 3 if "lm_head.weight" in STORED[name]["shapes"] else 1
    degrees = dict(tensor_parallel_degree=2, pipeline_parallel_degree=stages)
    convert(tmp_path / "te", tmp_path / "shares", "reshard", **degrees, progress=False)
    convert(tmp_path / "shares", tmp_path / "back", "te2hf", progress=False)
    files = [load_file(path / "model.safetensors") for path in (folder, tmp_path / "back")]
    assert files[0].keys() == files[1].keys()
    assert all((files[0][key] == files[1][key]).all() for key in files[0])
    said = [json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "back")]
    assert {key: said[1].get(key) for key in said[0]} == said[0] | {"transformers_version": None}


@pytest.mark.parametrize("name", ["qwen3-tied"])
def test_how_it_generates_is_saved_and_a_tied_head_missed_by_nobody(folder, tmp_path, monkeypatch):
    ends = {"eos_token_id": [2, 1], "pad_token_id": 1}
    for sampled, said in (True, {"top_k": 20, "top_p": 0.95}), (False, {}):
        given = ends | said | {"do_sample": sampled, "temperature": 0.6}
        (folder / "generation_config.json").write_text(json.dumps(given))
        load_model(folder, "paddle").save_pretrained(str(tmp_path / f"saved {sampled}"))
        convert(tmp_path / f"saved {sampled}", tmp_path / f"back {sampled}", "te2hf", progress=False)
        written = json.loads((tmp_path / f"back {sampled}/generation_config.json").read_text())
        assert written.items() >= (given if sampled else ends).items()
    convert(folder, tmp_path / "te", "hf2te", progress=False)
    warnings = []
    monkeypatch.setattr(logger, "warning", warnings.append)
    load_model(tmp_path / "te", "paddle")
    assert warnings == []


@pytest.mark.parametrize("name", ["gemma3"])
def test_of_a_model_that_sees_pictures_the_text_is_read(folder, tmp_path, caplog, capsys):
    """As Gemma 3's folders from 4B on: the language model is in text_config and under names of its own."""
    said = json.loads((folder / "config.json").read_text())
    outside = {key: said.pop(key) for key in ("torch_dtype", "transformers_version")} | {"model_type": "gemma3"}
    nested = outside | {"eos_token_id": [1, 106], "text_config": said, "vision_config": {"hidden_size": 8}}
    (folder / "config.json").write_text(json.dumps(nested))
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    sees = {"vision_tower.vision_model.post_layernorm.weight": np.ones(8, "float32")}
    shards = {"1": {f"language_model.{key}": value for key, value in weights.items()}, "2": sees}
    for number, tensors in shards.items():
        save_file(tensors, folder / f"model-0000{number}-of-00002.safetensors", {"format": "pt"})
    names = {key: f"model-0000{number}-of-00002.safetensors" for number, tensors in shards.items() for key in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    check(folder, SEED, STORED["gemma3"])
    remark = "config.json: text_config is read, the language model; what sees pictures is left out"
    assert remark in caplog.text
    convert(folder, tmp_path / "te", "hf2te", progress=False)
    convert(tmp_path / "te", tmp_path / "back", "te2hf", progress=False)
    assert remark in capsys.readouterr().out
    back = load_file(*(tmp_path / "back").glob("*.safetensors"))
    assert back.keys() == weights.keys() and all((back[key] == weights[key]).all() for key in weights)
    written = json.loads((tmp_path / "back/config.json").read_text())
    assert written.items() >= {"model_type": "gemma3_text", "eos_token_id": [1, 106], "sliding_window": 8}.items()


@pytest.mark.parametrize("name", ["deepseek_v3"])
def test_what_predicts_further_tokens_is_left_out(folder, tmp_path, capsys):
    """DeepSeek-V3's layer 61."""
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | {"num_nextn_predict_layers": 1}))
    weights = load_file(folder / "model.safetensors")
    further = {"model.layers.3.eh_proj.weight": np.ones((64, 128), "float32")}
    further |= {key.replace("layers.2", "layers.3"): value for key, value in weights.items() if "layers.2" in key}
    save_file(weights | further, folder / "model.safetensors", {"format": "pt"})
    check(folder, SEED, STORED["deepseek_v3"])
    convert(folder, tmp_path / "te", "hf2te", progress=False)
    assert "the weights from layer 3 on, which predict further tokens, are left out" in capsys.readouterr().out
    (folder / "config.json").write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match="config.json has only 3 layers|in none of the known layouts"):
        load_model(folder, "paddle")


# weights that LoRA is not beside
OTHERS = re.compile(r"embed_tokens|lm_head|norm|\.gate\.weight|shared_expert_gate|router|bias")
STACKED = ["granitemoe", "gpt_oss"]  # whose experts are one tensor, beside which PEFT has nothing


def save_adapter(folder, output, targets, ids):
    """Return the logits of the model with an adapter, which is saved."""
    lora = TELoRAModel(load_model(folder, "paddle"), lora_config(Adapter(targets=targets, rank=4, alpha=8)))
    draw_adapters(lora)
    lora.save_pretrained(str(output))
    return lora(ids)[0].numpy()


@pytest.mark.parametrize("name", STACKED)
def test_lora_beside_experts_that_are_one_tensor(folder, tmp_path, name):
    """It trains and merges; PEFT has no such adapter."""
    ids = paddle.to_tensor(model_cases.tokens(SEED))
    want = save_adapter(folder, tmp_path / "ours", "all", ids)
    assert (load_lora(load_model(folder, "paddle"), tmp_path / "ours", "paddle")(ids)[0].numpy() == want).all()
    convert(folder, tmp_path / "merged", lora_path=tmp_path / "ours", progress=False)
    assert relative(load_model(tmp_path / "merged", "paddle")(ids)[0].numpy(), want) < 1e-5
    with pytest.raises(CheckpointError, match="beside the experts of layer 0, all of which are one tensor"):
        convert_adapter(tmp_path / "ours", tmp_path / "peft", "te2hf")


@pytest.mark.parametrize("name", model_cases.MODELS)
def test_lora_is_beside_the_weights_what_peft_adds_to_them(folder, tmp_path, name):
    """Each expert has A and B of its own; training goes on from our adapter and from PEFT's, to the bit."""
    targets, ids = "attention" if name in STACKED else "all", paddle.to_tensor(model_cases.tokens(SEED))
    want = save_adapter(folder, tmp_path / "ours", targets, ids)
    convert_adapter(tmp_path / "ours", tmp_path / "peft", "te2hf")
    fused = json.loads((tmp_path / "peft/adapter_config.json").read_text())["rank_pattern"]  # parts share no A there
    for adapter in ("ours",) if fused else ("ours", "peft"):
        assert (load_lora(load_model(folder, "paddle"), tmp_path / adapter, "paddle")(ids)[0].numpy() == want).all()
    convert(folder, tmp_path / "merged", lora_path=tmp_path / "ours", progress=False)
    merged, weights = (load_file(path / "model.safetensors") for path in (tmp_path / "merged", folder))
    factors = load_file(tmp_path / "peft/adapter_model.safetensors")
    for key in [key for key in factors if key.endswith("lora_A.weight")]:
        weight = key.removeprefix("base_model.model.").replace(".lora_A", "")
        weights[weight] += 2 * factors[key.replace("lora_A", "lora_B")] @ factors[key]
        assert relative(merged[weight], weights[weight]) < 1e-6, weight
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert relative(load_model(folder, "paddle")(ids)[0].numpy(), want) < 1e-5
    assert len(factors) == 2 * sum(OTHERS.search(key) is None and weights[key].ndim == 2 for key in weights)


@pytest.mark.parametrize("name", ["gpt_oss"])
def test_a_folder_in_mxfp4_is_that_of_its_numbers_in_bfloat16(folder, tmp_path):
    """As OpenAI's folders are, over two shards; blocks and scales of a tensor may stand in different ones."""
    rng, plain = np.random.default_rng(SEED), load_file(folder / "model.safetensors")
    plain, packed = ({key: (value.view("<u4") >> 16).astype("<u2") for key, value in plain.items()} for _ in range(2))
    for key in [key for key in plain if key.endswith("_proj") and ".experts." in key]:
        experts, width, out = plain[key].shape
        blocks = rng.integers(0, 256, (experts, out, width // 32, 16), dtype="u1")
        scales = rng.integers(122, 126, blocks.shape[:-1], dtype="u1")
        halves = np.stack([blocks & 15, blocks >> 4], -1).reshape(experts, out, width)  # the spec's table: e2m1
        values = np.where(halves & 8, -1, 1) * np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[halves & 7]
        values = np.ldexp(values, np.repeat(scales.astype("i4"), 32, -1).reshape(values.shape) - 127).astype("<f4")
        plain[key] = np.ascontiguousarray((values.view("<u4") >> 16).astype("<u2").swapaxes(1, 2))
        del packed[key]
        packed |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
    said = json.loads((folder / "config.json").read_text()) | {"torch_dtype": "bfloat16"}
    for name, tensors in ("plain", plain), ("packed", packed):
        (tmp_path / name).mkdir()
        shards = {"1": {}, "2": {}}
        for key, value in tensors.items():
            shards["2" if key.endswith("_scales") else "1"][key] = value
        files = {f"model-0000{number}-of-00002.safetensors": of for number, of in shards.items() if of}
        if name == "plain":
            files = {"model.safetensors": shards["1"]}
        for file, of in files.items():
            save_file(of, tmp_path / name / file, {"format": "pt"})
        index = {"metadata": {}, "weight_map": {key: file for file, of in files.items() for key in of}}
        if len(files) > 1:
            (tmp_path / name / "model.safetensors.index.json").write_text(json.dumps(index))
            said["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
        (tmp_path / name / "config.json").write_text(json.dumps(said))
    models = [load_model(tmp_path / each, "paddle") for each in ("plain", "packed")]
    states = [model.state_dict() for model in models]
    assert all((states[1][key] == value).all() for key, value in states[0].items())
    convert(tmp_path / "packed", tmp_path / "te", "hf2te", progress=False)
    convert(tmp_path / "te", tmp_path / "back", "te2hf", progress=False)
    back = {}
    for path in (tmp_path / "back").glob("*.safetensors"):
        back |= {key: ref.read() for key, ref in safetensors.read(path).items()}
    assert back.keys() == plain.keys() and all((back[key] == value).all() for key, value in plain.items())
    assert "quantization_config" not in json.loads((tmp_path / "back/config.json").read_text())


FP8 = [{"use_fp8": True, "fp8_recipe": each} for each in ("delayed", "current")]
PACKED = ["qwen3", "phi3-long", "olmo2", "glm4", "gemma2", "gemma3"]


@pytest.mark.parametrize("name, recipe", [(name, {}) for name in PACKED] + [("qwen3", recipe) for recipe in FP8])
def test_recompute_and_packed_rows(folder, recipe):
    """Losses and gradients of packed rows are those of each document, whatever backward computes again.

    One is longer than phi3-long's first training, the other is not.
    """
    ids, ends = paddle.to_tensor(model_cases.tokens(SEED)[:1, :32]), paddle.to_tensor([0, 26, 32], dtype="int32")
    documents, want = [slice(0, 26), slice(26, 32)], None
    positions = paddle.concat([paddle.arange(26), paddle.arange(6)]).unsqueeze(0)
    for again in ({}, {"recompute_modules": ["layernorm", "mlp"]}, {"recompute_granularity": "full"}):
        model = load_model(folder, "paddle", seq_length=32, **again, **recipe)
        model.train()
        for layer in model.llama.layers:
            layer.enable_recompute = "recompute_granularity" in again
        loss = model(ids, positions, labels=ids, cu_seqlens=ends)[0]
        loss.backward()
        found = gradients(model)
        want = want or (loss.item(), found)
        assert loss.item() == pytest.approx(want[0], rel=1e-6)
        assert all(relative(value, want[1][key]) < 1e-5 for key, value in found.items())
    if not recipe:
        losses = [model(ids[:, each], labels=ids[:, each])[0].item() for each in documents]
        assert np.average(losses, weights=[26, 6]) == pytest.approx(want[0], rel=1e-6)


@pytest.mark.parametrize("name", ["qwen3"])
def test_the_host_has_no_class(folder, tmp_path):
    message = "PaddleNLP has no class for Qwen3; use pd .paddle. or te .transformer_engine."
    with pytest.raises(ConfigError, match=message):
        load_config(folder, "none")
    with pytest.raises(CheckpointError, match="PaddleNLP has no class for Qwen3, and so no layout; use hf2te or te2hf"):
        convert(folder, tmp_path / "pd", "hf2pd")


@pytest.mark.parametrize("name", ["gemma2"])
def test_transformer_engine_has_no_soft_cap(folder):
    with pytest.raises(ConfigError, match="attn_logit_softcapping=4.0: Transformer Engine's attention has no soft cap"):
        load_config(folder, "transformer_engine")


@pytest.mark.parametrize("name", ["qwen3"])
@pytest.mark.parametrize("said", [{"attention_bias": True}, {"use_sliding_window": True}, {"head_dim": 31}])
def test_what_is_not_computed_is_refused(folder, said):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | said))
    with pytest.raises((CheckpointError, ConfigError), match=next(iter(said))):
        load_model(folder, "paddle")


def test_a_saved_gemma_is_read_again(tmp_path):
    """PaddleNLP leaves out of config.json what is the family's default: a head that is the embedding."""
    folder = save(tmp_path / "hf", "gemma3", SEED, STORED["gemma3"]["shapes"])
    said = json.loads((folder / "config.json").read_text())
    said.pop("tie_word_embeddings", None)  # as Google's
    (folder / "config.json").write_text(json.dumps(said))
    model = load_model(folder, "paddle")
    model.save_pretrained(str(tmp_path / "tuned"))
    assert "tie_word_embeddings" not in json.loads((tmp_path / "tuned/config.json").read_text())
    again = load_model(tmp_path / "tuned", "paddle").state_dict()
    assert all((again[name] == weight).all() for name, weight in model.state_dict().items())
