"""Bring things of which ranks hold pieces to one rank each, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import paddle
from paddle import Tensor

from paddle_te.distributed.tensor_parallel import TensorParallel


def balanced(costs: Sequence[float], ranks: int) -> list[int]:
    """Return the rank that is to do each of several works, so that all have about as much: the greatest first."""
    loads, owners = [0.0] * ranks, [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda n: -costs[n]):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += costs[number]
    return owners


@dataclass(frozen=True)
class Exchange:
    """Which rank gets each of several things whole.

    ranks: those that take part. sizes: of each thing, the elements that each rank holds. owners: of each thing.
    """

    ranks: TensorParallel
    sizes: Sequence[Sequence[int]]
    owners: Sequence[int]

    @property
    def own(self) -> list[int]:
        """Return the numbers of the things that this rank gets."""
        return [number for number, owner in enumerate(self.owners) if owner == self.ranks.rank]

    def _order(self) -> list[int]:
        """Return the things' numbers in the order in which this rank sends their pieces: by owner."""
        return sorted(range(len(self.owners)), key=lambda number: self.owners[number])

    def _counts(self) -> tuple[list[int], list[int]]:
        """Return the elements that this rank sends to each rank, and those that it gets from each, to gather."""
        size, mine = self.ranks.size, self.ranks.rank
        sent = [
            sum(of[mine] for of, owner in zip(self.sizes, self.owners, strict=True) if owner == r) for r in range(size)
        ]
        return sent, [sum(self.sizes[number][rank] for number in self.own) for rank in range(size)]

    def gather(self, pieces: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return all ranks' pieces, flat, of each thing that this rank gets. A collective.

        pieces: this rank's of all things, flat, of one dtype; some may be empty.
        """
        sent, received = self._counts()
        to_send = _joined([pieces[number] for number in self._order()], pieces[0].dtype)
        arrived = self.ranks.all_to_all(to_send, sent, received)
        of_ranks = parted(arrived, [self.sizes[number][rank] for rank in range(self.ranks.size) for number in self.own])
        return [of_ranks[n :: len(self.own)] for n in range(len(self.own))]

    def scatter(self, pieces: Sequence[Sequence[Tensor]], dtype: paddle.dtype) -> list[Tensor]:
        """Return this rank's pieces of all things: the inverse of `gather`. A collective.

        pieces: all ranks', flat, of each thing that this rank has; none where there are fewer things than ranks. dtype:
        all pieces'.
        """
        sent, received = self._counts()
        to_send = [of_thing[rank] for rank in range(self.ranks.size) for of_thing in pieces]
        arrived = self.ranks.all_to_all(_joined(to_send, dtype), received, sent)
        order = self._order()
        found = parted(arrived, [self.sizes[number][self.ranks.rank] for number in order])
        return [piece for _, piece in sorted(zip(order, found, strict=True), key=lambda numbered: numbered[0])]


def _joined(pieces: Sequence[Tensor], dtype: paddle.dtype) -> Tensor:
    there = [piece for piece in pieces if piece.size]
    return paddle.concat(there) if there else paddle.empty([0], dtype)


def parted(tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Return views of so many rows each; Paddle's split copies them."""
    return [tensor[first:last] for first, last in pairwise([0, *accumulate(sizes)])]
