"""The launcher with HOST=paddleformers, as a user starts it: what its runs do and leave, beside PaddleNLP's.

PADDLE_TE_PADDLENLP_PYTHON names a Python with PaddleNLP, as scripts/test.sh does; without it nothing is compared.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("paddleformers", reason="needs PaddleFormers: HOST=paddleformers bash scripts/test.sh")

from paddleformers.cli.train.sft.sft_trainer import SFTTrainer
from safetensors.numpy import load_file

from paddle_te.data.prepare import demo, prepare
from paddle_te.hosts.paddleformers import launched
from paddle_te.runs.checkpoints import complete_checkpoints
from paddle_te.runs.verify import main as verify
from tests.nvgpu_processes import build_host
from tests.paddleformers.llama import model_class, tiny_config

ROOT = Path(__file__).parents[2]
PADDLENLP = os.environ.get("PADDLE_TE_PADDLENLP_PYTHON")
VOCABULARY = 384  # 300 of the tokenizer, rounded up
STEPS = 4
OURS = re.compile(
    r"launch: the host is|\+ env |"
    r"\d\d:\d\d:\d\d (warning: warmup_steps 30 is more than the 4 steps|the messages of PaddleFormers|"
    r"training (steps|ended)|step \d+/\d+: |\S+ is complete$)"
)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A folder with a tokenizer as PaddleNLP has it, an indexed corpus, questions, and a model of Hugging Face's."""
    folder, generator = tmp_path_factory.mktemp("start"), np.random.default_rng(0)
    words = ["".join(generator.choice(list("abcdefghij"), 6)) for _ in range(100)]
    texts = [" ".join(generator.choice(words, 40)) for _ in range(40)]
    demo.train_tokenizer(texts, 300, folder / "tokenizer")
    demo.write_jsonl_gz(texts, folder / "texts.jsonl.gz")
    prepare([folder / "texts.jsonl.gz"], folder / "data/corpus", folder / "tokenizer", workers=1)
    (folder / "questions").mkdir()
    line = json.dumps({"src": texts[0][:40], "tgt": texts[1][:60]}) + "\n"
    for name in ("train", "dev"):
        (folder / f"questions/{name}.json").write_text(line * 16)  # all alike: the hosts shuffle differently
    config = tiny_config("none", vocab_size=VOCABULARY)
    model_class(config)(config).save_pretrained(str(folder / "model"))
    return folder


def launch(job, python=sys.executable, **arguments):
    """Runs a job; its output folder, and what it said."""
    words = [f"--{name}={value}" for name, value in arguments.items()]
    env = os.environ | dict(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", NVGPU_HOST_DEVICES="2")
    command = [python, "-m", "paddle_te.launch", job, *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return Path(arguments.get("OUTPUT_DIR") or arguments["output"]), done.stderr


def curve(folder, name):
    """{step: value} of a curve that the run gave to VisualDL."""
    from visualdl import LogReader

    (path,) = folder.rglob("vdlrecords.*.log")
    return {record.id: record.value for record in LogReader(file_path=str(path)).get_data("scalar", name)}


def check_speeds(folder, model):
    """The host's tracker has got speed, memory and TFLOP/s."""
    lines = [json.loads(line) for line in (folder / "train_log.jsonl").read_text().splitlines()]
    for name in ("tokens_per_second", "peak_memory_bytes"):
        logged = {line["step"]: line[name] for line in lines}
        # trackers get tokens/s to one decimal, and VisualDL keeps float32
        assert curve(folder, f"train/{name}") == pytest.approx(logged, rel=1e-6, abs=0.051)
    assert [*curve(folder, "train/model_tflops_per_device")] == [1, 2, 3, 4]
    check_flops(folder, model, 6)


def check_flops(folder, model, each):
    """TFLOP/s are those of the model's matrices, so many for a weight and a token, and of attention."""
    summary, config = (json.loads(path.read_text()) for path in (folder / "train_summary.json", model / "config.json"))
    arrays = {name: array for path in model.glob("*.safetensors") for name, array in load_file(path).items()}
    matrices = sum(array.size for name, array in arrays.items() if array.ndim == 2 and "embed_tokens" not in name)
    flops = each * matrices + 12 * config["num_hidden_layers"] * config["hidden_size"] * summary["seq_length"]
    assert summary["model_tflops_per_device"] == pytest.approx(summary["tokens_per_second"] * flops / 1e12)


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "train_log.jsonl").read_text().splitlines()]


