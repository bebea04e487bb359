"""Fill up a step, or a batch, with samples that do not count, where a pass over the data ends.

All ranks then have batches of one size, and each step all its micro-batches, whatever the number of samples. No label
of a filler counts, so that it adds nothing to the loss or to a gradient where these are means over labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any, Protocol

from paddle_te.data.questions import IGNORED


class Filler(int):
    """The number of the sample whose tokens a filler has."""


def filled(numbers: Sequence[int], multiple: int) -> list[int]:
    """Return the samples' numbers with fillers behind them, so that their count is a multiple of `multiple`.

    The fillers repeat the samples of the last step: no other numbers come into its GEMMs than its own.
    """
    left = len(numbers) % multiple
    last = numbers[len(numbers) - left :]
    return [*numbers, *map(Filler, islice(cycle(last), multiple - left if left else 0))]


class Dataset(Protocol):
    """Samples by their numbers."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> dict[str, Any]: ...


class WithFillers:
    """A dataset of samples {"labels": [n], …} that also has fillers, by their numbers."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> dict[str, Any]:
        sample = self.dataset[int(number)]
        if isinstance(number, Filler):
            sample = {**sample, "labels": [IGNORED] * len(sample["labels"])}
        return sample
