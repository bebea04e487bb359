"""Both backends have the same functions with the same arguments: layers call them without asking which they have."""

import inspect

import pytest

from paddle_te.ops import get_ops

NAMES = sorted({*get_ops("paddle").__all__} | {*get_ops("transformer_engine").__all__})


def signature(backend, name):
    """[(name, kind, default)] of a function's arguments."""
    parameters = inspect.signature(getattr(get_ops(backend), name)).parameters.values()
    return [(parameter.name, parameter.kind.name, parameter.default) for parameter in parameters]


@pytest.mark.parametrize("name", NAMES)
def test_the_backends_take_the_same_arguments(name):
    assert signature("paddle", name) == signature("transformer_engine", name)
