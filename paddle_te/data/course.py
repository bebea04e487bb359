"""Say which samples each step of a run reads, whatever its batch size was before it was resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from paddle_te.data.fillers import filled

Order: TypeAlias = Callable[[int], Sequence[int] | npt.NDArray[np.int64]]  # of a pass's samples, from its number


@dataclass(frozen=True)
class Course:
    """The steps of a run that goes through `samples` samples, pass after pass, `batch` of them in each step.

    The run goes on behind step `first`, up to which `consumed` samples were used up, by steps of any size. Where fewer
    samples than a step's are left of a pass, they make a last, smaller step, or with `drop_last` are left out; both
    times they count as used up.
    """

    samples: int
    batch: int
    first: int = 0
    consumed: int = 0
    drop_last: bool = True

    @property
    def steps_a_pass(self) -> int:
        """Steps of a whole pass."""
        return self._steps(self.samples)

    def _steps(self, samples: int) -> int:
        return samples // self.batch if self.drop_last else -(-samples // self.batch)

    def place(self, step: int) -> tuple[int, int]:
        """Return (passes completed, samples used up in the next one) when `step`, not before `first`, is done."""
        done, start = divmod(self.consumed, self.samples)
        steps, rest = step - self.first, self._steps(self.samples - start)
        if steps < rest:
            return done, start + steps * self.batch
        passes, steps = divmod(steps - rest, self.steps_a_pass)
        return done + 1 + passes, steps * self.batch

    def consumed_at(self, step: int) -> int:
        """Return the samples used up when `step` is done, what passes have left out included."""
        done, start = self.place(step)
        return done * self.samples + start

    def epoch(self, step: int) -> float:
        """Return the passes that are done when `step` is, with the fraction of the next one."""
        return self.consumed_at(step) / self.samples

    def last_step(self, passes: float) -> int:
        """Return the step with which so many passes, whole or not, are done; `first` if they are already."""
        done, start = self.place(self.first)
        whole = int(passes)
        left = self._steps(self.samples - start) + (whole - done - 1) * self.steps_a_pass
        return self.first + max(left + int((passes - whole) * self.steps_a_pass), 0)


def shuffled(samples: int, seed: Any) -> Order:
    """Return the order of the samples in a pass, from its number; the same on every machine."""
    return lambda done: np.random.default_rng([seed, done]).permutation(samples)


def in_order(samples: int) -> Order:
    """Return the samples as the dataset has them, in each pass."""
    return lambda done: range(samples)


def micro_batches(course: Course, order: Order, done: int, start: int, share: Share) -> Iterator[list[int]]:
    """Yield the samples of one rank's micro-batches from a place in a pass to the pass's end, a list for each.

    order: takes the pass's number, as `shuffled` or `in_order` give one. done, start: as `Course.place`. share: this
    rank's `Share`. Fillers (`data.fillers`) fill up the pass's last step.
    """
    samples = order(done)
    for first in range(start, course.samples, course.batch):
        step = [int(number) for number in samples[first : first + course.batch]]
        if len(step) < course.batch and course.drop_last:
            return
        step = filled(step, course.batch)
        for mine in range(share.rank * share.size, course.batch, share.size * share.ranks):
            yield step[mine : mine + share.size]


@dataclass(frozen=True)
class Share:
    """A rank's part of each step: `accumulation` micro-batches of `size` samples, of which `ranks` read one each."""

    size: int
    accumulation: int
    ranks: int = 1
    rank: int = 0

    @property
    def batch(self) -> int:
        """Samples of a step, over all ranks."""
        return self.size * self.accumulation * self.ranks
