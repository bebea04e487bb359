"""Attention in fp8 of pd, and of te with TE's kernels emulated in NumPy, where keys and values have much in common."""

import pytest

from tests import centred_attention, emulated_te
from tests.poison import poison_allocations


@pytest.mark.parametrize("recipe", centred_attention.RECIPES)
@pytest.mark.parametrize("common", centred_attention.COMMON)
@pytest.mark.parametrize("backend", ["paddle", "transformer_engine"])
def test_what_keys_and_values_have_in_common_costs_no_accuracy(seed, monkeypatch, backend, common, recipe):
    if backend == "transformer_engine":
        emulated_te.install(monkeypatch.setattr)
        poison_allocations(monkeypatch)
    centred_attention.check("cpu", backend, recipe, common, seed)
