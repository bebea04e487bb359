"""PaddleFormers' batches as our decoder layers take them, made before they go to the device."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from paddle_te.models.pipeline import FLASH_MASK
from paddle_te.ops import documents


@dataclass(frozen=True)
class Collator:
    """PaddleFormers' collator `collate`, whose FlashMask rows become the boundaries of documents, cu_seqlens, or
    nothing where each sequence is one document: a layer would have to wait for the rows on the device, and whole causal
    sequences have the faster attention.

    in_pipeline: the rows stay as they are, [b, 1, s, 1], because pipelines need batches of one shape.

    Raises NotImplementedError as `documents.rows_of`.
    """

    collate: Callable
    in_pipeline: bool = False

    def __call__(self, samples):
        batch = self.collate(samples)
        ends = batch.pop(FLASH_MASK, None)
        if ends is None:
            return batch
        # in pretraining on indexed data a sample has one token more than the sequence, and its rows count that
        ends = np.minimum(ends, batch["input_ids"].shape[1])
        rows = documents.rows_of(ends)
        if self.in_pipeline:
            batch[FLASH_MASK] = ends
        elif any(len(row) > 1 for row in rows):
            batch[FLASH_MASK] = documents.cu_seqlens(rows)
        return batch
