"""Compute cross-entropy of 16-bit logits in float32 arithmetic (kernels/cross_entropy.cu).

Addresses are ints, and of 16 bytes' alignment. logits: [rows, columns]. labels: int64 [rows]. stats: float32 [3, rows].
loss: float32 [rows].
"""

from typing import NamedTuple

from paddle_te.native.interface import Shim, Stream
from paddle_te.native.kernels import ELEMENTS, kernel

_BLOCK = 512  # threads of a row


class Sizes(NamedTuple):
    """Sizes of logits.

    rows. columns: this rank's of the vocabulary, from word `first` on. vocabulary: words of all ranks. ignore_index:
    the label of rows without a loss. dtype: of the logits.
    """

    rows: int
    columns: int
    first: int
    vocabulary: int
    ignore_index: int
    dtype: int


def cross_entropy_stats(te: Shim, stream: Stream, logits: int, labels: int, stats: int, sizes: Sizes) -> None:
    """Write each row's greatest logit, its sum of exp(logit - greatest), and its label's logit to stats.

    The label's logit is 0 where another rank has it.

    Ranks that share the vocabulary: the greatest of the first; the sum of the second, each times exp(its own greatest -
    the common one); the sum of the third.
    """
    _launch(te, stream, "stats", sizes, 8 * _BLOCK, logits, labels, stats, *sizes[:3])


def cross_entropy_loss(te: Shim, stream: Stream, labels: int, stats: int, loss: int, sizes: Sizes) -> None:
    """Write the losses from the stats of the whole vocabulary: 0 for ignore_index, NaN for labels that are no words."""
    function = kernel("cross_entropy_loss", "cross_entropy.cu", stream.capability)
    arguments = labels, stats, loss, sizes.rows, sizes.vocabulary, sizes.ignore_index
    te.launch(function, -(-sizes.rows // _BLOCK), _BLOCK, 0, stream, *arguments)


def cross_entropy_gradient(
    te: Shim,
    stream: Stream,
    logits: int,
    gradient: int,
    labels: int,
    stats: int,
    dloss: int,
    sizes: Sizes,
) -> None:
    """Write the gradient of the sum of dloss (float32 [rows]) times the losses: [rows, columns].

    gradient may be the logits' memory. It is 0 in rows of ignore_index, NaN where the loss is.
    """
    _launch(te, stream, "gradient", sizes, 0, logits, gradient, labels, stats, dloss, *sizes[:5])


def _launch(te: Shim, stream: Stream, what: str, sizes: Sizes, shared: int, *arguments: int) -> None:
    function = kernel(f"cross_entropy_{what}_{ELEMENTS[sizes.dtype][0]}", "cross_entropy.cu", stream.capability)
    te.launch(function, sizes.rows, _BLOCK, shared, stream, *arguments)
