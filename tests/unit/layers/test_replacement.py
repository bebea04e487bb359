"""replace_linear: pd computes as Paddle does, te is emulated, and what is refused leaves all as it was."""

import paddle
import pytest
from paddle import nn

from paddle_te.fp8 import Float8BlockScaling
from paddle_te.layers import Linear, replace_linear
from tests import emulated_te
from tests.replacement_cases import check


@pytest.mark.parametrize("recipe", [None, "delayed", "current"])
def test_a_models_linear_layers_compute_as_before(monkeypatch, seed, recipe):
    emulated_te.install(monkeypatch.setattr)
    check("cpu", recipe, seed)


def test_a_layer_of_paddles_computes_the_same_in_pd(seed):
    """With frozen parameters, hooks, and in evaluation."""
    layer, seen = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0), []
    layer.linear2.register_forward_post_hook(lambda _, __, output: seen.append(output))
    layer.linear1.weight.stop_gradient = layer.linear2.bias.stop_gradient = True
    layer.eval()
    x = paddle.randn([2, 8, 32])
    want, values = layer(x), dict(layer.state_dict())
    replaced = replace_linear(layer, fp8=False, skip=("self_attn.q_proj", "out_proj"), backend="paddle")
    assert replaced.keys() == {"self_attn.k_proj", "self_attn.v_proj", "linear1", "linear2"}
    assert type(layer.self_attn.q_proj) is type(layer.self_attn.out_proj) is nn.Linear
    got = layer(x)
    assert len(seen) == 2 and not layer.linear1.training and abs(got - want).max() < 1e-5
    for name, new in replaced.items():
        assert (new.weight == values[f"{name}.weight"].T).all() and new.bias is values[f"{name}.bias"]
    assert layer.linear1.weight.stop_gradient and layer.linear2.bias.stop_gradient
    assert not layer.linear1.bias.stop_gradient


def test_one_layer_in_two_places_stays_one():
    shared = nn.Linear(16, 16)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    replaced = replace_linear(model, backend="paddle")
    assert replaced.keys() == {"0", "2"} and model[0] is model[2] is replaced["0"]


def tied():
    model = nn.Sequential(nn.Linear(16, 32), nn.Embedding(16, 32))
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize("make, options, message", [
    (tied, {}, "0 and 1 share a weight .*name 0 in skip"),
    (lambda: nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 10)), {}, r"multiples of 16, unlike those of 1 \[32, 10\]"),
    (lambda: nn.Sequential(nn.Linear(128, 64)), {"fp8": Float8BlockScaling()}, r"multiples of 128, .* 0 \[128, 64\]"),
    (lambda: nn.Sequential(nn.Linear(16, 32)), {"skip": "0"}, "no paddle.nn.Linear but those to skip"),
    (lambda: nn.Sequential(nn.Linear(16, 32)), {"backend": "pd"}, "backend='pd'"),
])  # fmt: skip
def test_what_cannot_be_replaced_leaves_all_as_it_was(make, options, message):
    model = make()
    layers = list(model)
    with pytest.raises(ValueError, match=message):
        replace_linear(model, **{"backend": "paddle"} | options)
    assert all(new is old for new, old in zip(model, layers, strict=True))
    assert not any(isinstance(layer, Linear) for layer in model.sublayers())
