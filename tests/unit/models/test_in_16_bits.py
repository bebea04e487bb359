"""Decoder layers that leave fp8: which ones, by the number that the whole model gives them."""

import numpy as np
import paddle
import pytest

from paddle_te.models import in_16_bits
from paddle_te.models.in_16_bits import compute_in_16_bits, decoder_layers, layer_number
from tests import small_models


def in_fp8(model):
    return [number for number, layer in sorted(decoder_layers(model).items()) if layer.fp8_recipe]


def logits_of(model, ids):
    found = model(ids)
    return (found[0] if isinstance(found, tuple) else found).numpy()


@pytest.mark.parametrize("family", ["llama", "gpt", "qwen3_moe"])
def test_outer_layers(family):
    config = small_models.config("paddle", family, use_fp8=True, num_hidden_layers=4, fp8_skip_layers="first:1,last:2")
    assert in_fp8(small_models.model_class(config)(config)) == [1]


def test_they_compute_as_a_model_without_fp8():
    """All in 16 bits is the model without fp8; some is neither that nor the model in fp8."""
    ids = paddle.to_tensor(np.random.default_rng(3).integers(0, small_models.VOCABULARY, (1, 32)))
    config = small_models.config("paddle", num_hidden_layers=4, use_fp8=True)
    model = small_models.model_class(config)(config)
    logits = []
    for numbers in ((), (2,), (0, 1, 3)):
        compute_in_16_bits(model, numbers)
        logits.append(logits_of(model, ids))
    plain = small_models.config("paddle", num_hidden_layers=4)
    other = small_models.model_class(plain)(plain)
    other.set_state_dict(model.state_dict())
    np.testing.assert_array_equal(logits[2], logits_of(other, ids))
    assert np.abs(logits[1] - logits[0]).max() > 1e-4 and np.abs(logits[1] - logits[2]).max() > 1e-4


def test_a_stage_counts_as_the_whole_model_does(monkeypatch):
    config = small_models.config("paddle", num_hidden_layers=4, use_fp8=True)
    model = small_models.model_class(config)(config)
    names = in_16_bits.fp8.name_modules(model)
    later = {name: name.replace(f"layers.{layer_number(name)}.", f"layers.{layer_number(name) + 4}.") for name in names}
    monkeypatch.setattr(in_16_bits, "stage_layer_names", lambda _: later)
    compute_in_16_bits(model, [1, 5])
    assert in_fp8(model) == [4, 6, 7]


@pytest.mark.parametrize("name, number", [
    ("llama.layers.12.transformer.self_attention.proj", 12), ("gpt.decoder.layers.0", 0), ("lm_head", None),
    ("model.layers.3.transformer.moe_layer.experts", 3), ("sublayers.3.x", None),
])  # fmt: skip
def test_layer_number(name, number):
    assert layer_number(name) == number
