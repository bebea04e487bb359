"""Both backends have the functions of `ops.interface.Ops`, with its arguments: layers call them without asking which
they have. mypy compares the types in full; here names, order, defaults and annotations."""

import inspect

import pytest

from paddle_te.ops import get_ops
from paddle_te.ops.interface import Ops

FUNCTIONS = {name: function for name, function in vars(Ops).items() if inspect.isfunction(function) and name[0] != "_"}


@pytest.mark.parametrize("backend", ["paddle", "transformer_engine"])
def test_a_backend_is_the_interface(backend):
    assert sorted(get_ops(backend).__all__) == sorted(FUNCTIONS)
    for name, function in FUNCTIONS.items():
        _, *want = inspect.signature(function, eval_str=True).parameters.values()
        got = inspect.signature(getattr(get_ops(backend), name), eval_str=True)
        assert [*got.parameters.values()] == want, name
        assert got.return_annotation == inspect.signature(function, eval_str=True).return_annotation, name
