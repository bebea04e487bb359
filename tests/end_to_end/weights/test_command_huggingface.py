"""Against transformers' own models, in a process of its own.

PADDLE_TE_HF_PYTHON names a Python that has torch and transformers; without it this one is tried.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest
from paddlenlp.transformers import AutoConfig

from paddle_te.hosts.paddlenlp.families import model_class
from paddle_te.hosts.paddlenlp.generation import left_padded
from paddle_te.hosts.paddlenlp.loading import load_model
from paddle_te.weights import convert

PYTHON = os.environ.get("PADDLE_TE_HF_PYTHON", sys.executable)


def missing():
    probe = subprocess.run([PYTHON, "-c", "import torch, transformers"], capture_output=True, text=True, check=False)
    return probe.stderr.strip().splitlines()[-1] if probe.returncode else None


pytestmark = pytest.mark.skipif(
    bool(REASON := missing()), reason=f"{PYTHON} lacks torch or transformers ({REASON}); see PADDLE_TE_HF_PYTHON"
)

MAKE = """
import sys, json, torch, transformers
folder, seed, dtype, shard, options = sys.argv[1], int(sys.argv[2]), *sys.argv[3:5], json.loads(sys.argv[5])
torch.manual_seed(seed)
sizes = dict(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.1)
config = transformers.AutoConfig.for_model(options.pop("model_type", "llama"), **(sizes | options))
model = transformers.AutoModelForCausalLM.from_config(config)
for name, parameter in model.named_parameters():
    if "norm" in name:
        torch.nn.init.normal_(parameter, 1.0, 0.1)
    elif name.endswith("bias"):
        torch.nn.init.normal_(parameter)
