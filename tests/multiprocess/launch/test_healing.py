"""Real trainings that heal: past a broken batch, and on fewer devices. healing.py has the kills and hangs, by hand."""

import os
import re

import pytest

from tests.end_to_end.training import injection
from tests.multiprocess.launch.healing import Training
from tests.pretraining import losses, numbers

BROKEN_STEP = 5  # the one after a checkpoint
OURS = re.compile(  # what the screen of a run has that nothing happens to
    r"launch: the host is PaddleNLP|\+ env |OVERLAP=auto: |"
    r"\d\d:\d\d:\d\d (the messages of PaddleNLP|training (steps|ended)|kernels of step|step \d+/\d+: |"
    r"\S+ is complete$|[\d.]+ GB saved |warning: warmup_steps )"
)


def others_lines(screen):
    """Those that neither the launcher nor a rank of ours has written."""
    return [line for line in screen.splitlines() if not OURS.match(line)]


def test_a_rollback_of_several_ranks_goes_past_the_broken_batch(tmp_path, nvgpu_host):
    """What comes of it is what comes of leaving that batch out at once, in the other way: --on_nan skip."""
    runs = {}
    for on_nan in ("skip", "rollback"):
        settings = dict(EXTRA_ARGS=f"--on_nan {on_nan}", INJECTION=f"1 gradient nan {BROKEN_STEP}", MAX_RESTARTS="1")
        settings["TRAINING_SCRIPT"] = injection.__file__
        runs[on_nan] = Training(tmp_path, on_nan, "tp2", "pd", nvgpu_host, 1, **settings)
        assert runs[on_nan].end() == 0, runs[on_nan].screen()[-6000:]
    screen, output = runs["rollback"].screen(), runs["rollback"].output
    assert f"past the batches of steps {BROKEN_STEP} to {BROKEN_STEP}" in screen
    assert "start 2 of at most 2, from the newest checkpoint" in screen and "start 2" not in runs["skip"].screen()
    assert set(losses(output)) == {*range(1, 9)} - {BROKEN_STEP}
    assert losses(output) == losses(runs["skip"].output) and numbers(output) == numbers(runs["skip"].output)
    assert runs["rollback"].left() == []


def test_a_run_goes_on_without_a_device_that_is_gone(tmp_path, nvgpu_host):
    """Two sharding ranks become one process, which reads their checkpoint and trains on the same batches."""
    whole = Training(tmp_path, "whole", "sharding1", "pd", nvgpu_host, 1)
    assert whole.end() == 0, whole.screen()[-6000:]
    assert others_lines(whole.screen()) == []
    driver, devices = tmp_path / "nvidia-smi", tmp_path / "devices"  # what the launcher asks for its devices
    driver.write_text(f"#!/bin/sh\ncat {devices}\n")
    driver.chmod(0o755)
    devices.write_text("GPU 0: a\nGPU 1: b\n")
    settings = dict(ELASTIC="1", MAX_RESTARTS="1", PATH=f"{tmp_path}:{os.environ['PATH']}")
    harmed = Training(tmp_path, "harmed", "sharding1", "pd", nvgpu_host, 1, **settings)
    harmed.harm(3, "kill", before=lambda: devices.write_text("GPU 0: a\n"))
    assert harmed.end() == 0, harmed.screen()[-6000:]
    said = "devices 1 are gone: FSDP from 2 to 1, data ranks from 2 to 1, GA from 2 to 4, on devices 0"
    assert said in harmed.screen() and "start 2 of at most 2, from the newest checkpoint" in harmed.screen()
    assert losses(harmed.output) == pytest.approx(losses(whole.output), rel=1e-6) and len(losses(harmed.output)) == 8
    assert harmed.left() == []
