"""Training starts directly from a Hugging Face folder, written by the safetensors library: as from the same weights in
PaddleNLP's layout, written by paddle.save.

Against transformers' own logits: tests/end_to_end/weights/test_command_huggingface.py.
"""

import json
import shutil

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file

from paddle_te.hosts.paddlenlp.loading import load_tokenizer
from tests.end_to_end.training.test_finetune import place, run  # noqa: F401  (place is a fixture)
from tests.pretraining import run as pretrain
from tests.unit.weights.models import Model, save_single
from tests.unit.weights.test_huggingface import hf_state

ROPE = dict(rope_theta=500.0)  # not PaddleNLP's default: it must come from the folder


@pytest.fixture
def folders(tmp_path, rng_of_weights):
    """The same float32 weights as Hugging Face's folder, in two shards, and as PaddleNLP's."""
    model = Model(rng_of_weights, hidden=64, intermediate=96, vocab=128, heads=4, kv_heads=2)
    for name, weight in model.native.items():
        values = rng_of_weights.standard_normal(weight.shape).astype(np.float32)
        model.native[name] = 1 + 0.1 * values if weight.ndim == 1 else 0.05 * values
    hf, native = tmp_path / "hf", tmp_path / "native"
    hf.mkdir()
    state = hf_state(model)
    names = {name: f"model-0000{1 + ('layers.1' in name)}-of-00002.safetensors" for name in state}
    for file in sorted(set(names.values())):
        save_file({n: state[n] for n in state if names[n] == file}, hf / file, metadata={"format": "pt"})
    (hf / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    theirs = dict(transformers_version="4.46.0", torch_dtype="float32", rms_norm_eps=1e-5, **ROPE)
    (hf / "config.json").write_text(json.dumps(model.config | theirs))
    save_single(native, model.native, "float32")
    (native / "config.json").write_text(json.dumps(model.config | dict(rms_norm_eps=1e-5, **ROPE)))
    return hf, native


@pytest.fixture
def rng_of_weights(seed):
    return np.random.default_rng(seed)


def test_pretraining(monkeypatch, tmp_path, folders):
    hf, native = folders
    continued = dict(continue_training="true", max_steps=3)
    want = pretrain(monkeypatch, tmp_path / "want", model_name_or_path=native, **continued)
    assert len(set(want.values())) == 3
    for name, flags in (
        ("none", {}),
        ("fused", dict(fuse_attention_qkv="true", fuse_attention_ffn="true")),
        ("paddle", dict(transformer_engine_backend="paddle")),
    ):
        got = pretrain(monkeypatch, tmp_path / name, model_name_or_path=hf, **continued, **flags)
        assert got == pytest.approx(want, rel=1e-5), name
    flags = dict(transformer_engine_backend="paddle", max_steps=3, te_init_weight_path=hf)
    got = pretrain(monkeypatch, tmp_path / "init", model_name_or_path=hf, **flags)
    assert got == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("backend", ["none", "paddle"])
def test_finetuning_with_the_folders_own_tokenizer(monkeypatch, place, tmp_path, backend):  # noqa: F811
    hf = tmp_path / "hf"
    shutil.copytree(place / "hf", hf)
    shutil.copy(place / "tokenizer" / "tokenizer.model", hf)
    (hf / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    want = run(monkeypatch, place, tmp_path / "want", backend, max_steps=3)
    where = dict(model_name_or_path=hf, tokenizer_name_or_path=hf)
    assert run(monkeypatch, place, tmp_path / "got", backend, max_steps=3, **where) == pytest.approx(want, rel=1e-5)


def test_tokenizer_json_alone(monkeypatch, place, tmp_path):  # noqa: F811
    """Llama 3's kind, of the tokenizers library; also as a run saves it again beside its model."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=False))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<|begin|>", "<|end|>"]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    library.train_from_iterator(["the names of the things in a module"] * 3, trainer)
    hf = tmp_path / "hf"
    shutil.copytree(place / "hf", hf)
    library.save(str(hf / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": special[0], "eos_token": special[1]}
    (hf / "tokenizer_config.json").write_text(json.dumps(config))
    where = dict(model_name_or_path=hf, tokenizer_name_or_path=hf, max_steps=1)
    first = run(monkeypatch, place, tmp_path / "out", **where)
    assert first[1] > 0
    deepseeks = shutil.copytree(hf, tmp_path / "deepseeks")  # the same files, and the name of a sentencepiece tokenizer
    (deepseeks / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "LlamaTokenizerFast"}))
    for folder in (hf, tmp_path / "out", deepseeks):
        tokenizer = load_tokenizer(folder)
        begin = [0] if folder == deepseeks else []  # add_bos_token is true by default there
        assert tokenizer.encode("the names") == begin + library.encode("the names").ids
        assert tokenizer.eos_token_id == 1


def test_weights_of_another_model_with_the_same_shapes_are_refused(monkeypatch, tmp_path, folders, caplog):
    """Llama 3.1's weights would train with Llama 3's angles, and nothing but the loss would tell."""
    hf, native = folders
    config = json.loads((native / "config.json").read_text())
    (native / "config.json").write_text(json.dumps(config | dict(rope_theta=10000.0)))
    with pytest.raises(SystemExit) as stop:
        pretrain(monkeypatch, tmp_path / "out", model_name_or_path=native, te_init_weight_path=hf, max_steps=1)
    assert stop.value.code == 2 and "rope_theta=500.0, this run's has rope_theta=10000.0" in caplog.text


def test_what_does_not_fit_is_refused_before_work(monkeypatch, tmp_path, folders, caplog):
    hf, _ = folders
    config = json.loads((hf / "config.json").read_text())
    continued = dict(model_name_or_path=hf, continue_training="true", max_steps=1)
    for change, message in (
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"intermediate_size": 95}, "has shape"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope type 'longrope'"),
    ):
        (hf / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(SystemExit) as stop:
            pretrain(monkeypatch, tmp_path / "out", **continued)
        assert stop.value.code == 2 and message in caplog.text
    (hf / "config.json").write_text(json.dumps(config))
    (hf / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(SystemExit):
        pretrain(monkeypatch, tmp_path / "out", **continued)
    assert "model-00002-of-00002.safetensors: missing" in caplog.text
