"""Delayed scaling over two ranks: both have the scales of the greater amax. On nvgpu's host runtime."""

from pathlib import Path

from tests.nvgpu_processes import run_ranks


def test_two_ranks_share_scales(nvgpu_host, warm_start):
    script = Path(__file__).with_name("amax.py")
    codes, outputs = run_ranks(nvgpu_host["CUSTOM_DEVICE_ROOT"], 2, script, **warm_start)
    assert codes == [0, 0] and all("OK" in output for output in outputs), "\n".join(outputs)
