"""Statistics of casts to fp8 by the real library and our kernels, beside NumPy's and beside pd's."""

import pytest

from tests.statistics_cases import RECIPES, check_attention, check_beside_numpy, check_beside_pd, check_experts


@pytest.mark.parametrize("name", RECIPES)
def test_beside_numpy(gpu, poisoned, seed, name):
    check_beside_numpy(gpu, "transformer_engine", name, seed)


@pytest.mark.parametrize("kind, name", [
    ("transformer", "delayed"), ("transformer", "current"), ("transformer", "block"), ("gpt", "delayed"),
    ("mlp_geglu_bias", "delayed"), ("norms_after", "first_step"),
])  # fmt: skip
def test_te_counts_at_every_cast_as_pd_does(gpu, poisoned, monkeypatch, seed, kind, name):
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # steps are compared to the bit
    check_beside_pd(gpu, kind, name, seed)


@pytest.mark.parametrize("name", ["delayed", "current", "block"])
def test_experts(gpu, grouped_gemms, poisoned, seed, name):
    check_experts(gpu, name, seed)


def test_attention(gpu, poisoned, seed):
    check_attention(gpu, "transformer_engine", seed)
