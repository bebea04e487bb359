"""Statistics of casts to fp8 by both backends; tests/gpu/test_statistics.py asks the same of the real library."""

import pytest

from tests import emulated_te
from tests.poison import poison_allocations
from tests.statistics_cases import (
    BACKENDS,
    RECIPES,
    check_attention,
    check_beside_numpy,
    check_beside_pd,
    check_experts,
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
