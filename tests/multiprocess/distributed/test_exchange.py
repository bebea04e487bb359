"""What sequence-parallel ranks send each other beside row-parallel GEMMs, on nvgpu's host runtime."""

from pathlib import Path

import pytest

from tests.nvgpu_processes import run_ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_gets_what_the_others_have_for_it(nvgpu_host, warm_start, ranks):
    script = Path(__file__).with_name("exchange.py")
    codes, outputs = run_ranks(nvgpu_host["CUSTOM_DEVICE_ROOT"], ranks, script, ranks, **warm_start)
    assert codes == [0] * ranks and all("OK" in output for output in outputs), outputs
