"""Statistics of casts to fp8 by both backends; tests/gpu/test_statistics.py asks the same of the real library."""

import numpy as np
import pytest

from paddle_te import fp8
from paddle_te.fp8.statistics import Recorder
from paddle_te.layers import Linear
from tests import emulated_te
from tests.poison import poison_allocations
from tests.statistics_cases import (
    BACKENDS,
    FORMATS,
    RECIPES,
    check_attention,
    check_beside_numpy,
    check_beside_pd,
    check_experts,
    drawn,
    step,
)


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    emulated_te.install(monkeypatch.setattr)
    poison_allocations(monkeypatch)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", RECIPES)
def test_beside_numpy(seed, name, backend):
    check_beside_numpy("cpu", backend, name, seed)


@pytest.mark.parametrize("kind, name", [
    ("transformer", "delayed"), ("transformer", "current"), ("transformer", "block"), ("gpt", "delayed"),
    ("mlp_geglu_bias", "delayed"), ("norms_after", "first_step"),
])  # fmt: skip
def test_te_counts_at_every_cast_as_pd_does(seed, kind, name):
    check_beside_pd("cpu", kind, name, seed)


@pytest.mark.parametrize("name", ["delayed", "current", "block"])
def test_experts(seed, name):
    check_experts("cpu", name, seed)


@pytest.mark.parametrize("backend", BACKENDS)
def test_attention(seed, backend):
    check_attention("cpu", backend, seed)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_scale_of_zeros_does_not_count(seed, backend):
    """Under current scaling it is 1, as where experts of a rank get no rows."""
    x, dy = (drawn(np.random.default_rng(seed), (128, 256)) / 2**9 for _ in range(2))
    layer = Linear(256, 256, backend=backend, params_dtype=BACKENDS[backend])
    recorder = Recorder(fp8.name_modules(layer))
    recorder.begin(RECIPES["current"])
    for input_ in (x, np.zeros_like(x)):
        step(layer, input_, dy, BACKENDS[backend], RECIPES["current"])
    got = recorder.end()["", 0, "input"]
    scale = FORMATS["e4m3"][1] / np.abs(x).max()
    np.testing.assert_allclose((got.scale_min, got.scale_max), (scale, scale), 1e-6)
