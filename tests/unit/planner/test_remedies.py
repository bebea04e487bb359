"""What fits where a job does not, one list for the launcher and for a run out of memory."""

import pytest

from paddle_te import configs
from paddle_te.planner.gpus import GPUS
from paddle_te.planner.layout import layout
from paddle_te.planner.model import Model
from paddle_te.planner.remedies import COMPACT, FP8_BASE, remedies

MODEL = Model.of(configs.read("llama-3-8b"))


def in_gpus_memory(job):
    return not job.offload_optimizer


@pytest.mark.parametrize("gpus, change", [(1, COMPACT), (4, {})])
def test_a_smaller_state_where_no_layout_fits_with_the_jobs_own(gpus, change):
    job = layout(gpus, 8192, micro_batches=16)
    found, plans = remedies(MODEL, job, GPUS["h100"], 2, in_gpus_memory)
    assert found == change and 0 < len(plans) <= 2
    for plan in plans:
        assert plan.memory.total < 80e9 and plan.layout.tokens_per_step == job.tokens_per_step
        assert (plan.layout.optim_moments == "bfloat16") == bool(change)


def test_a_base_in_fp8_where_an_adapters_own_does_not_fit():
    model = Model.of(configs.read("llama-3-70b"))
    job = layout(1, 4096, precision="bf16", lora=dict(rank=16, targets="all", fp8_base=False))
    assert remedies(model, job, GPUS["h200"], 2)[0] == FP8_BASE


def test_nothing_fits():
    assert remedies(MODEL, layout(1, 8192), GPUS["h100"], 2, lambda job: False) == ({}, [])
