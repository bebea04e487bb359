"""LoRA adapters against PEFT's own, in a process of its own: merging as merge_and_unload does, and the logits of ours.

PADDLE_TE_HF_PYTHON names a Python that has torch, transformers and peft; without it this one is tried.
"""

import json
import os
import subprocess
import sys

import numpy as np
import paddle
import pytest
from safetensors.numpy import load_file

from paddle_te.hosts.paddlenlp.loading import load_model
from paddle_te.hosts.paddlenlp.lora import lora_config, lora_model_class
from paddle_te.options.lora import Adapter
from paddle_te.weights import convert
from paddle_te.weights.adapters.peft import convert_adapter
from tests.small_checkpoints import save_models
from tests.unit.hosts.paddlenlp.native import draw_adapters

PYTHON = os.environ.get("PADDLE_TE_HF_PYTHON", sys.executable)


def missing():
    probe = subprocess.run(
        [PYTHON, "-c", "import torch, transformers, peft"], capture_output=True, text=True, check=False
    )
    return probe.stderr.strip().splitlines()[-1] if probe.returncode else None


pytestmark = pytest.mark.skipif(
    bool(REASON := missing()), reason=f"{PYTHON} lacks torch, transformers or peft ({REASON}); see PADDLE_TE_HF_PYTHON"
)

# cases: {name: (model_type, LoraConfig's arguments)}
MERGE = """
import json, sys, torch, transformers, peft
folder, seed, cases = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
torch.manual_seed(seed)
sizes = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, tie_word_embeddings=False, sliding_window=None, initializer_range=0.2)
for name, (kind, settings) in cases.items():
    own = sizes if kind != "gpt2" else dict(vocab_size=96, n_embd=32, n_layer=3, n_head=4)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **own))
    for key, parameter in model.named_parameters():
        if key.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(f"{folder}/{name}/base")
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    for key, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(f"{folder}/{name}/adapter")
    model.merge_and_unload().save_pretrained(f"{folder}/{name}/merged")
"""
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES = {
    "llama": ("llama", dict(r=4, lora_alpha=16, target_modules=ALL, use_rslora=True)),
    "qwen2": ("qwen2", dict(r=3, lora_alpha=7, target_modules=["q_proj", "v_proj"], bias="all")),
    "mistral": ("mistral", dict(r=4, target_modules="all-linear")),
    "gpt": ("gpt2", dict(r=3, target_modules=["c_attn", "c_proj", "c_fc"])),
    "layers": ("llama", dict(target_modules=ALL, layers_to_transform=[0, 2], exclude_modules=["layers.2.mlp.up_proj"])),
    "patterns": (
        "llama",
        dict(
            r=3,
            target_modules=r".*\.(self_attn\.[qv]|mlp\.down)_proj",
            rank_pattern={"q_proj": 5, r"layers\.1\.mlp\.down_proj": 2},
            alpha_pattern={"v_proj": 11},
        ),
    ),
    "outside": ("llama", dict(r=3, target_modules=["q_proj", "embed_tokens", "lm_head"])),
    "saved": ("llama", dict(r=3, target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens", "norm"])),
}


def in_peft(code, *arguments):
    subprocess.run([PYTHON, "-c", code, *map(str, arguments)], check=True, capture_output=True)


def test_merging_is_merge_and_unload(tmp_path, seed):
    in_peft(MERGE, tmp_path, seed, json.dumps(CASES))
    for name in CASES:
        place = tmp_path / name
        convert(place / "base", place / "ours", lora_path=place / "adapter", progress=False)
        ours, want, base = (load_file(place / which / "model.safetensors") for which in ("ours", "merged", "base"))
        assert ours.keys() == want.keys()
        for key, value in want.items():
            np.testing.assert_allclose(ours[key], value, rtol=1e-6, atol=1e-6, err_msg=f"{name}: {key}")
            assert (ours[key] != base[key]).any() == (value != base[key]).any(), f"{name}: {key}"


LOGITS = """
import sys, numpy, torch, transformers, peft
folder, kinds = sys.argv[1], sys.argv[2:]
ids = torch.from_numpy(numpy.load(f"{folder}/ids.npy"))
for kind in kinds:
    model = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/{kind}/hf", torch_dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, f"{folder}/{kind}/peft").eval()
    with torch.no_grad():
        numpy.save(f"{folder}/{kind}/theirs.npy", model(ids).logits.numpy())
"""


def test_peft_computes_what_ours_does(tmp_path, seed):
    """GPT-2's c_attn has the three A's of q, k and v in one."""
    paddle.seed(seed)
    ids = paddle.randint(0, 400, [2, 16])
    np.save(tmp_path / "ids.npy", ids.numpy())
    kinds = dict(llama=("paddle", "all", True), qwen2=("none", "attention", False), gpt=("paddle", "all", False))
    for kind, (backend, targets, rslora) in kinds.items():
        place = tmp_path / kind
        place.mkdir()
        save_models(place, seed, family=kind)
        lora = lora_model_class(backend)(
            load_model(place / backend, backend), lora_config(Adapter(targets=targets, rank=4, alpha=8, rslora=rslora))
        )
        draw_adapters(lora)
        np.save(place / "ours.npy", lora(ids)[0].numpy())
        lora.save_pretrained(str(place / "adapter"))
        convert_adapter(place / "adapter", place / "peft", "te2hf" if backend == "paddle" else "pd2hf")
    in_peft(LOGITS, tmp_path, *kinds)
    for kind in kinds:
        ours, theirs = (np.load(tmp_path / kind / f"{whose}.npy") for whose in ("ours", "theirs"))
        np.testing.assert_allclose(theirs, ours, atol=1e-5 * np.abs(ours).max())
