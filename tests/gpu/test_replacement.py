"""replace_linear: Paddle's own layers in float32 as the truth."""

import pytest

from tests.replacement_cases import check


@pytest.mark.parametrize("recipe", [None, "delayed", "current"])
def test_a_models_linear_layers_compute_as_before(gpu, poisoned, seed, recipe):
    check(gpu, recipe, seed)
