"""Training on one device and recomputing on another in one process, with and without the repair."""

from pathlib import Path

import pytest

from tests.nvgpu_processes import run


@pytest.mark.parametrize("repaired", [True, False])
def test_training_on_one_device_and_recomputing_on_another(nvgpu_host, repaired):
    script = Path(__file__).with_name("switch_device.py")
    words = [] if repaired else ["unrepaired"]
    ended = run(nvgpu_host["CUSTOM_DEVICE_ROOT"], script, *words, NVGPU_HOST_DEVICES=1)
    if repaired:
        assert ended.returncode == 0 and ended.stdout.endswith("well\n"), ended.stderr[-2000:]
    else:
        assert "Generator index is not found" in ended.stderr, "Paddle does it right now: the repair can go"
