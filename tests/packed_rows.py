"""Batches of packed documents of fresh random lengths."""

import numpy as np


def random_rows(generator, rows, tokens):
    """Lengths of the documents of each row: a row is one whole document, another has one of a single token."""
    assert rows > 1 < tokens
    result = [[tokens]]
    while len(result) < rows:
        cuts = {0, 1, tokens, *generator.integers(1, tokens, generator.integers(1, 5)).tolist()}
        result.append(generator.permutation(np.diff(sorted(cuts))).tolist())
    return [result[i] for i in generator.permutation(rows)]


def spans(rows):
    """(row, start, end) of each document in its row."""
    for i, row in enumerate(rows):
        ends = np.cumsum([0, *row]).tolist()
        yield from ((i, start, end) for start, end in zip(ends, ends[1:], strict=False))
