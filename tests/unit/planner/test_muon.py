"""Muon's memory and time, worked out by hand."""

import pytest

from paddle_te import configs
from paddle_te.planner import memory, muon, speed
from paddle_te.planner.gpus import GPUS
from paddle_te.planner.layout import layout as layout_of
from paddle_te.planner.model import Model

H, F, KV, LAYERS = 4096, 14336, 1024, 32
MATRICES = LAYERS * (2 * H * H + 2 * KV * H + 3 * F * H)
GPU = GPUS["h100"]


@pytest.fixture(scope="module")
def llama():
    return Model.of(configs.words_of_model(configs.read_model("meta-llama/Meta-Llama-3-8B")))


def layout(gpus=1, **settings):
    return layout_of(gpus, 8192, precision="bf16", **settings)


def test_operations(llama):
    square, narrow = 5 * 6 * H**3, 5 * (4 * KV**2 * H + 2 * KV**3)
    wide = 5 * (4 * H**2 * F + 2 * H**3)
    found = muon.matrices_of(llama)
    assert found.flops == LAYERS * (2 * square + 2 * narrow + 3 * wide)
    assert found.elements == MATRICES and found.largest == 2 * F * H
    seconds = found.flops / (GPU.gemm_bf16 * 1e12)
    for gpus, more in ((1, {}), (4, {"sharding_parallel_degree": 4})):
        plain, of_muon = (
            speed.time_of_step(llama, layout(gpus, optim=optim, **more), GPU)["optimizer"]
            for optim in ("adamw", "muon")
        )
        assert 1e3 * seconds < (of_muon - plain) * gpus < 1.3e3 * seconds


@pytest.mark.parametrize("moments, each", [("float32", 4), ("bfloat16", 2)])
def test_a_matrix_has_one_moment(llama, moments, each):
    kept = dict(optim_moments=moments, master_weights="bf16_remainder")
    adamw, of_muon = (memory.memory_of_step(llama, layout(optim=o, **kept)).states for o in ("adamw", "muon"))
    assert adamw - of_muon == pytest.approx(each * MATRICES)


def test_the_update_needs_room(llama):
    """When backward is over, beside all gradients."""
    few = dict(recompute_granularity="full", recompute=True)
    of_muon = memory.memory_of_step(llama, layout_of(1, 512, precision="bf16", optim="muon", **few))
    assert of_muon.working == 12 * 2**27 + memory.GEMM_WORKSPACE
    assert muon.workspace(llama, layout(optim="muon")) == 12 * 2**27
    assert muon.workspace(llama, layout()) == 0
