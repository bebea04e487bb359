"""Recompute activations in a way that keeps fp8 as it was."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from paddle.distributed.fleet.utils import recompute as paddle_recompute

from paddle_te.fp8 import autocast_state, get_autocast_state

P = ParamSpec("P")
T = TypeVar("T")


def recompute(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return function(*args, **kwargs), computed again in backward instead of keeping its activations.

    Tensors that need gradients must be among `args`. The second forward runs under the fp8_autocast of the first:
    backward runs outside the caller's context, and would compute in another precision. It begins no step of fp8's.
    """
    state = get_autocast_state()

    def run(*args: Any) -> T:
        nonlocal state
        with autocast_state(state):
            state = state._replace(in_recompute=True)
            return function(*args, **kwargs)

    return paddle_recompute(run, *args)
