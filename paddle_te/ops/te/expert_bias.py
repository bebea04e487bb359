"""Biases of experts' GEMMs, which are added behind them, and their gradients."""

from __future__ import annotations

from paddle_te.native import experts
from paddle_te.native.experts import Rows
from paddle_te.ops.te.recording import Placeholder, Recorder


def add(rt: Recorder, rows: Rows, bias: Placeholder | None, code: int, prob_of: int = 0) -> None:
    """Add each expert's bias, if any, to its rows. prob_of: the address of each row's factor for the bias."""
    if bias is not None:
        experts.add_bias(rt.te, rt.stream, rows, bias.data_ptr(), prob_of, code)


def gradient(rt: Recorder, rows: Rows, bias: Placeholder | None, code: int, prob_of: int = 0) -> Placeholder | None:
    """Return the gradient of a bias, where it wants one, from the output's gradient `rows`."""
    if bias is None or bias.stop_gradient:
        return None
    sums = rt.empty(bias.shape, bias.dtype)
    experts.sum_rows(rt.te, rt.stream, rows, prob_of, sums.data_ptr(), code)
    return sums


def add_to_probs(rt: Recorder, rows: Rows, bias: Placeholder | None, of_rows: Placeholder, code: int) -> None:
    """Add to the gradients of the rows' probabilities what comes through a bias that these multiply."""
    if bias is not None:
        experts.add_bias_products(rt.te, rt.stream, rows, bias.data_ptr(), of_rows.data_ptr(), code)
