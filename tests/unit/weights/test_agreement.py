"""A config.json that contradicts its weights is refused by the name of the key and of the tensor, by every reader."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from paddle_te.weights import CheckpointError, check_layout, convert
from paddle_te.weights.folder import open_checkpoint
from tests.unit.weights.models import Model, save_config, save_single
from tests.unit.weights.test_huggingface import merged, save_hf

MODES = {"hf": "hf2te", "te": "te2hf", "native": "pd2te"}


def save(folder, model, layout):
    if layout == "hf":
        save_hf(folder, model)
    else:
        save_single(folder, model.te() if layout == "te" else model.native, model.dtype)
        save_config(folder, model)


def change_config(folder, **values):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


# {what config.json says: what the error names}
CONTRADICTIONS = {
    "vocabulary": (dict(vocab_size=32), r"(embed_tokens|lm_head).weight' has shape .* follows from vocab_size=32"),
    "hidden": (dict(hidden_size=64), r"has shape .* follows from hidden_size=64"),
    "intermediate": (dict(intermediate_size=64), r"has shape .* follows from intermediate_size=64"),
    "kv heads": (dict(num_key_value_heads=4), r"has shape .* follows from num_key_value_heads=4"),
    "fewer layers": (dict(num_hidden_layers=1), r"layers\.1\..* only 1 layers \(num_hidden_layers\)"),
    "more layers": (dict(num_hidden_layers=3), r"no file has '.*layers\.2\..* num_hidden_layers=3"),
    "biases": (dict(model_type="qwen2", architectures=["Qwen2ForCausalLM"]), "bias.*model_type='qwen2'|not a Qwen2"),
    "dtype": (dict(dtype="bfloat16"), r"is float32, but config.json says dtype='bfloat16'"),
    "transformers' dtype": (dict(torch_dtype="float16"), r"is float32, but config.json says torch_dtype='float16'"),
}  # fmt: skip


@pytest.mark.parametrize("layout", MODES)
@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictions(tmp_path, rng, case, layout):
    values, message = CONTRADICTIONS[case]
    save(tmp_path / "in", Model(rng), layout)
    change_config(tmp_path / "in", **values)
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path / "in", tmp_path / "out", MODES[layout], progress=False)
    with pytest.raises(CheckpointError, match=message):
        check_layout(tmp_path / "in", "native" if layout == "native" else "te", hf=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("layout", MODES)
def test_biases_that_config_json_does_not_have(tmp_path, rng, layout):
    """Those of a Qwen2 whose config.json calls it a Llama."""
    model = Model(rng, family="qwen2")
    model.native = {name.replace("qwen2.", "llama."): weight for name, weight in model.native.items()}
    model.family = "llama"
    save(tmp_path / "in", model, layout)
    with pytest.raises(CheckpointError, match=r"bias'.*config.json: model_type='llama', attention_bias=None"):
        open_checkpoint(tmp_path / "in")


def with_head(folder, head):
    """Writes a Hugging Face folder's weights again with that head; None: without one."""
    path = folder / "model.safetensors"
    state = load_file(path)
    del state["lm_head.weight"]
    save_file(state | ({} if head is None else {"lm_head.weight": head}), path, metadata={"format": "pt"})
    return state


def tied_hf(folder, model, head_of):
    save_hf(folder, model, tie_word_embeddings=True)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    return with_head(folder, head_of(embedding))


def last_bit_flipped(embedding):
    bits = embedding.view(np.uint32).copy()
    bits[1, 2] ^= 1
    return bits.view(np.float32)


def test_a_tied_head_with_other_numbers(tmp_path, rng):
    """It overwrote the embedding: torchtitan#3764."""
    tied_hf(tmp_path / "in", Model(rng), last_bit_flipped)
    message = r"'lm_head.weight' has other numbers than 'model.embed_tokens.weight'.*tie_word_embeddings=true"
    for mode in ("hf2te", "hf2pd"):
        with pytest.raises(CheckpointError, match=message):
            convert(tmp_path / "in", tmp_path / mode, mode, progress=False)
    change_config(tmp_path / "in", tie_word_embeddings=False)
    convert(tmp_path / "in", tmp_path / "untied", "hf2te", progress=False)


@pytest.mark.parametrize("layout", ["te", "native"])
def test_a_tied_head_with_other_numbers_of_paddlenlp(tmp_path, rng, layout):
    model = Model(rng)
    model.native["lm_head.weight"] = np.ascontiguousarray(model.native["lm_head.weight"].T)
    save(tmp_path / "in", model, layout)
    change_config(tmp_path / "in", tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match="other numbers than 'llama.embed_tokens.weight'"):
        convert(tmp_path / "in", tmp_path / "out", MODES[layout], progress=False)


@pytest.mark.parametrize("head_of", [lambda embedding: None, lambda embedding: embedding], ids=["none", "same"])
def test_a_tied_head_that_agrees(tmp_path, rng, head_of):
    state = tied_hf(tmp_path / "in", Model(rng), head_of)
    convert(tmp_path / "in", tmp_path / "te", "hf2te", progress=False)
    embedding = merged(tmp_path / "te")["llama.embed_tokens.weight"]
    assert embedding.tobytes() == state["model.embed_tokens.weight"].tobytes()


def test_no_head_where_config_json_has_one(tmp_path, rng):
    save_hf(tmp_path / "in", Model(rng))
    with_head(tmp_path / "in", None)
    with pytest.raises(CheckpointError, match=r"no file has 'lm_head.weight'.*tie_word_embeddings"):
        open_checkpoint(tmp_path / "in")
