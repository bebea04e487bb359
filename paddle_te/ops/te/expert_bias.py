"""Biases of experts' GEMMs, which are added behind them, and their gradients."""

from __future__ import annotations

from paddle import Tensor

from paddle_te.native import experts
from paddle_te.native.experts import Rows
from paddle_te.ops.te.runtime import Runtime


def add(rt: Runtime, rows: Rows, bias: Tensor | None, code: int, prob_of: int = 0) -> None:
    """Add each expert's bias, if any, to its rows. prob_of: the address of what multiplies it for each row."""
    if bias is not None:
        experts.add_bias(rt.te, rt.stream, rows, bias.data_ptr(), prob_of, code)


def gradient(rt: Runtime, rows: Rows, bias: Tensor | None, code: int, prob_of: int = 0) -> Tensor | None:
    """Return the gradient of a bias, where it wants one, from the output's gradient `rows`."""
    if bias is None or bias.stop_gradient:
        return None
    sums = rt.empty(bias.shape, bias.dtype)
    experts.sum_rows(rt.te, rt.stream, rows, prob_of, sums.data_ptr(), code)
    return sums


def add_to_probs(rt: Runtime, rows: Rows, bias: Tensor | None, of_rows: Tensor, code: int) -> None:
    """Add to the gradients of the rows' probabilities what comes through a bias that these multiply."""
    if bias is not None:
        experts.add_bias_products(rt.te, rt.stream, rows, bias.data_ptr(), of_rows.data_ptr(), code)
