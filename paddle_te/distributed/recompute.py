"""Activation recompute that keeps fp8 as it was."""

from paddle.distributed.fleet.utils import recompute as paddle_recompute

from paddle_te.fp8 import fp8_autocast, get_fp8_group, get_fp8_recipe, is_fp8_enabled


def recompute(function, *args, **kwargs):
    """Paddle's `recompute`, where the second forward runs under the fp8_autocast of the first.

    Backward runs outside the caller's context: without this the second forward would compute in another precision.
    """
    state = is_fp8_enabled(), get_fp8_recipe(), get_fp8_group()

    def run(*args, **kwargs):
        with fp8_autocast(*state):
            return function(*args, **kwargs)

    return paddle_recompute(run, *args, **kwargs)
