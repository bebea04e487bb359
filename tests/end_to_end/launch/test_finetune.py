"""llama_finetune.sh, the real script: commands, errors, and a run."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paddle_te.launch.finetune import ARGUMENTS
from tests import processes
from tests.small_checkpoints import save_models, save_tokenizer, write_lines

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "llm/llama/scripts/llama_finetune.sh"
FOLDERS = dict(model_name="paddle", tokenizer_name="tokenizer", dataset="data", output="out")
NAMES = [option.name for option in ARGUMENTS]


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


def command(place, environ=(), **arguments):
    """The script's words, and its environment."""
    unknown = set(arguments) - set(NAMES)
    assert not unknown, unknown
    defaults = {name: place / folder for name, folder in FOLDERS.items()}
    defaults |= dict(backend="pd", precision="fp32", max_seqlen=64)
    words = [str((defaults | arguments).get(name, "")) for name in NAMES]
    keep = {name: value for name, value in os.environ.items() if name not in ("DEVICE", "DEVICES", "DRY_RUN")}
    return ["bash", SCRIPT, *words], keep | dict(PYTHON=sys.executable, DEVICE="cpu") | dict(environ)


def script(place, environ=(), **arguments):
    """The script's finished process."""
    words, environ = command(place, environ, **arguments)
    return processes.run(words, env=environ)


def flags(place, environ=(), **arguments):
    """The flags of a dry run, {name: value}, and the command before them."""
    process = script(place, dict(DRY_RUN="1") | dict(environ), **arguments)
    assert process.returncode == 0, process.stderr
    words = shlex.split(process.stdout)
    first = next(i for i, word in enumerate(words) if word.endswith("run_finetune.py"))
    rest = words[first + 1 :]
    return dict(zip(rest[::2], rest[1::2], strict=True)), words[words.index(sys.executable) : first + 1]


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
        "--do_eval": "1",
        "--max_length": "64",
        "--tensor_parallel_degree": "1",
    }
    assert want.items() <= got.items()
    assert (got["--bf16"], got["--recompute"], got["--output_dir"]) == ("0", "0", str(place / "out"))
    assert not {"--use_fp8", "--sharding", "--max_steps", "--resume_from_checkpoint"} & set(got)


def test_every_argument(place):
    got, command = flags(
        place,
        dict(DEVICE="gpu", DEVICES="0,1,2,3,4,5,6,7", EXTRA_ARGS="--max_steps 7 --seed 3"),
        **dict(method="lora-mlp", batch_size_per_device=3, FSDP=2, TP=2, GA=5, SP="true", sharding_stage="stage2"),
        **dict(backend="te", precision="bf16", recompute="core_attn"),
    )
    assert command[1:6] == ["-u", "-m", "paddle.distributed.launch", "--devices", "0,1,2,3,4,5,6,7"]
    assert command[-3:-1] == ["--log_dir", str(place / "out/logs")]
    want = {
        "--lora_targets": "mlp",
        "--per_device_train_batch_size": "3",
        "--sharding_parallel_degree": "2",
        "--sharding": "stage2",
        "--tensor_parallel_degree": "2",
        "--gradient_accumulation_steps": "5",
        "--sequence_parallel": "1",
        "--pad_to_max_length": "1",
        "--transformer_engine_backend": "transformer_engine",
        "--bf16": "1",
        "--fp16_opt_level": "O2",
        "--recompute_granularity": "core_attn",
        "--max_steps": "7",
        "--seed": "3",
    }
    assert want.items() <= got.items()
    assert "--lora" not in flags(place, method="full")[0]
    emulated = flags(place, precision="fp8")[0]
    assert (emulated["--use_fp8"], emulated["--bf16"]) == ("1", "0"), "a CPU has no bf16"


