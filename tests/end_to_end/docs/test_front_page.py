"""The README at the top: short, and its code and commands do what they say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def test_it_is_short():
    assert len(TEXT.splitlines()) <= 120


def test_the_training_loop_learns(tmp_path):
    """As it stands on the page, in an empty folder, on the CPU."""
    [code] = blocks("python")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUSTOM_DEVICE_ROOT": ""}
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    losses = [float(line.split()[1]) for line in found.stdout.splitlines()]
    assert len(losses) == 10 and losses[-1] < losses[0] - 0.1, losses


@pytest.mark.parametrize("gpus", [1, 8])
def test_the_launch_commands_are_accepted(gpus, demo_data):
    """Up to the command that they would run, with as many GPUs as the page says."""
    [command] = [
        block
        for block in blocks("bash")
        if "single_node" in block and ("llama-125m" if gpus == 1 else "Meta-Llama-3-8B") in block
    ]
    command = re.sub(r"\A.*?(?=^\w+=)", "", command, flags=re.DOTALL | re.MULTILINE)  # activation and data come first
    command = command.replace("data/demo", str(demo_data))
    devices = ",".join(map(str, range(gpus)))
    environment = os.environ | {"DRY_RUN": "1", "DEVICE": "gpu", "DEVICES": devices, "PYTHON": sys.executable}
    found = subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "--use_fp8" in found.stdout and "--transformer_engine_backend transformer_engine" in found.stdout
    assert f"--devices {devices}" in found.stdout or gpus == 1


def test_the_scripts_it_names_are_there():
    for script in re.findall(r"(?:bash|python) ((?:scripts|tools|llm)/\S+)", TEXT):
        assert (ROOT / script).is_file(), script
