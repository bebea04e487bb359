"""llama_finetune.sh, the real script: commands, errors, and a run."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.small import save_models, save_tokenizer, write_lines

SCRIPT = Path(__file__).parents[2] / "llm/llama/scripts/llama_finetune.sh"
NAMES = (
    "model tokenizer dataset output method batch_size_per_device FSDP TP GA SP max_seqlen sharding_stage backend "
    "precision recompute"
).split()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finetune script")  # with a space
    save_models(folder, seed=3, initializer_range=0.05)
    (folder / "tokenizer").mkdir()
    save_tokenizer(folder / "tokenizer")
    (folder / "data").mkdir()
    for name in ("train.json", "dev.json"):
        write_lines(folder / "data" / name, [{"src": "what is a list", "tgt": "a sequence"}] * 4)
    return folder


def script(place, environ=(), **arguments):
    """The script's finished process."""
    unknown = set(arguments) - set(NAMES)
    assert not unknown, unknown
    defaults = dict(model=place / "paddle", tokenizer=place / "tokenizer", dataset=place / "data", backend="pd")
    defaults |= dict(output=place / "out", precision="fp32", max_seqlen=64)
    words = [str((defaults | arguments).get(name, "")) for name in NAMES]
    keep = {name: value for name, value in os.environ.items() if name not in ("DEVICE", "DEVICES", "DRY_RUN")}
    environ = keep | dict(PYTHON=sys.executable, DEVICE="cpu") | dict(environ)
    return subprocess.run(["bash", SCRIPT, *words], capture_output=True, text=True, env=environ, check=False)


def flags(place, environ=(), **arguments):
    """The flags of a dry run, {name: value}, and the words before them."""
    process = script(place, dict(DRY_RUN="1") | dict(environ), **arguments)
    assert process.returncode == 0, process.stderr
    words = shlex.split(process.stdout)
    first = next(i for i, word in enumerate(words) if word.endswith("run_finetune.py"))
    rest = words[first + 1 :]
    return dict(zip(rest[::2], rest[1::2], strict=True)), words[: first + 1]


def test_defaults(place):
    got, command = flags(place)
    assert command == [sys.executable, "-u", str(SCRIPT.parents[1] / "run_finetune.py")]
    want = {
        "--model_name_or_path": str(place / "paddle"),
        "--dataset_name_or_path": str(place / "data"),
        "--lora": "true",
        "--lora_targets": "all",
        "--transformer_engine_backend": "paddle",
        "--device": "cpu",
        "--do_eval": "true",
        "--max_length": "64",
        "--tensor_parallel_degree": "1",
    }
    assert want.items() <= got.items()
    assert not {"--bf16", "--use_fp8", "--sharding", "--recompute"} & set(got)


def test_every_argument(place):
    got, command = flags(
        place,
        dict(DEVICE="gpu", DEVICES="0,1,2,3,4,5,6,7", EXTRA_ARGS="--max_steps 7 --seed 3"),
        **dict(method="lora-mlp", batch_size_per_device=3, FSDP=2, TP=4, GA=5, SP="true", sharding_stage="stage3"),
        **dict(backend="te", precision="fp8", recompute="core_attn"),
    )
    assert command[2:6] == ["-m", "paddle.distributed.launch", "--log_dir", str(place / "out/logs")]
    assert command[6:8] == ["--devices", "0,1,2,3,4,5,6,7"]
    want = {
        "--lora_targets": "mlp",
        "--per_device_train_batch_size": "3",
        "--sharding_parallel_degree": "2",
        "--sharding": "stage3",
        "--tensor_parallel_degree": "4",
        "--gradient_accumulation_steps": "5",
        "--sequence_parallel": "true",
        "--pad_to_max_length": "true",
        "--transformer_engine_backend": "transformer_engine",
        "--use_fp8": "true",
        "--bf16": "true",
        "--fp16_opt_level": "O2",
        "--recompute_granularity": "core_attn",
        "--max_steps": "7",
        "--seed": "3",
    }
    assert want.items() <= got.items()
    assert "--lora" not in flags(place, method="full")[0]


@pytest.mark.parametrize(
    "arguments, environ, message",
    [
        (dict(model="nowhere"), {}, "model: 'nowhere'"),
        (dict(model="--model"), {}, "'--model': arguments go by position"),
        (dict(tokenizer="nowhere"), {}, "tokenizer: 'nowhere'"),
        (dict(dataset="nowhere"), {}, "dataset: 'nowhere'"),
        (dict(output=""), {}, "output"),
        (dict(method="qlora"), {}, "must be one of full lora lora-attention lora-mlp"),
        (dict(batch_size_per_device=0), {}, "batch_size_per_device: '0'"),
        (dict(FSDP="x"), {}, "FSDP: 'x'"),
        (dict(TP=3), {}, "TP, FSDP: 3·1"),
        (dict(GA=-1), {}, "GA: '-1'"),
        (dict(SP="yes"), {}, "SP: 'yes'"),
        (dict(SP="true"), {}, "SP: sequence parallelism needs TP"),
        (dict(max_seqlen=100), {}, "max_seqlen: '100'"),
        (dict(sharding_stage=2), {}, "sharding_stage: '2'"),
        (dict(backend="paddle"), {}, "backend: 'paddle'"),
        (dict(precision="int8"), {}, "precision: 'int8'"),
        (dict(precision="fp8", backend="none"), {}, "precision: fp8 needs"),
        (dict(precision="bf16"), {}, "precision: a CPU"),
        (dict(recompute="some"), {}, "recompute: 'some'"),
        ({}, dict(DEVICE="gpu", DEVICES="77"), "DEVICES"),
    ],
)
def test_each_wrong_argument_is_one_line(place, arguments, environ, message):
    process = script(place, environ, **arguments)
    assert process.returncode == 2 and not process.stdout
    assert message in process.stderr and process.stderr.count("\n") == 1, process.stderr


def test_help_names_every_argument():
    text = subprocess.run(["bash", SCRIPT, "--help"], capture_output=True, text=True, check=True).stdout
    assert all(name in text for name in NAMES) and "DRY_RUN" in text and "set -euo" not in text
    process = subprocess.run(["bash", SCRIPT, *["x"] * 16], capture_output=True, text=True, check=False)
    assert process.returncode == 2 and "too many" in process.stderr


def test_it_trains(place):
    process = script(place, dict(EXTRA_ARGS="--max_steps 3 --report_to none --disable_tqdm true"))
    assert process.returncode == 0, process.stderr[-3000:]
    losses = [json.loads(line)["loss"] for line in (place / "out/train_log.jsonl").read_text().splitlines()]
    assert len(losses) == 3 and losses[2] < losses[0]
    assert (place / "out/lora_model_state.pdparams").is_file()


def test_one_of_the_visible_devices(place):
    """Paddle counts among the visible ones."""
    environ = dict(DEVICE="gpu", DEVICES="3", CUDA_VISIBLE_DEVICES="2,3")
    _, command = flags(place, environ, backend="none", precision="bf16")
    assert command[:2] == ["env", "FLAGS_selected_gpus=1"]


def test_a_job_that_fails_says_why_on_the_screen(place):
    """Of several processes, whose output goes to files; what ends them all is test_launcher.py's."""
    empty = place / "empty"
    empty.mkdir()
    (empty / "train.json").touch()
    process = script(place, dict(DEVICES="0,1"), dataset=empty, output=place / "failed")
    assert process.returncode == 2
    assert "has no records" in process.stderr and "[rank " in process.stderr
    assert "no process is left; logs: " in process.stderr
