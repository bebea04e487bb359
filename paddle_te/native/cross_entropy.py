"""Cross-entropy of 16-bit logits in float32 arithmetic (kernels/cross_entropy.cu).

Addresses are ints, and of 16 bytes' alignment. logits: [rows, columns], this rank's columns of the vocabulary, from
word `first` on. labels: int64 [rows]. stats: float32 [3, rows]. loss: float32 [rows].
"""

from paddle_te.native.kernels import ELEMENTS, kernel

_BLOCK = 512  # threads of a row


def cross_entropy_stats(te, stream, logits, labels, stats, rows, columns, first, dtype):
    """stats = each row's greatest logit, sum of exp(logit - greatest), and its label's logit, 0 where that is not here.

    Ranks that share the vocabulary: the greatest of the first; the sum of the second, each times exp(its own greatest -
    the common one); the sum of the third.
    """
    _launch(te, stream, "stats", dtype, 8 * _BLOCK, rows, logits, labels, stats, rows, columns, first)


def cross_entropy_loss(te, stream, labels, stats, loss, rows, vocabulary, ignore_index):
    """The losses from the stats of the whole vocabulary: 0 for ignore_index, NaN for labels that are no words."""
    function = kernel("cross_entropy_loss", "cross_entropy.cu", stream.capability)
    te.launch(function, -(-rows // _BLOCK), _BLOCK, 0, stream, labels, stats, loss, rows, vocabulary, ignore_index)


def cross_entropy_gradient(
    te, stream, logits, gradient, labels, stats, dloss, rows, columns, first, vocabulary, ignore_index, dtype
):
    """gradient = that of the sum of dloss (float32 [rows]) times the losses: [rows, columns], which may be the logits'
    memory. 0 in rows of ignore_index, NaN where the loss is."""
    arguments = logits, gradient, labels, stats, dloss, rows, columns, first, vocabulary, ignore_index
    _launch(te, stream, "gradient", dtype, 0, rows, *arguments)


def _launch(te, stream, what, dtype, shared, rows, *arguments):
    function = kernel(f"cross_entropy_{what}_{ELEMENTS[dtype][0]}", "cross_entropy.cu", stream.capability)
    te.launch(function, rows, _BLOCK, shared, stream, *arguments)
