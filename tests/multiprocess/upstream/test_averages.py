"""Gradients are divided by the number of ranks within their reductions, with the bits of Paddle's own division.

On nvgpu's host runtime. te's kernels are emulated.
"""

import pytest

from paddle_te.launch.overlap import OVERLAP_IN_PIPELINES, OVERLAPS, PIPELINE_OVERLAP
from tests.multiprocess.distributed import jobs

NAME = "te_fp8"
STAGE1 = {jobs.SHARDING: 2, "sharding": "stage1"}
# Processes, flags, and the repairs without which Paddle divides; logging_steps 2 as in test_overlap.py
LAYOUTS = {
    "stage 1 with overlap": (2, STAGE1 | dict(sharding_parallel_config=OVERLAPS["stage1"], logging_steps=2), ()),
    "stage 1 with DP": (4, STAGE1, ()),
    "stage 1 with overlap and PP": (
        4,
        STAGE1
        | {jobs.PP: 2, "logging_steps": 2}
        | dict(sharding_parallel_config=OVERLAP_IN_PIPELINES, pipeline_parallel_config=PIPELINE_OVERLAP),
        (),
    ),
    "stage 2": (2, {jobs.SHARDING: 2, "sharding": "stage2"}, ("stage2_averages",)),
    "stage 3": (2, {jobs.SHARDING: 2, "sharding": "stage3"}, ("stage3_gradients",)),
    "DP": (2, {}, ()),
}
# Elements. Stage 3 leaves norms and small matrices whole, which together are fewer, and Paddle divides them.
SMALL = dict.fromkeys(LAYOUTS, 1024) | {"stage 3": 10_000}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_divides_but_the_reduction(layout, tmp_path, warm_host):
    """Losses, weights and the gradients' norm, which clips, are the same to the bit for two ranks."""
    processes, flags, others = LAYOUTS[layout]
    weights = jobs.make_initial_weights(tmp_path / "weights", layers=2)
    averaged = jobs.variant(NAME, weights)
    divided = averaged | dict(name="divided", unrepaired=["averages", *others])
    environment = warm_host | dict(EMULATED_TE="1")
    runs = jobs.launch(tmp_path / "job", processes, jobs.BF16 | flags, [averaged, divided], "nvgpu", environment)
    jobs.check_same(runs[NAME], runs["divided"], 0, 0)
    for name, divides in ((NAME, False), ("divided", True)):
        for rank in runs[name].sizes:
            assert any(size > SMALL[layout] for size in rank["divided"]) is divides, (name, rank["divided"])
