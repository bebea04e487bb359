"""Names of layers on a pipeline stage."""

import pytest

from paddle_te.training.trainer import _whole_name

LAYER = "transformer.self_attention"
WEIGHTS = {
    "llama.4.transformer.layernorm_mlp.fc1_weight": "llama.layers.3.transformer.layernorm_mlp.fc1_weight",
    f"llama.4.{LAYER}.proj.weight": f"llama.layers.3.{LAYER}.proj.weight",
    f"llama.40.{LAYER}.proj.weight": f"llama.layers.39.{LAYER}.proj.weight",
}


@pytest.mark.parametrize("name, whole", [
    ("llama.4.transformer.layernorm_mlp", "llama.layers.3.transformer.layernorm_mlp"),
    (f"llama.4.{LAYER}.proj", f"llama.layers.3.{LAYER}.proj"),
    (f"llama.40.{LAYER}.core_attention", f"llama.layers.39.{LAYER}.core_attention"),  # which has no weights
])  # fmt: skip
def test_a_layers_name_in_the_whole_model(name, whole):
    assert _whole_name(name, WEIGHTS) == whole


def test_a_layer_without_any_weight_around_it_is_named():
    with pytest.raises(KeyError, match="elsewhere.attention: no weight"):
        _whole_name("elsewhere.attention", WEIGHTS)
