"""Both backends have the functions of `ops.interface.Ops`, with its arguments: layers call them without asking which
they have. mypy compares the types in full; here names, order, defaults and annotations."""

import inspect

import pytest

from paddle_te.ops import get_ops
from paddle_te.ops.interface import Ops


def functions_of(namespace):
    return {name: value for name, value in vars(namespace).items() if inspect.isfunction(value) and name[0] != "_"}


@pytest.mark.parametrize("backend", ["paddle", "transformer_engine"])
def test_a_backend_is_the_interface(backend):
    interface, found = functions_of(Ops), functions_of(get_ops(backend))
    assert sorted(found) == sorted(interface)
    for name, function in interface.items():
        _, *want = inspect.signature(function, eval_str=True).parameters.values()
        got = inspect.signature(found[name], eval_str=True)
        assert [*got.parameters.values()] == want, name
        assert got.return_annotation == inspect.signature(function, eval_str=True).return_annotation, name
