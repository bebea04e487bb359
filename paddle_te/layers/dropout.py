"""Dropout (Srivastava et al., 2014) of what layers add to their input."""

import paddle.nn.functional as F

from paddle_te.distributed import random_numbers


def dropout_add(x, residual, dropout, tp):
    """residual + x; each number of x becomes 0 with the probability `dropout`, the others are divided by 1 - dropout.

    tp: ranks that all have all tokens drop the same numbers, those that share the tokens (sequence parallelism) others.
    """
    with random_numbers(tp, own=tp is not None and tp.sequence_parallel):
        return residual + F.dropout(x, dropout)


def add_to_residual(out, residual, norm, dropout, tp):
    """residual + out; norm: a layer that out goes through before, or None. dropout, tp: `dropout_add`'s."""
    if norm is None:
        return dropout_add(out, residual, dropout, tp)
    return dropout_add(norm(out), residual, dropout, tp) if dropout else norm(out, residual)
