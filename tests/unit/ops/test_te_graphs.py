"""te's ops let go of what they keep for a backward when the graph goes: if it never runs, and if it fails."""

import gc
import weakref

import paddle
import pytest

from paddle_te.layers import parallel_cross_entropy
from paddle_te.ops.moe import Routing, get_moe_ops
from paddle_te.ops.te.cross_entropy import _Losses
from tests import emulated_te


def route(x):
    probs, routing_map = get_moe_ops("transformer_engine").route(x, Routing(topk=2))
    assert routing_map.stop_gradient and routing_map.dtype is paddle.bool
    return probs


def loss(x):
    return parallel_cross_entropy(x, paddle.zeros([8], "int64"), backend="transformer_engine")


def hooked(x):
    """A tensor with a graph, and a reference to what only this graph holds."""

    class Held: ...

    held, y = Held(), x * 2
    y.register_hook(lambda gradient, held=held: None)
    return y, weakref.ref(held)


@pytest.fixture
def x(monkeypatch):
    emulated_te.install(monkeypatch.setattr)
    x = paddle.randn([8, 4], "float32")
    x.stop_gradient = False
    return x


@pytest.mark.parametrize("op", [route, loss])
def test_without_a_backward(x, op):
    y, held = hooked(x)
    out = op(y)
    del y, out
    gc.collect()
    assert held() is None


def test_after_a_backward_that_fails(x, monkeypatch):
    """As one without memory for its gradient does: Paddle holds its context for good."""

    def fails(*_):
        raise MemoryError("Out of memory error on nvgpu:0")

    monkeypatch.setattr(_Losses, "gradient", fails)
    y, held = hooked(x)
    said = ""
    try:
        loss(y).backward()
    except Exception as error:  # pytest.raises would keep its frames
        said = str(error)
    del y
    assert "Out of memory" in said
    gc.collect()
    assert held() is None
