"""replace_linear on a model of Paddle's own layers, for tests/gpu and the emulated library."""

import numpy as np
import paddle
from paddle import nn

from paddle_te import fp8
from paddle_te.layers import Linear, replace_linear
from paddle_te.ops.te.counting import count_entry_points
from tests.layer_cases import RECIPES
from tests.te_weights import relative


class TwoLayers(nn.Layer):
    """One with a bias and one without."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 96), nn.Linear(96, 32, bias_attr=False)

    def forward(self, x):
        return self.second(self.first(x))


def _gradients(model, x, dy):
    """{"y": …, "x": …, parameter: …} as float32 arrays, weights [out, in]."""
    x = x.detach()
    x.stop_gradient = False
    y = model(x)
    y.backward(dy)
    found = {"y": y, "x": x.grad}
    for prefix, layer in model.named_sublayers():
        for name, parameter in layer._parameters.items():
            grad = None if parameter is None else parameter.grad
            if grad is not None:
                turned = isinstance(layer, nn.Linear) and grad.ndim == 2
                found[f"{prefix}.{name}"] = grad.transpose([1, 0]) if turned else grad
    return {name: value.astype("float32").numpy() for name, value in found.items()}


def check(device, recipe, seed):
    """te's in bf16, or under a recipe, against Paddle's own in float32."""
    generator = np.random.default_rng(seed)
    paddle.set_device("cpu")
    x, dy = (paddle.to_tensor(generator.standard_normal([32, n]).astype("float32")) for n in (64, 32))
    model = TwoLayers()
    values = {name: value.astype("bfloat16").astype("float32").numpy() for name, value in model.state_dict().items()}
    model.set_state_dict({name: paddle.to_tensor(value) for name, value in values.items()})
    want = _gradients(model, x, dy)
    paddle.set_device(device)
    model = TwoLayers()
    model.set_state_dict({name: paddle.to_tensor(value) for name, value in values.items()})
    model.to(dtype="bfloat16")
    assert replace_linear(model).keys() == {"first", "second"}
    assert all(type(layer) is Linear for layer in model.sublayers())
    x, dy = (paddle.to_tensor(t.numpy()).astype("bfloat16") for t in (x, dy))
    with count_entry_points() as counts, fp8.fp8_autocast(recipe is not None, RECIPES.get(recipe)):
        got = _gradients(model, x, dy)
    assert counts["gemm", "fp8" if recipe else "bfloat16"] == 6
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert relative(got[name], value) < (0.2 if recipe else 2e-2), name
