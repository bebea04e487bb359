"""Dropout (Srivastava et al., 2014) of the outputs that layers add to their inputs."""

from __future__ import annotations

from collections.abc import Callable

import paddle.nn.functional as F
from paddle import Tensor

from paddle_te.distributed import TensorParallel, random_numbers


def dropout_add(x: Tensor, residual: Tensor, dropout: float, tp: TensorParallel | None) -> Tensor:
    """Return residual + x; each number of x is 0 with the probability `dropout`, else divided by 1 - dropout.

    tp: ranks with the same tokens drop the same numbers. Under sequence parallelism ranks share the tokens, and each
    drops its own numbers.
    """
    with random_numbers(tp, own=tp is not None and tp.sequence_parallel):
        return residual + F.dropout(x, dropout)


def add_to_residual(
    out: Tensor, residual: Tensor, norm: Callable[..., Tensor] | None, dropout: float, tp: TensorParallel | None
) -> Tensor:
    """Return residual + out.

    norm: a layer that out goes through before, or None. dropout, tp: `dropout_add`'s.
    """
    if norm is None:
        return dropout_add(out, residual, dropout, tp)
    return dropout_add(norm(out), residual, dropout, tp) if dropout else norm(out, residual)
