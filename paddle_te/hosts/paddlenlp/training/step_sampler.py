"""Batches of one size, and steps of all their micro-batches, whatever the number of samples is."""

from collections.abc import Iterator

import numpy as np
from paddle.io import DistributedBatchSampler

from paddle_te.data.fillers import WithFillers, filled


class StepSampler(DistributedBatchSampler):
    """Sample a rank's batches of a `WithFillers` dataset.

    The last step of a pass is filled up with fillers, which do not count, or with drop_last left out.

    The order depends on the pass only: it is the same for every number of ranks and micro-batches, and after a resume.
    """

    def __init__(
        self,
        dataset: WithFillers,
        batch_size: int,
        micro_batches: int = 1,
        ranks: int = 1,
        rank: int = 0,
        shuffle: bool = False,
        drop_last: bool = False,
    ) -> None:
        super().__init__(dataset, batch_size, ranks, rank, shuffle, drop_last)
        self.micro_batches = micro_batches
        self.step_size = batch_size * micro_batches * ranks  # samples

    def __len__(self) -> int:
        """Return the batches of a pass, a multiple of micro_batches."""
        steps, left = divmod(len(self.dataset), self.step_size)
        return (steps + (left > 0 and not self.drop_last)) * self.micro_batches

    def __iter__(self) -> Iterator[list[int]]:
        numbers = self._order()
        whole = len(numbers) // self.step_size * self.step_size
        numbers = numbers[:whole] if self.drop_last else filled(numbers, self.step_size)
        for start in range(self.local_rank * self.batch_size, len(numbers), self.batch_size * self.nranks):
            yield numbers[start : start + self.batch_size]

    def _order(self) -> list[int]:
        numbers = list(range(len(self.dataset)))
        if self.shuffle:
            np.random.RandomState(self.epoch).shuffle(numbers)
        return numbers
