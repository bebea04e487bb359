"""Compute cross-entropy of 16-bit logits in float32 arithmetic (kernels/cross_entropy.cu).

Addresses are ints, and of 16 bytes' alignment. logits: [rows, columns], this rank's columns of the vocabulary, from
word `first` on. labels: int64 [rows]. stats: float32 [3, rows]. loss: float32 [rows].
"""

from paddle_te.native.interface import Shim, Stream
from paddle_te.native.kernels import ELEMENTS, kernel

_BLOCK = 512  # threads of a row


def cross_entropy_stats(
    te: Shim, stream: Stream, logits: int, labels: int, stats: int, rows: int, columns: int, first: int, dtype: int
) -> None:
    """Write each row's greatest logit, its sum of exp(logit - greatest), and its label's logit to stats.

    The label's logit is 0 where another rank has it.

    Ranks that share the vocabulary: the greatest of the first; the sum of the second, each times exp(its own greatest -
    the common one); the sum of the third.
    """
    _launch(te, stream, "stats", dtype, 8 * _BLOCK, rows, logits, labels, stats, rows, columns, first)


def cross_entropy_loss(
    te: Shim, stream: Stream, labels: int, stats: int, loss: int, rows: int, vocabulary: int, ignore_index: int
) -> None:
    """Write the losses from the stats of the whole vocabulary: 0 for ignore_index, NaN for labels that are no words."""
    function = kernel("cross_entropy_loss", "cross_entropy.cu", stream.capability)
    te.launch(function, -(-rows // _BLOCK), _BLOCK, 0, stream, labels, stats, loss, rows, vocabulary, ignore_index)


def cross_entropy_gradient(
    te: Shim,
    stream: Stream,
    logits: int,
    gradient: int,
    labels: int,
    stats: int,
    dloss: int,
    rows: int,
    columns: int,
    first: int,
    vocabulary: int,
    ignore_index: int,
    dtype: int,
) -> None:
    """Write the gradient of the sum of dloss (float32 [rows]) times the losses: [rows, columns].

    gradient may be the logits' memory. It is 0 in rows of ignore_index, NaN where the loss is.
    """
    arguments = logits, gradient, labels, stats, dloss, rows, columns, first, vocabulary, ignore_index
    _launch(te, stream, "gradient", dtype, 0, rows, *arguments)


def _launch(te: Shim, stream: Stream, what: str, dtype: int, shared: int, rows: int, *arguments: int) -> None:
    function = kernel(f"cross_entropy_{what}_{ELEMENTS[dtype][0]}", "cross_entropy.cu", stream.capability)
    te.launch(function, rows, _BLOCK, shared, stream, *arguments)