model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard)
"""

LOGITS = """
import sys, numpy, torch, transformers
tokens, *folders = sys.argv[1:]
for folder in folders:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        numpy.save(folder + "_logits.npy", model(torch.from_numpy(numpy.load(tokens))).logits.numpy())
"""


def hf(code, *arguments):
    subprocess.run([PYTHON, "-c", code, *map(str, arguments)], check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})


GRADIENTS = """
import sys, numpy, torch, transformers
tokens, folder = sys.argv[1:]
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
tokens = torch.from_numpy(numpy.load(tokens))
loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())
loss.backward()
numpy.savez(folder + "_gradients.npz", loss=loss.item(), **{n: p.grad.numpy() for n, p in model.named_parameters()})
"""

GENERATE = """
import sys, numpy, torch, transformers
tokens, folder = sys.argv[1:]
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
tokens = torch.from_numpy(numpy.load(tokens))
model.generation_config.eos_token_id = None
made = model.generate(tokens, max_new_tokens=30, do_sample=False, attention_mask=torch.ones_like(tokens))
numpy.save(folder + "_tokens.npy", made[:, tokens.shape[1]:].numpy())
"""

ROPE = dict(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
LLAMA31 = dict(rope_theta=500000.0, rope_scaling=ROPE | dict(factor=8.0))
# Llama 3.2 1B but for its size: heads of 64, tied embeddings
LLAMA32 = dict(
    tie_word_embeddings=True,
    hidden_size=256,
    rope_theta=500000.0,
    rope_scaling=ROPE | dict(factor=32.0),
)


QWEN25 = dict(model_type="qwen2", tie_word_embeddings=True)
MISTRAL = dict(model_type="mistral", sliding_window=None)
MODELS = {
    "2": ("float32", {}),
    "3.1": ("bfloat16", LLAMA31),
    "3.2": ("float32", LLAMA32),
    "qwen2.5": ("float32", QWEN25),
    "mistral": ("bfloat16", MISTRAL),
    "gpt2": ("float32", dict(model_type="gpt2", n_inner=96)),
}


@pytest.mark.parametrize("dtype, options", MODELS.values(), ids=MODELS)
def test_same_logits_and_bits(tmp_path, seed, dtype, options):
    tokens = np.random.randint(0, 128, (2, 40))
    np.save(tmp_path / "tokens.npy", tokens)
    hf(MAKE + LOGITS.replace("sys.argv[1:]", "sys.argv[6:]"), tmp_path / "hf", seed, dtype, "60KB", json.dumps(options),
       tmp_path / "tokens.npy", tmp_path / "hf")  # fmt: skip
    expected = np.load(tmp_path / "hf_logits.npy")
    scale = np.abs(expected).max()

    for layout, backend in (("pd", "none"), ("te", "paddle")):
        convert(tmp_path / "hf", tmp_path / layout, f"hf2{layout}", progress=False)
        config = AutoConfig.from_pretrained(str(tmp_path / layout))
        config.transformer_engine_backend = backend
        make = model_class(config)
        model = make.from_pretrained(str(tmp_path / layout), config=config, dtype="float32")
        model.eval()
        with paddle.no_grad():
            out = model(paddle.to_tensor(tokens))
        logits = (out[0] if isinstance(out, tuple) else out).numpy()
        assert np.abs(logits - expected).max() <= 1e-5 * scale, layout

        # and without a conversion, from the folder itself
        with paddle.no_grad():
            out = load_model(tmp_path / "hf", backend)(paddle.to_tensor(tokens))
        direct = (out[0] if isinstance(out, tuple) else out).numpy()
        assert np.abs(direct - expected).max() <= 1e-5 * scale, layout

        # out again, through other degrees: the same bits and names
        convert(tmp_path / layout, tmp_path / f"{layout}_tp2", "reshard", tensor_parallel_degree=2, progress=False)
        convert(tmp_path / f"{layout}_tp2", tmp_path / f"hf_{layout}", f"{layout}2hf", progress=False)
        assert hf_bits(tmp_path / f"hf_{layout}") == hf_bits(tmp_path / "hf")

    # and transformers loads them
    hf(LOGITS, tmp_path / "tokens.npy", tmp_path / "hf_pd", tmp_path / "hf_te")
    for layout in ("pd", "te"):
        np.testing.assert_array_equal(np.load(tmp_path / f"hf_{layout}_logits.npy"), expected)


def hf_gradients(model):
    """{Hugging Face's name: gradient} of none's or pd's model: their weights are [in, out] or stacked."""
    stacked = {
        "transformer.self_attention.layernorm_qkv.ln_weight": ["input_layernorm"],
        "transformer.self_attention.layernorm_qkv.weight": [f"self_attn.{part}_proj" for part in "qkv"],
        "transformer.self_attention.proj.weight": ["self_attn.o_proj"],
        "transformer.layernorm_mlp.ln_weight": ["post_attention_layernorm"],
        "transformer.layernorm_mlp.fc1_weight": ["mlp.gate_proj", "mlp.up_proj"],
        "transformer.layernorm_mlp.fc2_weight": ["mlp.down_proj"],
    }
    head = model.config.hidden_size // model.config.num_attention_heads
    found = {}
    for name, parameter in model.named_parameters():
        gradient, name = parameter.grad.numpy(), name.replace("llama.", "model.", 1)
        layer, transformer, rest = name.partition("transformer.")
        if transformer:
            names = stacked[transformer + rest]
            heads = [model.config.num_attention_heads] + 2 * [model.config.num_key_value_heads]
            cuts = np.cumsum([head * n for n in heads])[:-1] if len(names) == 3 else len(names)
            parts = np.split(gradient, cuts) if len(names) > 1 else [gradient]
            found |= {f"{layer}{part}.weight": value for part, value in zip(names, parts, strict=True)}
        else:
            found[name] = gradient.T if "_proj" in name else gradient
    return found


def test_mistrals_window_is_transformers(tmp_path, seed):
    """PaddleNLP's own Mistral has none."""
    tokens = np.random.randint(0, 128, (2, 40))
    np.save(tmp_path / "tokens.npy", tokens)
    options = json.dumps(MISTRAL | dict(sliding_window=9))
    hf(MAKE, tmp_path / "hf", seed, "float32", "1GB", options)
    hf(LOGITS, tmp_path / "tokens.npy", tmp_path / "hf")
    expected, logits = np.load(tmp_path / "hf_logits.npy"), []
    for backend, window in (("paddle", 9), ("none", None)):
        with paddle.no_grad():
            out = load_model(tmp_path / "hf", backend, sliding_window=window)(paddle.to_tensor(tokens))
        logits.append((out[0] if isinstance(out, tuple) else out).numpy())
    errors = [np.abs(each - expected).max() / np.abs(expected).max() for each in logits]
    assert errors[0] <= 1e-5 and errors[1] > 1e-3


DYNAMIC = dict(rope_type="dynamic", factor=2.0, rope_theta=10000.0)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=30, rope_theta=10000.0)


