"""Activation recompute that keeps fp8 as it was."""

from paddle.distributed.fleet.utils import recompute as paddle_recompute

from paddle_te.fp8 import autocast_state, get_autocast_state


def recompute(function, *args, **kwargs):
    """function(*args, **kwargs), computed again in backward instead of keeping its activations.

    Tensors that need gradients must be among `args`. The second forward runs under the fp8_autocast of the first:
    backward runs outside the caller's context, and would compute in another precision. It begins no step of fp8's.
    """
    state = get_autocast_state()

    def run(*args):
        nonlocal state
        with autocast_state(state):
            state = state._replace(in_recompute=True)
            return function(*args, **kwargs)

    return paddle_recompute(run, *args)