@pytest.mark.parametrize(
    "arguments, environ, message",
    [
        (dict(model_name="nowhere"), {}, "model_name: there is no folder 'nowhere'"),
        (dict(model_name=""), {}, "model_name: '' must be a path, and is empty"),
        (dict(model_name="llama-125m"), {}, "model_name: there is no folder 'llama-125m'"),  # no weights
        (dict(tokenizer_name="nowhere"), {}, "tokenizer_name: 'nowhere'"),
        (dict(dataset="nowhere"), {}, "nowhere: no such file or folder"),
        (dict(dataset=""), {}, "dataset: give a folder"),
        ({}, dict(CHAT_TEMPLATE="nowhere"), "nowhere: cannot be read"),
        (dict(output=""), {}, "output: give a folder"),
        (dict(method="qlora"), {}, "method: 'qlora' must be one of full, lora, lora-attention, lora-mlp"),
        (dict(resume_step=7), {}, "resume_step=7: checkpoint"),
    ],
)
def test_each_wrong_argument_is_one_line(place, arguments, environ, message):
    """Those that fine-tuning has in common with pretraining: tests/unit/launch/test_plan.py."""
    process = script(place, environ, **arguments)
    assert process.returncode == 2 and not process.stdout
    assert message in process.stderr and process.stderr.count("\n") == 1, process.stderr


def test_a_second_run_goes_on_or_is_refused(place, tmp_path):
    """Nothing is overwritten unasked."""
    folder = tmp_path / "checkpoint-20"
    folder.mkdir()
    (folder / ".checkpoint_done").touch()
    assert flags(place, output=tmp_path, resume_step="auto")[0]["--resume_from_checkpoint"] == "auto"
    assert flags(place, output=tmp_path, resume_step=20)[0]["--resume_from_checkpoint"] == str(folder)
    assert "--resume_from_checkpoint" not in flags(place, dict(OVERWRITE="1"), output=tmp_path)[0]
    process = script(place, output=tmp_path)
    assert process.returncode == 2 and "(steps 20); resume with auto or a step, set another output" in process.stderr


def test_a_signal_saves_and_stops_and_auto_goes_on(place, tmp_path):
    """A model is there only at the end."""
    log, more = tmp_path / "train_log.jsonl", dict(EXTRA_ARGS="--save_steps 300 --report_to none --disable_tqdm true")
    words, environ = command(place, dict(MAX_STEPS="300", **more), output=tmp_path)
    job = subprocess.Popen(words, env=environ)
    while job.poll() is None and not (log.exists() and log.read_text()):
        time.sleep(0.1)
    job.send_signal(signal.SIGUSR1)
    assert processes.end(job, timeout=500) == 0
    step = int((tmp_path / "stopped").read_text())
    assert 0 < step < 300 and (tmp_path / f"checkpoint-{step}/.checkpoint_done").is_file()
    assert not (tmp_path / "lora_model_state.pdparams").exists()
    job = script(place, dict(MAX_STEPS=str(step + 2), **more), output=tmp_path, resume_step="auto")
    assert job.returncode == 0 and (tmp_path / "lora_model_state.pdparams").is_file(), job.stderr
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, step + 3))
    assert records[-1]["loss"] < records[0]["loss"]


def test_help_names_every_argument():
    text = subprocess.run(["bash", SCRIPT, "--help"], capture_output=True, text=True, check=True).stdout
    assert all(name in text for name in NAMES) and "DRY_RUN" in text and "set -euo" not in text
    process = subprocess.run(["bash", SCRIPT, *["x"] * 18], capture_output=True, text=True, check=False)
    assert process.returncode == 2 and "too many" in process.stderr


def test_a_job_that_fails_says_why_on_the_screen(place):
    """Of several processes, whose output goes to files; what ends them all is test_launcher.py's."""
    damaged = place / "damaged.json"  # behind the records that the launcher reads
    write_lines(damaged, [{"src": "what is a list", "tgt": "a sequence"}] * 100 + [{"src": "what is a list"}])
    process = script(place, dict(DEVICES="0,1"), dataset=damaged, output=place / "failed")
    assert process.returncode == 2
    assert 'damaged.json:101: "src" has' in process.stderr and "[rank " in process.stderr
    assert "no process is left; logs: " in process.stderr
