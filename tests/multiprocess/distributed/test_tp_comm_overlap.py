"""A forward that gathers and scatters in chunks, over two ranks of tensor parallelism, on nvgpu's host runtime."""

from pathlib import Path

from tests.nvgpu_processes import run_ranks


def test_chunks_change_no_bit_and_are_sent_on_the_communication_stream(seed, nvgpu_host, warm_start):
    script = Path(__file__).with_name("tp_comm_overlap.py")
    codes, outputs = run_ranks(nvgpu_host["CUSTOM_DEVICE_ROOT"], 2, script, seed, **warm_start)
    assert codes == [0, 0] and all("OK" in output for output in outputs), "\n".join(outputs)
