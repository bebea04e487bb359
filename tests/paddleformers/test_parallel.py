"""Recipes of PaddleFormers with several processes beside one, on nvgpu's host runtime, TE's kernels emulated."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("paddleformers", reason="needs PaddleFormers: HOST=paddleformers bash scripts/test.sh")

from paddleformers.datasets.SFTDataset import Sequence

from paddle_te.hosts.paddleformers.batches import Filled
from tests.nvgpu_processes import build_host, environment
from tests.paddleformers.recipe import STEPS, evaluated_in, losses_in
from tests.paddleformers.test_checkpoints import weights_in
from tests.te_weights import relative

DATA_PARALLEL = dict(per_device_train_batch_size=1, sharding="")
SHARDING, STAGE2, STAGE3 = (dict(per_device_train_batch_size=1, sharding=f"stage{stage}") for stage in (1, 2, 3))
SEQUENCE_PARALLEL = dict(tensor_model_parallel_size=2, sequence_parallel=True)
PIPELINE = dict(per_device_train_batch_size=1, gradient_accumulation_steps=2, pipeline_model_parallel_size=2)
PD = dict(transformer_engine_backend="paddle")
PLAIN = dict(PD, max_grad_norm=0)  # in float32 PaddleFormers cannot clip under tensor parallelism and in pipelines
LORA = dict(PLAIN, fine_tuning="lora", lora_rank=4)
# packed questions and answers: micro-batches have unequal numbers of labels
EVALUATED = dict(do_eval=True, evaluation_strategy="steps", eval_steps=STEPS // 2)
SFT = dict(PLAIN, stage="SFT", per_device_eval_batch_size=2, **EVALUATED)
SFT_ONE = SFT | dict(per_device_train_batch_size=1, per_device_eval_batch_size=1)
BF16 = dict(transformer_engine_backend="transformer_engine", bf16=True, fp16_opt_level="O2", amp_master_grad=True)
FP8 = dict(BF16, use_fp8=True, fp8_recipe="delayed", fp8_skip_layers="last:1")
JOBS = {
    "pd": (1, PD),
    "pd-dp": (2, PD | DATA_PARALLEL),
    "plain": (1, PLAIN),
    "plain-sp": (2, PLAIN | SEQUENCE_PARALLEL),
    "plain-pp": (2, PLAIN | PIPELINE),
    "lora": (1, LORA),
    "lora-dp": (2, LORA | DATA_PARALLEL),
    "adapter": (1, LORA | dict(lora_path="lora")),
    "adapter-sp": (2, LORA | SEQUENCE_PARALLEL | dict(lora_path="lora")),
    "sft": (1, SFT),
    "sft-accumulated": (1, SFT_ONE | dict(gradient_accumulation_steps=2)),
    "sft-none": (1, SFT_ONE | dict(gradient_accumulation_steps=2, transformer_engine_backend="none")),
    "sft-dp": (2, SFT_ONE | DATA_PARALLEL),
    "sft-pp": (2, SFT_ONE | PIPELINE),
    "te": (1, BF16),
    "te-stage2": (2, BF16 | STAGE2),
    "te-stage3": (2, BF16 | STAGE3),
    "te-sp-sharding": (4, BF16 | SEQUENCE_PARALLEL | SHARDING),
    "fp8": (1, FP8),
    "fp8-sharding": (2, FP8 | SHARDING),
    "fp8-pp": (2, FP8 | PIPELINE),
}
RESUMED = ("lora-dp", "fp8-sharding", "fp8-pp", "te-stage2")
# {a job: the job from whose checkpoint it goes on, in its own layout}
GO_ON = dict(zip(RESUMED, RESUMED, strict=True)) | {"plain": "plain-sp", "plain-sp": "plain-pp"}


@dataclass(frozen=True)
class Runs:
    folder: Path  # the output folders of all jobs, called after them
    losses: dict  # {job: the loss of each step}
    evaluated: dict  # {job: the loss of each evaluation}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, recipe_of):
    """All JOBS, and those that GO_ON from a checkpoint, "resumed-…"."""
    folder = tmp_path_factory.mktemp("jobs")
    jobs = [_job(folder, name, recipe_of(settings.get("stage", "PT"))) for name, (_, settings) in JOBS.items()]
    for name, start in GO_ON.items():
        checkpoint = str(folder / start / f"checkpoint-{STEPS // 2}")
        jobs.append(_job(folder, name, recipe_of("PT"), f"resumed-{name}", resume_from_checkpoint=checkpoint))
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, Path(__file__).with_name("ranks.py"), folder / "jobs.json"]
    done = subprocess.run(command, env=environment(build_host()), capture_output=True, text=True, timeout=600)
    logs = {job["name"]: (folder / f"{job['name']}.0.log") for job in jobs}
    logs = {name: path.read_text() if path.exists() else "" for name, path in logs.items()}
    assert done.returncode == 0, done.stderr[-2000:] + "\n".join(log[-2000:] for log in logs.values() if log)
    return Runs(folder, *({name: read(log) for name, log in logs.items()} for read in (losses_in, evaluated_in)))


def _job(folder, name, recipe, called=None, **more):
    size, settings = JOBS[name]
    recipe = recipe | settings | more | dict(output_dir=str(folder / (called or name)), device="nvgpu")
    if "lora_path" in recipe:
        recipe["lora_path"] = str(folder / recipe["lora_path"])
    return dict(name=called or name, size=size, recipe=recipe, emulated=True)


@pytest.mark.parametrize(
    "name, bound",
    [
        ("pd-dp", 1e-6),
        ("plain-sp", 1e-6),
        ("plain-pp", 1e-6),
        ("lora-dp", 1e-6),
        ("adapter-sp", 1e-6),
        ("sft-accumulated", 1e-6),
        ("sft-none", 1e-5),
        ("sft-dp", 1e-6),
        ("sft-pp", 1e-6),
        ("te-stage2", 1e-3),
        ("te-stage3", 1e-3),
        ("te-sp-sharding", 1e-3),
        ("fp8-sharding", 0.01),
        ("fp8-pp", 0.01),
    ],
)
def test_several_processes_train_as_one(runs, name, bound):
    alone = runs.losses[name.partition("-")[0]]
    assert len(alone) == STEPS and alone[-1] != alone[0]
    np.testing.assert_allclose(runs.losses[name], alone, rtol=bound)


@pytest.mark.parametrize("name", ["sft-accumulated", "sft-none", "sft-dp", "sft-pp"])
def test_an_evaluation_is_a_mean_over_labels(runs, name):
    """However they are divided into batches and over ranks."""
    assert len(runs.evaluated["sft"]) == 2
    np.testing.assert_allclose(runs.evaluated[name], runs.evaluated["sft"], rtol=1e-5)


def test_an_evaluation_has_each_sample_once():
    """PaddleFormers' data set gives the last one twice where nothing is packed."""
    samples = [[Sequence([number], [0], [number], 1)] for number in range(5)]
    *whole, filler = Filled([*samples, samples[-1]], 3)
    assert whole == samples and filler == [Sequence([4], [0], [-100], 1)]
    assert [*Filled([], 3)] == []


@pytest.mark.parametrize("name", RESUMED)
def test_resumed_exactly(runs, name):
    assert runs.losses[f"resumed-{name}"] == runs.losses[name][STEPS // 2 :]


@pytest.mark.parametrize("name", ["plain-sp", "plain-pp", "resumed-plain", "resumed-plain-sp"])
def test_the_weights_of_one_process(runs, name):
    """In whole, with Hugging Face's names; also of a run that goes on in another layout, with the optimizer's state."""
    alone, weights = (weights_in(runs.folder / folder) for folder in ("plain", name))
    assert weights.keys() == alone.keys()
    for weight, array in alone.items():
        assert relative(weights[weight], array) < 1e-5, weight
