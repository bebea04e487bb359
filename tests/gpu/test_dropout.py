"""te's dropout: the formula with the mask that cuDNN's or Paddle's kernels used."""

import pytest

from tests.dropout_cases import HALVES, check_attention, check_hidden, check_recompute


@pytest.mark.parametrize("how", ["causal", "mask", "documents"])
def test_the_softmax_is_dropped(gpu, poisoned, seed, how):
    check_attention(gpu, "transformer_engine", how, seed)


@pytest.mark.parametrize("recipe", [None, "delayed", "current"])
@pytest.mark.parametrize("kind", HALVES)
def test_what_is_added_to_the_input_is_dropped(gpu, poisoned, seed, kind, recipe):
    check_hidden(gpu, "transformer_engine", kind, recipe, seed)


@pytest.mark.parametrize("recipe", [None, "delayed", "current"])
def test_recompute_drops_the_same(gpu, poisoned, monkeypatch, seed, recipe):
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    check_recompute(gpu, "transformer_engine", recipe, seed)
