"""Recipes of PaddleFormers with two processes, on nvgpu's host runtime, TE's kernels emulated, beside one process."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("paddleformers", reason="needs PaddleFormers: HOST=paddleformers bash scripts/test.sh")

from tests.nvgpu_processes import build_host, environment
from tests.paddleformers.recipe import STEPS, losses_in

DATA_PARALLEL = dict(per_device_train_batch_size=1, sharding="")
SHARDING = dict(per_device_train_batch_size=1, sharding="stage1")
PD = dict(transformer_engine_backend="paddle")
LORA = dict(PD, fine_tuning="lora", lora_rank=4)
BF16 = dict(transformer_engine_backend="transformer_engine", bf16=True, fp16_opt_level="O2", amp_master_grad=True)
FP8 = dict(BF16, use_fp8=True, fp8_recipe="delayed")
JOBS = {
    "pd": (1, PD),
    "pd-dp": (2, PD | DATA_PARALLEL),
    "lora": (1, LORA),
    "lora-dp": (2, LORA | DATA_PARALLEL),
    "te": (1, BF16),
    "te-sharding": (2, BF16 | SHARDING),
    "fp8": (1, FP8),
    "fp8-sharding": (2, FP8 | SHARDING),
}
RESUMED = ("lora-dp", "fp8-sharding")


@pytest.fixture(scope="module")
def losses(tmp_path_factory, recipe_of):
    """{job: its losses} of all JOBS, and of those that go on from a checkpoint of one of them, "resumed-…"."""
    folder = tmp_path_factory.mktemp("jobs")
    jobs = []
    for name, (size, settings) in JOBS.items():
        recipe = recipe_of("PT") | settings | dict(output_dir=str(folder / name), device="nvgpu")
        job = dict(name=name, size=size, recipe=recipe, emulated=True)
        jobs.append(job)
        if name in RESUMED:
            checkpoint = str(folder / name / f"checkpoint-{STEPS // 2}")
            jobs.append(job | dict(name=f"resumed-{name}", recipe=recipe | dict(resume_from_checkpoint=checkpoint)))
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, Path(__file__).with_name("ranks.py"), folder / "jobs.json"]
    done = subprocess.run(command, env=environment(build_host()), capture_output=True, text=True, timeout=600)
    logs = {job["name"]: (folder / f"{job['name']}.0.log") for job in jobs}
    logs = {name: path.read_text() if path.exists() else "" for name, path in logs.items()}
    assert done.returncode == 0, done.stderr[-2000:] + "\n".join(log[-2000:] for log in logs.values() if log)
    return {name: losses_in(log) for name, log in logs.items()}


@pytest.mark.parametrize(
    "name, bound", [("pd-dp", 1e-6), ("lora-dp", 1e-6), ("te-sharding", 1e-3), ("fp8-sharding", 0.01)]
)
def test_two_processes_train_as_one(losses, name, bound):
    alone = losses[name.rpartition("-")[0]]
    assert len(alone) == STEPS and alone[-1] != alone[0]
    np.testing.assert_allclose(losses[name], alone, rtol=bound)


@pytest.mark.parametrize("name", RESUMED)
def test_resumed_exactly(losses, name):
    assert losses[f"resumed-{name}"] == losses[name][STEPS // 2 :]
