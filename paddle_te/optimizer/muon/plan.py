"""Which matrices are made orthogonal together, and by which rank each."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import paddle
from paddle import Tensor

from paddle_te.distributed.tensor_parallel import TensorParallel
from paddle_te.ops.interface import Ops
from paddle_te.optimizer.holding import Shares
from paddle_te.optimizer.muon.exchange import Exchange, balanced, parted
from paddle_te.optimizer.muon.matrices import Unit
from paddle_te.planner.muon import CHUNK, NEWTON_SCHULZ_STEPS, newton_schulz_flops
from paddle_te.weights.dims import Dims
from paddle_te.weights.layout import SPLIT_AXIS, Part

Precision = Literal["bfloat16", "float32"]  # of the updates that Newton–Schulz reads and gives


@dataclass(frozen=True)
class Key:
    """A matrix among those that a rank works on, or a stack of experts': the number of its Unit, and the part."""

    unit: int
    part: Part


@dataclass(frozen=True)
class Piece:
    """This rank's elements of a Unit: where they begin among its elements of the weight, and how many."""

    weight: str
    begin: int
    size: int


@dataclass(frozen=True)
class TensorRanks:
    """What is known of whole matrices: their shapes, and the tensor parallel ranks that divide them; tp: or None."""

    dims: Dims
    tp: TensorParallel | None

    @property
    def degree(self) -> int:
        """Return the number of ranks."""
        return 1 if self.tp is None else self.tp.size

    def divides(self, part: Part) -> bool:
        """Return whether each rank has a piece of a matrix, and not all of it."""
        return self.dims.splits(part, self.degree)

    def join(self, part: Part, pieces: Sequence[Tensor]) -> Tensor:
        """Return a matrix of the ranks' pieces, flat, in their order."""
        return paddle.concat([piece.reshape(self.shape(part)) for piece in pieces], SPLIT_AXIS[part.name] or 0)

    def divide(self, part: Part, matrix: Tensor) -> list[Tensor]:
        """Return the ranks' pieces, flat, of a matrix."""
        return [piece.reshape([-1]) for piece in matrix.split(self.degree, SPLIT_AXIS[part.name] or 0)]

    def shape(self, part: Part) -> list[int]:
        """Return the shape of a rank's piece."""
        return [*self.dims.part_shape(part, self.degree)]

    def exchange(self, parts: Sequence[Part]) -> Exchange | None:
        """Return who gets which of the matrices that the ranks divide; None without any."""
        if self.tp is None or not parts:
            return None
        sizes = [[math.prod(self.shape(part))] * self.degree for part in parts]
        costs = [newton_schulz_flops(*self.dims.part_shape(part)) for part in parts]
        return Exchange(self.tp, sizes, balanced(costs, self.degree))


def chunks_of(units: Sequence[Sequence[Unit]], shares: Mapping[str, Shares], ranks: TensorRanks) -> Iterator[Chunk]:
    """Yield Chunks of the weights, each of which has some Units, in their order.

    shares: of the weights of which sharding ranks have slices. Ranks that divide weights yield the same Chunks of them.
    """

    def share_of(of_weight: Sequence[Unit]) -> Shares | None:
        return shares.get(of_weight[0].weight)

    for _, alike in groupby(
        units, key=lambda of_weight: id(share.ranks.group) if (share := share_of(of_weight)) else 0
    ):
        chunk: list[Unit] = []
        for of_weight in alike:
            chunk += of_weight
            share = share_of(of_weight)
            if sum(unit.size for unit in chunk) >= CHUNK * (share.ranks.size if share else 1):
                yield Chunk.of(chunk, shares, ranks)
                chunk = []
        if chunk:
            yield Chunk.of(chunk, shares, ranks)


