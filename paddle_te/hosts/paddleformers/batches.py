"""PaddleFormers' batches as our decoder layers take them, made before they go to the device."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from paddle_te.ops import documents

FLASH_MASK = "attn_mask_startend_row_indices"


@dataclass(frozen=True)
class Collator:
    """PaddleFormers' collator `collate`, whose FlashMask rows become the boundaries of documents, cu_seqlens, or
    nothing where each sequence is one document: a layer would have to wait for the rows on the device, and whole causal
    sequences have the faster attention.

    Raises NotImplementedError as `documents.rows_of`.
    """

    collate: Callable

    def __call__(self, samples):
        batch = self.collate(samples)
        ends = batch.pop(FLASH_MASK, None)
        if ends is None:
            return batch
        # in pretraining on indexed data a sample has one token more than the sequence, and its rows count that
        rows = documents.rows_of(np.minimum(ends, batch["input_ids"].shape[1]))
        if any(len(row) > 1 for row in rows):
            batch[FLASH_MASK] = documents.cu_seqlens(rows)
        return batch
