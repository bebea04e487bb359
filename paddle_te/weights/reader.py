"""Reads a checkpoint in another layout and another degree of tensor parallelism than it is stored in."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np

from paddle_te.weights.adapters.files import Adapter
from paddle_te.weights.adapters.merging import merged
from paddle_te.weights.dims import concat
from paddle_te.weights.folder import Checkpoint, open_checkpoint
from paddle_te.weights.layout import SPLIT_AXIS, Layout, Part, Place
from paddle_te.weights.output_files import pieces
from paddle_te.weights.tensors import Array, CheckpointError, StoredTensor


def read_weights(
    folder: str | Path,
    target: Layout,
    names: Collection[str],
    tensor_parallel_degree: int = 1,
    tensor_parallel_rank: int = 0,
) -> Iterator[tuple[str, Array]]:
    """Stream a checkpoint's weights in another layout, tensor by tensor: nothing is written.

    Args:
        folder: a checkpoint in any layout, degrees and format.
        target: the Layout to give them in.
        names: the wanted tensors' names in it; of others nothing is read.
        tensor_parallel_degree, tensor_parallel_rank: whose share to give.

    Yields (name, numpy array): bfloat16 as its bits, uint16. Raises CheckpointError as `open_checkpoint`, and for
    degrees that the model cannot be split into.
    """
    yield from read_tensors(open_checkpoint(folder), target, names, tensor_parallel_degree, tensor_parallel_rank)


def read_tensors(
    checkpoint: Checkpoint,
    target: Layout,
    names: Collection[str],
    tensor_parallel_degree: int = 1,
    tensor_parallel_rank: int = 0,
    numbers: bool = False,
) -> Iterator[tuple[str, Array]]:
    """Stream an opened Checkpoint as `read_weights` does: its weights, or one kind of their state (`open_optimizer`).

    numbers: that kind is a power of beta, of which every weight has one number, [1].
    """
    reader = Reader(checkpoint, tensor_parallel_degree)
    for place in target.tensors(checkpoint.dims.spec):
        name = target.full_name(place)
        if name not in names or not reader.has(place):
            continue
        if numbers:
            yield name, reader.number(tensor_parallel_rank, place)[0]
        else:
            shape = checkpoint.dims.slot_shape(place, tensor_parallel_degree)
            array = concat(reader.blocks(tensor_parallel_rank, place), 0)
            yield name, np.ascontiguousarray(array).reshape(shape)
            del array  # before the next one is read


class Reader:
    """Gather a target rank's share of each part of the model, from whichever source ranks hold it.

    Where the checkpoint is read with an adapter, the tensors that this changes are float32: who takes them rounds once.
    """

    def __init__(self, checkpoint: Checkpoint, degree: int) -> None:
        self._dims, self._source_degree, self._degree = checkpoint.dims, checkpoint.tp, degree
        self._adapter = checkpoint.adapter
        self._pieces = []  # of each source rank, all its pipeline stages together
        for tp in range(checkpoint.tp):
            ranks = [rank for rank in checkpoint.ranks.values() if (rank.tp or 0) == tp]
            tensors = {name: ref for rank in ranks for name, ref in rank.tensors.items()}
            self._pieces.append(pieces(checkpoint, tensors, tp))
        self._kept: dict[StoredTensor, dict[Part, Array]] = {}  # by tensor its parts

    def has(self, place: Place) -> bool:
        """Return whether the checkpoint has a Place's parts: one with tied embeddings may have no lm_head."""
        return all(part in self._pieces[self._holder(part)] for part in self._dims.parts(place))

    def blocks(self, rank: int, place: Place) -> list[Array]:
        """Return the target rank's stored tensor of a Place, as arrays whose bytes follow one another."""
        wanted = self._dims.parts(place, self._degree, rank)
        # what other ranks, or the Place of another part of it, will ask for again
        self._kept = {ref: parts for ref, parts in self._kept.items() if not parts.keys().isdisjoint(wanted)}
        parts = {part: self._part(rank, part) for part in wanted}
        if self._adapter is not None and self._adapter.touches(wanted):
            parts = {part: self._merged(self._adapter, rank, part, array) for part, array in parts.items()}
        return self._dims.pieces(place, parts)

    def number(self, rank: int, place: Place) -> list[Array]:
        """Return the number [1] that belongs to a Place's tensors, a power of beta: the same for all its parts."""
        wanted = self._dims.parts(place, self._degree, rank)
        first, *others = dict.fromkeys(self._pieces[self._holder(part)][part][0] for part in wanted)
        number = first.read()
        if any(other.read().tobytes() != number.tobytes() for other in others):
            raise CheckpointError(f"{first.path}: {place.slot.name}: parts of different age")
        return [number]

    def _merged(self, adapter: Adapter, rank: int, part: Part, array: Array) -> Array:
        share = self._dims.share(part, self._degree, rank)
        return merged(adapter, self._dims, part, share, array)

    def _holder(self, part: Part) -> int:
        """Return the source rank that has an expert; the first for what is no expert's."""
        if part.expert is None:
            return 0
        return part.expert // self._dims.experts_of_a_rank(part.layer, self._source_degree)

    def _part(self, rank: int, part: Part) -> Array:
        """Return a part [out, in], or the vector of a bias or norm."""
        if part.expert is not None:
            return self._read(self._holder(part), part)
        if self._degree == self._source_degree:
            return self._read(rank, part)
        axis = SPLIT_AXIS[part.name] or 0
        source = self._source_degree if self._dims.splits(part, self._source_degree) else 1
        target = self._degree if self._dims.splits(part, self._degree) else 1
        # counted in units, of which a source rank holds and the target rank wants a whole number
        units = math.lcm(source, target)
        held, wanted = units // source, units // target
        start = rank % target * wanted
        found = []
        for tp in range(start // held, -(-(start + wanted) // held)):
            share = np.split(self._read(tp, part), held, axis)
            found += share[max(start - tp * held, 0) : start + wanted - tp * held]
        return found[0] if len(found) == 1 else np.concatenate(found, axis)

    def _read(self, tp: int, part: Part) -> Array:
        ref, place = self._pieces[tp][part]
        if ref not in self._kept:
            self._kept[ref] = self._dims.take_apart(place, ref.read(), self._source_degree, tp)
        return self._kept[ref][part]
