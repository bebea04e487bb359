"""Layers that keep less of the MLP for backward, on Transformer Engine's kernels and ours."""

import paddle
import pytest

from tests.stored_input_cases import (
    ADAPTERS,
    AGAIN,
    RECIPES,
    STORED,
    check_swiglus_kernel,
    check_the_gradients_error,
    train,
)


@pytest.mark.parametrize("adapter", ["none", "lora"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_gradients_error(gpu, poisoned, seed, recipe, adapter):
    paddle.set_device("cpu")
    exact = train(seed, "paddle", None, adapter)
    paddle.set_device(gpu)
    check_the_gradients_error(exact, seed, recipe, adapter)


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("options", [{}, STORED, AGAIN, STORED | AGAIN], ids=["", "stored", "again", "both"])
def test_swiglus_kernel_stores_what_the_others_do(gpu, poisoned, monkeypatch, seed, recipe, adapter, options):
    """Where attention's backward adds without atomics. A base in fp8 is none of 16 bits."""
    if recipe == "16bits" and adapter == "lora over fp8":
        adapter = "lora"
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    check_swiglus_kernel(seed, monkeypatch, recipe, adapter, **options)


@pytest.mark.parametrize("adapter, recipe", [("lora", "16bits"), ("lora", "delayed"), ("lora over fp8", "current")])
def test_parts_with_lora_that_are_computed_again(gpu, poisoned, monkeypatch, seed, adapter, recipe):
    """Every bit is the same."""
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    given = seed, "transformer_engine", RECIPES[recipe], adapter
    want = train(*given)
    for parts in (("layernorm", "mlp_act", "core_attn"), ("layernorm", "mlp")):
        got = train(*given, recompute_modules=parts)
        for name, value in want.items():
            assert (got[name] == value).all(), (name, parts)
