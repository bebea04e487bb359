"""Real trainings whose device is full in the middle: what they say, and that the job ends, whatever hangs."""

import os
import time

import pytest

from tests.multiprocess.launch import crowded
from tests.multiprocess.launch.healing import Training

STEP = 3  # checkpoints are of every second one


@pytest.fixture(scope="module")
def two_gpus(tmp_path_factory):
    """The PATH with a driver's tool that shows two H100s, which the launcher asks: backend te wants them."""
    folder = tmp_path_factory.mktemp("driver")
    driver = folder / "nvidia-smi"
    driver.write_text("#!/bin/sh\nfor gpu in 0 1; do echo GPU $gpu: NVIDIA H100 80GB HBM3; done\n")
    driver.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


LAYOUTS = [("tp2", "0,1", "exit"), ("pp2", "1", "exit"), ("sharding1", "1", "thread")]


@pytest.mark.parametrize("layout, ranks, hangs", LAYOUTS)
def test_a_full_device_ends_the_job(tmp_path, nvgpu_host, two_gpus, layout, ranks, hangs):
    settings = dict(TRAINING_SCRIPT=crowded.__file__, CROWDED=f"{ranks} {STEP}", HANGS=hangs, PATH=two_gpus)
    job = Training(tmp_path, "crowded", layout, "te", nvgpu_host, 1, "bf16", **settings)
    logs = [tmp_path / f"crowded/logs/workerlog.{rank}" for rank in ranks.split(",")]
    while not any(log.is_file() and " error: " in log.read_text() for log in logs):
        assert job.process.poll() is None, job.screen()[-6000:]
        time.sleep(0.1)
    start = time.monotonic()
    assert job.end() == 1 and job.left() == []
    assert time.monotonic() - start < 10, job.screen()[-6000:]
    screen = job.screen()
    assert "out of memory" in screen.lower() and "The planner counts" in screen, screen[-6000:]
    assert "Traceback" not in screen and "does not handle" not in screen
    assert (job.output / f"checkpoint-{STEP - 1}" / ".checkpoint_done").is_file()
