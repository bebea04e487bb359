"""The losses over two ranks that share the vocabulary, in float32 and bf16, on nvgpu's host runtime."""

from pathlib import Path

from tests.nvgpu_processes import run_ranks


def test_vocabulary_over_two_ranks(seed, nvgpu_host, warm_start):
    script = Path(__file__).with_name("cross_entropy.py")
    codes, outputs = run_ranks(nvgpu_host["CUSTOM_DEVICE_ROOT"], 2, script, seed, **warm_start)
    assert codes == [0, 0] and all("OK" in output for output in outputs), outputs
