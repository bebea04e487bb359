"""The planner's memory of a whole step beside what Paddle's allocator counts on nvgpu's host runtime."""

import pytest

from paddle_te.planner.layout import layout as layout_of
from paddle_te.planner.memory import GEMM_WORKSPACE, memory_of_step
from paddle_te.planner.model import Model
from tests.multiprocess.hosts import step_memory
from tests.nvgpu_processes import build_host, run


def test_the_planner_says_what_a_step_takes(warm_start):
    """Within 4 %, whichever moment is the largest; the emulated kernels need no workspace. Where gradients are not
    there yet they would make 8 % and more."""
    result = run(build_host(), step_memory.__file__, "nvgpu:0", **warm_start)
    assert result.returncode == 0, result.stderr[-3000:]
    found = dict(line.rsplit(": ", 1) for line in result.stdout.splitlines() if line.split(":")[0] in step_memory.CASES)
    wanted = {}
    for case in step_memory.CASES:
        memory = memory_of_step(Model.of(step_memory.config_of(case)), layout_of(**step_memory.layout_of(case)))
        wanted[case] = pytest.approx(memory.total - GEMM_WORKSPACE, rel=0.04)
    assert {case: int(size) for case, size in found.items()} == wanted
