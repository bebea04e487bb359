"""PaddleFormers' batches as our decoder layers take them, made before they go to the device."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from paddle.io import IterableDataset

from paddle_te.data.questions import IGNORED
from paddle_te.models.pipeline import FLASH_MASK
from paddle_te.ops import documents


@dataclass(frozen=True)
class Collator:
    """PaddleFormers' collator `collate`, whose FlashMask rows become the boundaries of documents, cu_seqlens.

    They become nothing where each sequence is one document: a layer would have to wait for the rows on the device,
    and whole causal sequences have the faster attention.

    in_pipeline: the rows stay as they are, [b, 1, s, 1], because pipelines need batches of one shape.

    Raises NotImplementedError as `documents.rows_of`.
    """

    collate: Callable[[Sequence[Any]], dict[str, Any]]
    in_pipeline: bool = False

    def __call__(self, samples: Sequence[Any]) -> dict[str, Any]:
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


class Filled(IterableDataset[list[Any]]):
    """Samples of an evaluation, lists of packed sequences, and fillers behind them that have no label.

    Their number is a multiple of `multiple`: PaddleFormers 1.2.0 would leave out the last ones, or take some twice.
    """

    def __init__(self, samples: Any, multiple: int) -> None:
        super().__init__()
        self.samples, self.multiple = samples, multiple

    def __len__(self) -> int:  # type: ignore[override]  # Paddle's raises, PaddleFormers asks
        return len(self.samples)

    def __iter__(self) -> Iterator[list[Any]]:
        count = 0
        last: list[Any] = []
        for sample in self.samples:
            if sample is not last:  # PaddleFormers 1.2.0 gives the last one twice where nothing is packed
                count, last = count + 1, sample
                yield sample
        filler = [replace(sequence, labels=[IGNORED] * len(sequence.labels)) for sequence in last]
        for _ in range(-count % self.multiple):
            yield filler
