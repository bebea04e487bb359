"""The norm before the head: PaddleNLP's layer with its parameters, which te computes."""

import numpy as np
import paddle
import pytest

from paddle_te.hosts.paddlenlp.families import model_class
from paddle_te.ops.te.counting import count_entry_points
from tests import emulated_te
from tests.bfloat16 import truncated
from tests.layer_cases import bf16_bounds
from tests.te_weights import relative
from tests.unit.hosts.paddlenlp.native import FAMILIES, tiny_config


def reference(x, dy, epsilon, weight, bias=None):
    """[y, dx, dweight], and with a bias dbias, in float64."""
    x, dy, weight = (values.astype("float64") for values in (x, dy, weight))
    centered = (lambda values: values) if bias is None else lambda values: values - values.mean(-1, keepdims=True)
    x = centered(x)
    rsigma = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)
    normed, dnormed = x * rsigma, dy * weight
    dx = rsigma * centered(dnormed - normed * (dnormed * normed).mean(-1, keepdims=True))
    found = [normed * weight, dx, (dy * normed).sum((0, 1))]
    return found if bias is None else [found[0] + bias, *found[1:], dy.sum((0, 1))]


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("family", FAMILIES)
def test_as_in_float64_by_tes_kernels(seed, monkeypatch, family, frozen):
    emulated_te.install(monkeypatch.setattr)
    generator = np.random.default_rng(seed)
    model = model_class(config := tiny_config(family, transformer_engine_backend="transformer_engine"))(config)
    base = getattr(model, model.base_model_prefix)
    norm = (base.decoder if family == "gpt" else base).norm.to(dtype="bfloat16")
    parameters = list(norm.parameters())
    values = [truncated(shift + generator.standard_normal(64, "float32")) for shift in (1, 0)[: len(parameters)]]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.set_value(paddle.to_tensor(value).astype("bfloat16"))
        parameter.stop_gradient = frozen
    x, dy = (truncated(3 * generator.standard_normal([2, 24, 64], "float32")) for _ in range(2))
    given = paddle.to_tensor(x).astype("bfloat16").detach()
    given.stop_gradient = False
    with count_entry_points() as counts:
        y = norm(given)
        y.backward(paddle.to_tensor(dy).astype("bfloat16"))
    kind = "layernorm" if family == "gpt" else "rmsnorm"
    assert {name: count for (name, _), count in counts.items()} == {f"{kind}_fwd": 1, f"{kind}_bwd": 1}
    epsilon = 1e-5 if family == "gpt" else config.rms_norm_eps
    got = [y, given.grad, *(parameter.grad for parameter in parameters if not frozen)]
    assert all(parameter.grad is None for parameter in parameters) == frozen
    for tensor, expected in zip(got, reference(x, dy, epsilon, *values), strict=not frozen):
        assert tensor.dtype == paddle.bfloat16
        assert relative(tensor.astype("float32").numpy(), expected) < bf16_bounds("norm")[0]