def pretraining(start, **arguments):
    layout = dict(batch_size_per_device=2, FSDP=1, TP=1, GA=1, max_seqlen=32, backend="pd", precision="fp32")
    places = dict(model_name=start / "model", tokenizer_name=start / "tokenizer", DATA_PATH=start / "data")
    run = dict(DEVICE="cpu", MAX_STEPS=STEPS, SAVE_STEPS=STEPS // 2, LEARNING_RATE=1e-2, init_weight=start / "model")
    return places | layout | run | arguments


@pytest.fixture(scope="module")
def whole(start, tmp_path_factory):
    """A run in float32: its folder, and what the launcher said."""
    return launch("pretrain", **pretraining(start, OUTPUT_DIR=tmp_path_factory.mktemp("whole")))


def test_pretraining_and_resuming(start, whole, tmp_path, capsys):
    folder, said = whole
    assert "launch: the host is PaddleFormers (HOST=paddleformers, the one that is installed)\n" in said
    assert [line for line in said.splitlines() if not OURS.match(line)] == []
    whole = losses(folder)
    assert len({*whole}) == STEPS
    check_speeds(folder, start / "model")
    assert [step for step, _ in complete_checkpoints(folder)] == [2, 4]
    assert verify([str(folder)]) == 0 and "trainer_state.bin is a pickle" in capsys.readouterr().out
    resumed = tmp_path / "resumed"
    shutil.copytree(folder / "checkpoint-2", resumed / "checkpoint-2")
    (resumed / "checkpoint-3").mkdir()  # one that is not complete
    again = pretraining(start, OUTPUT_DIR=resumed, resume_step="auto", init_weight="none")
    assert losses(launch("pretrain", **again)[0]) == whole[2:]
    if PADDLENLP:
        theirs, _ = launch("pretrain", PADDLENLP, **pretraining(start, OUTPUT_DIR=tmp_path / "paddlenlp"))
        np.testing.assert_allclose(whole, losses(theirs), rtol=1e-5)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_fine_tuning(start, tmp_path, method):
    settings = dict(model_name=start / "model", tokenizer_name=start / "tokenizer", dataset=start / "questions")
    settings |= dict(method=method, batch_size_per_device=2, max_seqlen=64, backend="pd", precision="fp32")
    adapter = dict(rslora=True, lora_plus_scale=4.0, lora_alpha=4) if method == "lora" else {}
    extra = " ".join(f"--{name} {value}" for name, value in {"learning_rate": 0.01, **adapter}.items())
    settings |= dict(DEVICE="cpu", MAX_STEPS=STEPS, EXTRA_ARGS=extra)
    folder, _ = launch("finetune", **settings, output=tmp_path / method)  # and evaluates
    ours = losses(folder)
    assert len(ours) == STEPS and ours[-1] < ours[0]
    made = "peft_model.safetensors.index.json" if method == "lora" else "model.safetensors.index.json"
    assert (folder / made).is_file()
    if method == "lora":
        said = json.loads((folder / "lora_config.json").read_text())
        assert {name: said[name] for name in adapter} == adapter
    check_flops(folder, start / "model", 4 if method == "lora" else 6)
    if PADDLENLP:
        theirs = losses(launch("finetune", PADDLENLP, **settings, output=tmp_path / "paddlenlp")[0])
        alike = STEPS if method == "full" else 1  # the matrices A of LoRA are drawn
        np.testing.assert_allclose(ours[:alike], theirs[:alike], rtol=1e-5)


def test_random_tokens_stay_as_they_are(start):
    """PaddleFormers' Trainer would tokenize a data set that is not Paddle's."""
    training = SimpleNamespace(per_device_train_batch_size=2, gradient_accumulation_steps=1, dataset_world_size=1)
    training.max_steps, training.seed = STEPS, 3
    data, model = SimpleNamespace(max_seq_len=32), SimpleNamespace(model_name_or_path=start / "model")
    dataset, _, _, collate = launched._random_tokens(training, data, model)
    prepared = SFTTrainer._prepare_dataset(None, dataset, None, False, None, 32, None, None, None)
    assert prepared is dataset and collate([dataset[0], dataset[1]])["input_ids"].shape == (2, 32)


def test_two_processes_shard(start, whole, tmp_path, monkeypatch):
    """On nvgpu's host runtime, in fp8 with delayed scaling, which pd emulates, beside one process in float32."""
    monkeypatch.setenv("CUSTOM_DEVICE_ROOT", build_host())
    layout = dict(batch_size_per_device=1, FSDP=2, sharding_stage="stage1", precision="fp8")
    arguments = pretraining(start, DEVICE="nvgpu", DEVICES="0,1", OUTPUT_DIR=tmp_path / "run", **layout)
    folder, said = launch("pretrain", **arguments)
    assert "OVERLAP=auto: off, because it is not there in PaddleFormers yet" in said
    np.testing.assert_allclose(losses(folder), losses(whole[0]), rtol=0.02)
    assert (folder / "checkpoint-4/fp8_state.pp00.pdparams").is_file()
    assert [step for step, _ in complete_checkpoints(folder)] == [2, 4]
