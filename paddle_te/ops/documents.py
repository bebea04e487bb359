"""Where documents begin and end in packed sequences: Transformer Engine's cu_seqlens, and PaddleNLP's FlashMask.

A row of a batch holds documents one after another. Their lengths, a list a row, sum up to the row's s tokens: padding
counts as a document of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import Tensor

from paddle_te.ops.kept import kept_on

# cu_seqlens are padded to so many documents, or the next power of two: for each number of them te would record its
# programs and cuDNN make its plans anew.
FEWEST = 8


def cu_seqlens(rows: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """Say where the documents of a batch begin and end, its b·s tokens in a row: int32 [documents + 1].

    rows: a list of lengths for each row. Empty documents at the end make the number of documents a power of two.
    """
    ends = np.cumsum([0, *(length for row in rows for length in row)])
    bucket = max(FEWEST, 1 << (len(ends) - 2).bit_length())
    return np.pad(ends, (0, bucket + 1 - len(ends)), mode="edge").astype("int32")


def flash_mask(rows: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """Say the same as FlashMask's rows: int32 [b, 1, s], for each token where its document ends in its row.

    Tokens from there on do not see it. Its shape does not depend on the number of documents: pipelines need that.
    """
    return np.stack([np.repeat(np.cumsum(row), row) for row in rows])[:, None].astype("int32")


def positions(rows: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """Return each token's place in its document, int64 [b, s]."""
    return np.stack([np.concatenate([np.arange(length) for length in row]) for row in rows]).astype("int64")


def check_cu_seqlens(cu_seqlens: Any) -> None:
    """Raise TypeError or ValueError for a tensor that cannot be cu_seqlens.

    None passes. Its numbers are not read.
    """
    if cu_seqlens is None:
        return
    if cu_seqlens.dtype is not paddle.int32:
        raise TypeError(f"cu_seqlens is {cu_seqlens.dtype}; it must be int32")
    if len(cu_seqlens.shape) != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens {list(cu_seqlens.shape)}: it must be [documents + 1]")


def from_flash_mask(mask: Tensor) -> Tensor:
    """Make cu_seqlens, a tensor, of PaddleNLP's attn_mask_startend_row_indices.

    That is what `flash_mask` makes, as [b, 1, s], [b, s] or [b, 1, s, 1]. Tokens at the end of a row that nobody sees,
    which is padding, are a document. Waits for the mask's numbers. Raises NotImplementedError for what is not one
    causal document after another.
    """
    return paddle.to_tensor(cu_seqlens(rows_of(mask.numpy())), place=mask.place)


def boundaries(mask: Tensor | None) -> Tensor | None:
    """Make cu_seqlens, of themselves, [documents + 1], or of a FlashMask, for all layers at once; None of None."""
    return mask if mask is None or mask.ndim == 1 else kept_on(mask, from_flash_mask)


def rows_of(mask: NDArray[np.int32]) -> list[list[int]]:
    """Return the lengths of the documents in each row of a FlashMask, an array.

    Raises NotImplementedError as `from_flash_mask`.
    """
    shape = list(mask.shape[:3] if mask.ndim == 4 and mask.shape[3] == 1 else mask.shape)
    if len(shape) not in (2, 3) or shape[1:-1] not in ([], [1]):
        raise NotImplementedError(
            f"attn_mask_startend_row_indices {list(mask.shape)}: backends pd and te take [b, 1, s], where the document "
            "of each token ends; give other masks as attention_mask"
        )
    return [_lengths(i, ends) for i, ends in enumerate(mask.reshape([shape[0], shape[-1]]))]


def _lengths(row: int, ends: NDArray[np.int32]) -> list[int]:
    """Return the lengths of the documents in one row, from where the document of each token ends."""
    lengths: list[int] = []
    start, s = 0, len(ends)
    while start < s:
        padding = (ends[start:] <= np.arange(start, s)).all()
        end = s if padding else int(ends[start])
        if not padding and (not start < end <= s or (ends[start:end] != end).any()):
            raise NotImplementedError(
                f"attn_mask_startend_row_indices: the tokens of row {row} from {start} on are no causal document, in "
                f"which all are seen until its end: {ends[start : start + 8].tolist()}…; give other masks as "
                "attention_mask"
            )
        lengths.append(end - start)
        start = end
    return lengths
