"""Against transformers' own LlamaForCausalLM, in a process of its own.

PADDLE_TE_HF_PYTHON names a Python that has torch and transformers; without it this one is tried.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest
from paddlenlp.transformers import LlamaConfig, LlamaForCausalLM

from paddle_te.checkpoint import convert
from paddle_te.llama import model_class
from paddle_te.llama.loading import load_model

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
config = transformers.LlamaConfig(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.1, **options)
model = transformers.LlamaForCausalLM(config)
for name, parameter in model.named_parameters():
    if "norm" in name:
        torch.nn.init.normal_(parameter, 1.0, 0.1)
model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard)
"""

LOGITS = """
import sys, numpy, torch, transformers
tokens, *folders = sys.argv[1:]
for folder in folders:
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        numpy.save(folder + "_logits.npy", model(torch.from_numpy(numpy.load(tokens))).logits.numpy())
"""


def hf(code, *arguments):
    subprocess.run([PYTHON, "-c", code, *map(str, arguments)], check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})


LLAMA3 = (
    '{"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,'
    ' "high_freq_factor": 4.0, "original_max_position_embeddings": 16}}'
)


@pytest.mark.parametrize(
    "dtype, options", [("float32", "{}"), ("bfloat16", LLAMA3), ("float32", '{"tie_word_embeddings": true}')]
)
def test_same_logits_and_bits(tmp_path, seed, dtype, options):
    tokens = np.random.randint(0, 128, (2, 40))
    np.save(tmp_path / "tokens.npy", tokens)
    hf(MAKE + LOGITS.replace("sys.argv[1:]", "sys.argv[6:]"), tmp_path / "hf", seed, dtype, "60KB", options,
       tmp_path / "tokens.npy", tmp_path / "hf")  # fmt: skip
    expected = np.load(tmp_path / "hf_logits.npy")
    scale = np.abs(expected).max()

    for layout, backend in (("pd", "none"), ("te", "paddle")):
        convert(tmp_path / "hf", tmp_path / layout, f"hf2{layout}", progress=False)
        config = LlamaConfig.from_pretrained(str(tmp_path / layout))
        config.transformer_engine_backend = backend
        make = LlamaForCausalLM if backend == "none" else model_class(backend)
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


def hf_bits(folder: Path):
    from safetensors.numpy import load_file

    return {
        name: (tensor.dtype.name, tensor.shape, tensor.tobytes())
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
