"""Samples that fill up a step, or a batch, where a pass over the data ends, and do not count.

All ranks then have batches of one size, and each step all its micro-batches, whatever the number of samples. No label
of a filler counts, so that it adds nothing to the loss or to a gradient where these are means over labels.
"""

from itertools import cycle, islice

from paddle_te.data.questions import IGNORED


class Filler(int):
    """The number of the sample whose tokens a filler has."""


def filled(numbers, multiple):
    """A list of the samples' numbers with fillers behind them, so that their count is a multiple of `multiple`.

    The fillers repeat the samples of the last step: no other numbers come into its GEMMs than its own.
    """
    left = len(numbers) % multiple
    last = numbers[len(numbers) - left :]
    return [*numbers, *map(Filler, islice(cycle(last), multiple - left if left else 0))]


class WithFillers:
    """A dataset of samples {"labels": [n], …} that also has fillers, by their numbers."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, number):
        sample = self.dataset[int(number)]
        if isinstance(number, Filler):
            sample = {**sample, "labels": [IGNORED] * len(sample["labels"])}
        return sample