@dataclass(frozen=True)
class Chunk:
    """Weights whose matrices are made orthogonal at a time, so that memory is needed for so many only.

    pieces: what this rank has of each Unit. sharded: who gets which Unit whole; None: each rank has its own whole. own:
    the Units that this rank gets. keys: the matrices in them. divided: those of these that tensor parallel ranks
    divide. split: who gets which of these.
    """

    pieces: Sequence[Piece]
    sharded: Exchange | None
    own: Sequence[Unit]
    keys: Sequence[Key]
    divided: Sequence[Key]
    split: Exchange | None
    ranks: TensorRanks

    @classmethod
    def of(cls, units: Sequence[Unit], shares: Mapping[str, Shares], ranks: TensorRanks) -> Chunk:
        """Return the Chunk of Units that the same ranks divide."""
        pieces, sharded, own = [Piece(unit.weight, unit.begin, unit.size) for unit in units], None, units
        if (share := shares.get(units[0].weight)) is not None:
            pieces = [_piece(unit, shares[unit.weight]) for unit in units]
            sharded = _exchange(units, shares, share.ranks)
            own = [units[number] for number in sharded.own]
        keys = [Key(number, part) for number, unit in enumerate(own) for part in ranks.dims.parts(unit.place)]
        divided = [key for key in keys if ranks.divides(key.part)]
        return cls(pieces, sharded, own, keys, divided, ranks.exchange([key.part for key in divided]), ranks)

    @property
    def sizes(self) -> dict[str, int]:
        """Return {weight's name: elements of it that this rank has}, in order, without weights that it has none of."""
        return {piece.weight: piece.begin + piece.size for piece in self.pieces if piece.size}

    def orthogonal(self, updates: Mapping[str, Tensor], ops: Ops, dtype: Precision) -> dict[str, Tensor]:
        """Return the updates, this rank's elements of each weight, flat, made orthogonal and scaled. Collective.

        dtype: of all ranks' updates, of which this rank may have none. Behind a weight's last element there may be
        padding, which the result does not have.
        """
        pieces = [_cut(updates, piece, dtype) for piece in self.pieces]
        whole = pieces if self.sharded is None else [paddle.concat(each) for each in self.sharded.gather(pieces)]
        results = self._of_units([each.reshape(unit.shape) for each, unit in zip(whole, self.own, strict=True)], ops)
        flat = [result.reshape([-1]) for result in results]
        if self.sharded is not None:
            counts = [self.sharded.sizes[number] for number in self.sharded.own]
            back = [parted(each, sizes) for each, sizes in zip(flat, counts, strict=True)]
            flat = self.sharded.scatter(back, pieces[0].dtype)
        found = defaultdict(list)
        for piece, result in zip(self.pieces, flat, strict=True):
            if piece.size:
                found[piece.weight].append(result)
        return {
            name: of_weight[0] if len(of_weight) == 1 else paddle.concat(of_weight) for name, of_weight in found.items()
        }

    def _of_units(self, units: Sequence[Tensor], ops: Ops) -> list[Tensor]:
        """Return what becomes of whole Units, which tensor parallel ranks may divide."""
        dims = self.ranks.dims
        apart = [dims.take_apart(unit.place, tensor) for unit, tensor in zip(self.own, units, strict=True)]
        mine = {key: apart[key.unit][key.part] for key in self.keys}
        if self.split is None:
            done = _newton_schulz(mine, ops)
        else:
            pieces = [mine.pop(key).reshape([-1]) for key in self.divided]
            gathered = self.split.gather(pieces)
            got = [self.divided[number] for number in self.split.own]
            done = _newton_schulz(
                mine | {k: self.ranks.join(k.part, each) for k, each in zip(got, gathered, strict=True)}, ops
            )
            back = self.split.scatter([self.ranks.divide(key.part, done.pop(key)) for key in got], pieces[0].dtype)
            done |= {
                key: each.reshape(self.ranks.shape(key.part)) for key, each in zip(self.divided, back, strict=True)
            }
        return [
            dims.put_together(unit.place, {key.part: done[key] for key in self.keys if key.unit == number})
            for number, unit in enumerate(self.own)
        ]


def _cut(updates: Mapping[str, Tensor], piece: Piece, dtype: Precision) -> Tensor:
    """Return a Piece of the updates; one without elements is a view of none of them."""
    if not piece.size:
        return paddle.empty([0], dtype)
    return updates[piece.weight][piece.begin : piece.begin + piece.size]


def _piece(unit: Unit, share: Shares) -> Piece:
    first, last = share.overlap(share.ranks.rank, unit.begin, unit.size)
    return Piece(unit.weight, first - share.ranges[share.ranks.rank][0], last - first)


def _exchange(units: Sequence[Unit], shares: Mapping[str, Shares], ranks: TensorParallel) -> Exchange:
    overlaps = [[shares[unit.weight].overlap(n, unit.begin, unit.size) for n in range(ranks.size)] for unit in units]
    sizes = [[last - first for first, last in of_unit] for of_unit in overlaps]
    costs = [math.prod(unit.shape[:-2]) * newton_schulz_flops(*unit.shape[-2:]) for unit in units]
    return Exchange(ranks, sizes, balanced(costs, ranks.size))


def _newton_schulz(matrices: Mapping[Key, Tensor], ops: Ops) -> dict[Key, Tensor]:
    """Return the matrices made orthogonal, times 0.2 · sqrt(max(rows, columns)); those of one shape in one call."""
    alike: defaultdict[tuple[int, ...], list[Key]] = defaultdict(list)
    done: dict[Key, Tensor] = {}
    for key, matrix in matrices.items():
        alike[tuple(matrix.shape[-2:])].append(key)
    for shape, keys in alike.items():
        given = [matrices[key] for key in keys]
        results = ops.newton_schulz(given, NEWTON_SCHULZ_STEPS, 0.2 * math.sqrt(max(shape)))
        counts = [math.prod(each.shape[:-2]) for each in given]
        found = parted(results, counts)
        done |= {key: part.reshape(each.shape) for key, part, each in zip(keys, found, given, strict=True)}
    return done