@pytest.mark.parametrize("family, scaling, backend", [
    ("llama", DYNAMIC, "none"), ("llama", DYNAMIC, "paddle"), ("llama", YARN, "paddle"), ("qwen2", YARN, "paddle"),
    ("mistral", YARN, "paddle")
])  # fmt: skip
def test_positions_of_long_contexts_are_transformers(tmp_path, seed, family, scaling, backend):
    np.save(tmp_path / "tokens.npy", np.random.randint(0, 128, (2, 120)))
    length = 30 if scaling is DYNAMIC else 120
    options = dict(model_type=family, max_position_embeddings=length, rope_parameters=scaling, sliding_window=None)
    hf(MAKE, tmp_path / "hf", seed, "float32", "1GB", json.dumps(options))
    hf(LOGITS, tmp_path / "tokens.npy", tmp_path / "hf")
    expected = np.load(tmp_path / "hf_logits.npy")
    with paddle.no_grad():
        out = load_model(tmp_path / "hf", backend)(paddle.to_tensor(np.load(tmp_path / "tokens.npy")))
    logits = (out[0] if isinstance(out, tuple) else out).numpy()
    assert np.abs(logits - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("backend", ["none", "paddle"])
def test_llama32_has_transformers_gradients(tmp_path, seed, backend):
    tokens = np.random.randint(0, 128, (2, 49))
    np.save(tmp_path / "tokens.npy", tokens)
    hf(MAKE, tmp_path / "hf", seed, "float32", "1GB", json.dumps(LLAMA32))
    hf(GRADIENTS, tmp_path / "tokens.npy", tmp_path / "hf")
    want = dict(np.load(tmp_path / "hf_gradients.npz"))
    model = load_model(tmp_path / "hf", backend)
    model.train()
    loss = model(paddle.to_tensor(tokens[:, :-1]), labels=paddle.to_tensor(tokens[:, 1:]))[0]
    loss.backward()
    assert loss.item() == pytest.approx(float(want.pop("loss")), rel=1e-6)
    got = hf_gradients(model)
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        error = np.linalg.norm(got[name] - gradient) / np.linalg.norm(gradient)
        assert error < 2e-5, (name, error)


def test_llama32_generates_transformers_tokens(tmp_path, seed):
    hf(MAKE, tmp_path / "hf", seed, "float32", "1GB", json.dumps(LLAMA32 | dict(initializer_range=0.3)))
    np.save(tmp_path / "tokens.npy", np.random.randint(3, 128, (2, 7)))
    hf(GENERATE, tmp_path / "tokens.npy", tmp_path / "hf")
    want = np.load(tmp_path / "hf_tokens.npy")
    assert len(np.unique(want)) > 4
    for backend in ("none", "paddle"):
        model = load_model(tmp_path / "hf", backend)
        batch = left_padded(np.load(tmp_path / "tokens.npy").tolist())
        got = model.generate(
            **batch, max_new_tokens=30, decode_strategy="greedy_search", eos_token_id=1000, pad_token_id=0
        )
        assert (got[0].numpy() == want).all(), backend


def hf_bits(folder: Path):
    from safetensors.numpy import load_file

    return {
        name: (tensor.dtype.name, tensor.shape, tensor.tobytes())
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
