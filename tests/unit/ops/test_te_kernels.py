"""Layers with our kernels, on the emulated library."""

import pytest

from paddle_te.native import casts
from tests import emulated_te
from tests.kernel_cases import OF_TRANSFORMER, OPTIONS, RECIPES, check_the_librarys_bits, steps, transformer
from tests.poison import poison_allocations


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    emulated_te.install(monkeypatch.setattr)
    poison_allocations(monkeypatch)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_bits_of_the_librarys_functions(seed, monkeypatch, recipe, options):
    check_the_librarys_bits(seed, monkeypatch, RECIPES[recipe], OPTIONS[options])


@pytest.mark.parametrize(
    "recipe, options",
    [
        ("delayed_from_current", "groups"),
        ("delayed", "main_gradients"),
        ("current", "heads"),
        ("current", "recompute"),
    ],
)
def test_the_bits_of_a_whole_layer(seed, monkeypatch, recipe, options):
    check_the_librarys_bits(seed, monkeypatch, RECIPES[recipe], OF_TRANSFORMER[options], transformer)


@pytest.mark.parametrize("recipe, halves", [("delayed", 2), ("current", 0)])
def test_a_half_layer_s_weights_are_cast_by_one_kernel(monkeypatch, recipe, halves):
    """Where their scales are known before: once in the program of each half, which both layers share."""
    recorded, cast = [], casts.cast_transpose_both
    monkeypatch.setattr(casts, "cast_transpose_both", lambda *given: (recorded.append(given), cast(*given)))
    steps(1, RECIPES[recipe], transformer)
    assert len(recorded) == halves


def test_whose_kernel_it_is(monkeypatch):
    """TE's where the scales are of blocks, the sum of the rows is wanted as well, or the GPU is Blackwell's."""

    def of_te(recipe=RECIPES["delayed"], capability=(9, 0), **options):
        monkeypatch.setattr(emulated_te.Stream, "capability", capability)
        return {name for name in steps(1, recipe, **options)[1] if "swiglu" in name}

    assert of_te(capability=(8, 9)) == set()
    assert of_te(capability=(10, 0)) == {"swiglu", "dswiglu_cast_transpose"}
    assert of_te(bias=True) == {"dswiglu"}
