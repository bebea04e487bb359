"""paddle_te.ops.embedding, on nvgpu's host runtime."""

from tests import embedding_cases
from tests.nvgpu_processes import build_host, run


def test_the_main_gradient_is_a_sum_in_float32(seed, warm_start):
    result = run(build_host(), embedding_cases.__file__, "nvgpu:0", seed, **warm_start)
    assert result.returncode == 0 and "EXACT" in result.stdout, result.stderr[-3000:]
