"""Muon's memory and time, worked out by hand."""

import math

import paddle
import pytest

from paddle_te import configs, native
from paddle_te.native import newton_schulz
from paddle_te.ops import get_ops
from paddle_te.planner import memory, muon, speed
from paddle_te.planner.gpus import GPUS
from paddle_te.planner.layout import layout as layout_of
from paddle_te.planner.model import Model
from tests import emulated_te

H, F, KV, LAYERS = 4096, 14336, 1024, 32
MATRICES = LAYERS * (2 * H * H + 2 * KV * H + 3 * F * H)
GPU = GPUS["h100"]


@pytest.fixture(scope="module")
def llama():
    return Model.of(configs.words_of_model(configs.read_model("meta-llama/Meta-Llama-3-8B")))


def layout(gpus=1, **settings):
    return layout_of(gpus, 8192, precision="bf16", **settings)


def test_operations(llama):
    """Each product 2 m² n; symmetric ones of 4096 rows by two block rows, of which 3/4 are computed."""
    square = 5 * (2 * 0.75 + 1) * 2 * H**3
    narrow = 3 * 2 * 2 * KV**2 * H + 11 * 2 * KV**3
    wide = 3 * 1.75 * 2 * H**2 * F + 11 * 0.75 * 2 * H**3
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


@pytest.mark.parametrize("shape", [(40, 48), (128, 128), (192, 128), (192, 256), (320, 192), (128, 200)])
def test_the_operations_are_those_of_tes_gemms(shape, monkeypatch):
    emulated_te.install(monkeypatch.setattr)
    monkeypatch.setattr(newton_schulz, "BLOCK_ROWS", 64)
    te, found = native.load(), 0

    def gemm(a, b, d, transa, *_, **__):
        nonlocal found
        found += 2 * math.prod(d.shape) * a.shape[1 if transa else 0]

    monkeypatch.setattr(te, "gemm", gemm)
    monkeypatch.setattr(te, "launch", lambda *_: None)
    get_ops("transformer_engine").newton_schulz([paddle.ones(shape).astype("bfloat16")], muon.NEWTON_SCHULZ_STEPS, 1.0)
    assert found == pytest.approx(muon.newton_schulz_flops(*shape))


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
