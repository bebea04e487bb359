"""Every command of docs/get-started/from-node-to-hub.md, in order, in one shell.

The test has tiny models, few steps, two processes on nvgpu's host runtime, and stand-ins for Slurm
(tests/fake_slurm.py) and for transfers (tests/fake_hub.py)."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from paddle_te.data.tokenizer import load_tokenizer
from tests import chats, fake_hub, fake_slurm, small_checkpoints, small_tokenizers
from tests.processes import run

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/get-started/from-node-to-hub.md"
UNTESTED = r"<!-- not tested here: [^\n]* -->\n"
# What is smaller in the test: (pattern, what it becomes)
SIZES = [
    (r"MODEL_NAME=meta-llama/Meta-Llama-3-8B", "MODEL_NAME=tiny-llama-demo"),
    (r"\bFSDP_SIZE=8", "FSDP_SIZE=2"),
    (r"\bGA_SIZE=\d+", "GA_SIZE=1"),
    (r"\bMAX_SEQLEN=\d+", "MAX_SEQLEN=64"),
    (r"\bMAX_STEPS=1000", "MAX_STEPS=2"),
    (r"\bMAX_STEPS=2000", "MAX_STEPS=4"),
    (r"\bSAVE_STEPS=500", "SAVE_STEPS=2"),
    (r"\bMAX_STEPS=500", "MAX_STEPS=3"),
    (r"checkpoint-2000", "checkpoint-4"),
    (r"--transformer_engine_backend transformer_engine", "--transformer_engine_backend paddle"),
    (r"--max_seq_length 4096", "--max_seq_length 64"),
    (r"--max_new_tokens 64", "--max_new_tokens 8"),
    (r"\bBACKEND=te", "BACKEND=pd"),
    (r"\.sub 8", ".sub 2"),
]
PYTHON = os.environ.get("PADDLE_TE_HF_PYTHON", sys.executable)  # one that has torch and transformers
ADAPTER = "adapter_model.safetensors"
PRETRAINED, REACHED = "llama3-8b", 4


def missing():
    """Why transformers cannot be compared with; "" when it can."""
    found = run([PYTHON, "-c", "import torch, transformers"])
    return found.stderr.strip().splitlines()[-1] if found.returncode else ""


def blocks():
    """(commands, commands marked as not tested)."""
    found = re.findall(rf"({UNTESTED})?```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return [block for mark, block in found if not mark], [block for mark, block in found if mark]


def commands(shared):
    """The page's, at the test's size."""
    text = "".join(blocks()[0])
    for pattern, small in SIZES:
        assert re.search(pattern, text), f"the page has no {pattern}"
        text = re.sub(pattern, small, text)
    assert text.count("/shared") == 1
    return text.replace("/shared", str(shared))


def make_hub(hub):
    """What the page downloads: a tokenizer like Llama 3's, and a small Qwen2 with a chat template."""
    small_tokenizers.write(hub / "meta-llama/Meta-Llama-3-8B", small_tokenizers.folders()["llama3"])
    qwen = hub / "Qwen/Qwen2.5-7B"
    qwen.parent.mkdir(parents=True)
    made = small_checkpoints.save_models(hub.parent / "made", 3, family="qwen2")
    shutil.copytree(made["hf"], qwen)
    chats.save_tokenizer(qwen, chats.PLAIN["chatml"])


@pytest.fixture(scope="module")
def walked(tmp_path_factory, warm_host):
    """(folder that all nodes see, hub, what the commands printed)."""
    place = tmp_path_factory.mktemp("road")
    shared = place / "shared"
    (shared / "texts").mkdir(parents=True)
    lines = [{"text": "the hello world in the world or " * 20}] * 40
    small_checkpoints.write_lines(shared / "texts/a.jsonl", lines)
    make_hub(place / "hub")
    command_line, variables = fake_hub.install(place)
    environment = fake_slurm.install(place) | warm_host | variables | dict(DEVICE="nvgpu", OMP_NUM_THREADS="1")
    own = os.pathsep.join([str(command_line), str(Path(sys.executable).parent), environment["PATH"]])
    # a job's variables are its own, so that nothing warm would be used twice
    prelude = 'set -euo pipefail\nsbatch() { env -u WARM_STARTS sbatch --output="$FAKE_SLURM/job.out" "$@"; }\n'
    done = run(["bash", "-c", prelude + commands(shared)], cwd=ROOT, env=environment | dict(PATH=own), check=True)
    return shared, place / "hub", done.stdout


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "train_log.jsonl").read_text().splitlines()]


def test_what_is_left_out_is_said():
    tested, untested = blocks()
    assert len(tested) >= 13 and len(untested) == 1


def test_the_machine_and_the_plan(walked):
    _, _, printed = walked
    assert "Backends, training on nvgpu" in printed and "TransformerLayer, pd in float32" in printed
    assert "paddle-te pretrain --model_name=meta-llama/Meta-Llama-3-8B" in printed


def test_the_data(walked):
    shared, _, _ = walked
    counts = json.loads((shared / "corpus/texts.json").read_text())
    tokenizer = load_tokenizer(shared / "Meta-Llama-3-8B")
    assert counts["documents"] == 40 and counts["eos_token_id"] == tokenizer.eos_token_id


def test_pretraining_goes_on(walked):
    shared, _, printed = walked
    output = shared / "outputs" / PRETRAINED / "output"
    found = losses(output)
    assert len(found) == REACHED and found[-1] < found[0]
    assert f"step {REACHED // 2}/{REACHED // 2}: loss" in printed and "good" in printed


def test_an_adapter_is_tuned_and_tried(walked):
    shared, _, printed = walked
    output = shared / "outputs/qwen2.5-chats/output"
    assert len(losses(output)) == 3 and (output / "lora_config.json").is_file()
    assert "perplexity: loss" in printed and "How does a run go on? ▸" in printed


@pytest.mark.parametrize("name", ["qwen2.5-chats", "llama3-8b"])
def test_models_are_on_the_hub(walked, name):
    uploaded = {path.name for path in (walked[1] / "NAME" / name).iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= uploaded


def test_the_adapter_is_in_the_merged_model_and_in_pefts_folder(walked):
    """W + B A · alpha / rank, of the first layer's q."""
    shared, hub, _ = walked
    base, merged = (
        load_file(folder / "model.safetensors") for folder in (shared / "Qwen2.5-7B", hub / "NAME/qwen2.5-chats")
    )
    adapter = hub / "NAME/qwen2.5-chats-adapter"
    config, weights = json.loads((adapter / "adapter_config.json").read_text()), load_file(adapter / ADAPTER)
    name = "model.layers.0.self_attn.q_proj"
    a, b = (weights[f"base_model.model.{name}.lora_{part}.weight"].astype("float64") for part in "AB")
    assert config["r"] == 16 and np.abs(b).max() > 0
    want = base[f"{name}.weight"] + b @ a * config["lora_alpha"] / config["r"]
    assert np.abs(merged[f"{name}.weight"] - want).max() <= 2**-8 * np.abs(want).max()


@pytest.mark.skipif(bool(REASON := missing()), reason=f"{PYTHON} lacks torch or transformers ({REASON})")
def test_transformers_loads_it(walked):
    _, hub, _ = walked
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    done = run([PYTHON, "-c", code], cwd=hub, env=os.environ | dict(HF_HUB_OFFLINE="1"), check=True)
    assert "<|im_start|>user\nHow does a run go on?<|im_end|>\n<|im_start|>assistant\n" in done.stdout
