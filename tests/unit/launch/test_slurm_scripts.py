"""The .sub files with a stand-in for Slurm: what the launcher is told. tests/multiprocess/cluster has the real one."""

import subprocess
import sys
from pathlib import Path

import pytest

from paddle_te.launch.paddleformers.start import two_tokens
from tests import fake_slurm

SCRIPTS = Path(__file__).resolve().parents[3] / "llm/llama/scripts"
DRY = dict(PYTHON=sys.executable, DRY_RUN="1", DEVICE="gpu", GPUS_PER_NODE="8")


@pytest.fixture
def slurm(tmp_path):
    """submit(script, **settings) -> (status, what the job and its node printed)."""
    environ = fake_slurm.install(tmp_path)

    def submit(script, *options, **settings):
        out = tmp_path / "out"
        done = subprocess.run(
            ["sbatch", "-A", "account", *options, SCRIPTS / script],
            env=environ | DRY | dict(OUTPUT_BASE=str(out)) | settings,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        printed = [*tmp_path.glob("slurm-*.out"), *out.rglob("output-0.txt")]
        return done.returncode, "\n".join(path.read_text() for path in printed)

    return submit


@pytest.fixture
def folders(tmp_path):
    """A model and chats to fine-tune it on, as far as the launcher looks at them."""
    model, data = tmp_path / "model", tmp_path / "chats"
    for folder in (model, data):
        folder.mkdir()
    (model / "config.json").write_text((SCRIPTS.parents[2] / "paddle_te/configs/llama-125m/config.json").read_text())
    (model / "model.safetensors").touch()
    (model / "tokenizer.json").write_text(two_tokens()["tokenizer.json"])
    (data / "train.json").write_text('{"src": "a", "tgt": "b"}\n')
    return dict(MODEL_NAME=str(model), DATASET=str(data))


def test_fine_tuning(slurm, folders, tmp_path):
    status, text = slurm("llama_finetune.sub", "-N1", FSDP_SIZE="8", MBS="1", PREC="fp8", METHOD="lora-mlp", **folders)
    assert status == 0, text
    name = "model_lora-mlp_SEQLEN2048_N1_MBS1_DP1_TP1_GA1_FSDP8_PP1_SPfalse_none_te_fp8_4711"
    for words in (
        f"--model_name_or_path {folders['MODEL_NAME']} --tokenizer_name_or_path {folders['MODEL_NAME']} ",
        f"--dataset_name_or_path {folders['DATASET']} --output_dir {tmp_path}/out/{name}/output ",
        "--lora_targets mlp",
        "--sharding_parallel_degree 8",
        "--use_fp8 1",
        "--devices 0,1,2,3,4,5,6,7 --host 127.0.0.1",
    ):
        assert words in text, text


def test_tuning_on_preferences(slurm, folders):
    (Path(folders["DATASET"]) / "train.json").write_text('{"prompt": "a", "chosen": "b", "rejected": "a"}\n')
    status, text = slurm("llama_finetune.sub", "-N1", TASK="dpo", **folders)
    assert status == 0 and "run_dpo.py" in text and "--max_seq_len 2048 " in text, text
    assert "--per_device_train_batch_size 1 " in text, text
    layout = dict(PP_SIZE="2", GA_SIZE="2", SHARDING_STAGE="stage1")
    status, text = slurm("llama_finetune.sub", "-N1", TASK="dpo", **layout, **folders)
    assert status == 0 and "--pipeline_parallel_degree 2 " in text and "_PP2_" in text, text
    status, text = slurm("llama_finetune.sub", TASK="ppo", **folders)
    assert status != 0 and "error: TASK: 'ppo' must be one of finetune, dpo, kto" in text, text


def test_fine_tuning_in_a_container(slurm, folders, tmp_path):
    status, text = slurm("llama_finetune.sub", CONTAINER="image", CONTAINER_MOUNTS="/more:/more", **folders)
    assert status != 0 and "does not see /outputs/" in text, "the stand-in starts no container"
    told = (tmp_path / "fake-slurm/container").read_text().splitlines()
    model, data = folders["MODEL_NAME"], folders["DATASET"]
    mounts = f"{tmp_path}/out:/outputs,{model}:{model},{model}:{model},{data}:{data},/more:/more"
    assert told[0] == "--container-image=image" and told[1].endswith(f":/workspace,{mounts}")


@pytest.mark.parametrize(
    "settings, said",
    [
        (dict(MODEL_NAME=""), "MODEL_NAME: there is no folder ''"),
        (dict(DATASET="nowhere"), "DATASET: there is no 'nowhere'"),
        (dict(FSDP_SIZE="some"), "FSDP_SIZE: 'some' must be a whole number of at least 1, or auto or all"),
        (dict(GPUS_PER_NODE="auto"), "GPUS_PER_NODE: 'auto' must be a whole number of at least 1"),
        (dict(METHOD="qlora"), "method: 'qlora' must be one of full, lora"),
    ],
)
def test_wrong_settings_of_fine_tuning(slurm, folders, settings, said):
    status, text = slurm("llama_finetune.sub", **folders | settings)
    assert status != 0 and f"error: {said}" in text, text


def test_the_jobs_own_output_ends_with_what_the_launcher_refuses(slurm, folders, tmp_path):
    slurm("llama_finetune.sub", METHOD="qlora", **folders)
    said = (tmp_path / f"slurm-{fake_slurm.JOB}.out").read_text().splitlines()
    assert said[-1].startswith("error: method: 'qlora'"), said


def test_an_experiment_whose_layout_is_left_to_the_launcher(slurm):
    """Its name says so; the launcher, which sees no GPU here, asks for one."""
    status, text = slurm("llama_multi_node.sub", "-N1", TP_SIZE="auto", FSDP_SIZE="all", MOCK_DATA="1", PREC="fp8")
    assert "_N1_MBSauto_DPauto_TPauto_VPauto_GAauto_FSDPall_PPauto_SPauto_auto_te_fp8" in text
    assert status != 0 and "error: auto: the planner knows" in text, text


def test_the_launchers_words_for_a_layout_are_not_passed_over(slurm):
    assert slurm("llama_multi_node.sub", "-N1", MOCK_DATA="1", TP="4") == (1, "error: TP: here it is TP_SIZE\n")


def test_outside_of_a_job():
    for script in ("llama_multi_node.sub", "llama_finetune.sub"):
        done = subprocess.run(["bash", SCRIPTS / script], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.startswith("error: this script is for sbatch; without Slurm see")
