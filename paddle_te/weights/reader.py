"""Reads a checkpoint in another layout and another degree of tensor parallelism than it is stored in."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np

from paddle_te.weights import layout
from paddle_te.weights.adapters.files import Adapter
from paddle_te.weights.adapters.merging import merged
from paddle_te.weights.folder import Checkpoint, open_checkpoint
from paddle_te.weights.layout import SPLIT_AXIS, Layout, Slot
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
    for number, slot in target.tensors(checkpoint.dims.num_hidden_layers):
        name = target.full_name(number, slot)
        if name not in names or not reader.has(number, slot):
            continue
        if numbers:
            yield name, reader.number(tensor_parallel_rank, number, slot)[0]
        else:
            shape = checkpoint.dims.slot_shape(slot, tensor_parallel_degree)
            array = layout.concat(reader.blocks(tensor_parallel_rank, number, slot), 0)
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
            self._pieces.append(pieces(checkpoint, {name: ref for rank in ranks for name, ref in rank.tensors.items()}))
        self._kept: dict[tuple[int | None, StoredTensor], dict[str, Array]] = {}  # (layer, tensor): its parts

    def has(self, layer: int | None, slot: Slot) -> bool:
        """Return whether the checkpoint has the slot's parts: one with tied embeddings may have no lm_head."""
        return all((layer, part) in self._pieces[0] for part in slot.parts)

    def blocks(self, rank: int, layer: int | None, slot: Slot) -> list[Array]:
        """Return the target rank's stored tensor of a slot, as arrays whose bytes follow one another."""
        self._kept = {  # what other ranks, or the slot of another part of it, will ask for again
            key: parts for key, parts in self._kept.items() if key[0] == layer and parts.keys() & {*slot.parts}
        }
        parts = {part: self._part(rank, layer, part) for part in slot.parts}
        if self._adapter is not None and self._adapter.touches(layer, slot.parts):
            parts = {part: self._merged(self._adapter, rank, layer, part, array) for part, array in parts.items()}
        if slot.transposed:
            return [layout.put_together(slot, parts, self._dims.head_dim)]
        return layout.stack(slot, parts, self._dims.head_dim)

    def number(self, rank: int, layer: int | None, slot: Slot) -> list[Array]:
        """Return the number [1] that belongs to a slot's tensors, a power of beta: the same for all its parts."""
        numbers = {part: self._pieces[0][layer, part][0].read() for part in slot.parts}
        first = numbers[slot.parts[0]]
        if any(number.tobytes() != first.tobytes() for number in numbers.values()):
            raise CheckpointError(
                f"{self._pieces[0][layer, slot.parts[0]][0].path}: {slot.name}: parts of different age"
            )
        return [first]

    def _merged(self, adapter: Adapter, rank: int, layer: int | None, part: str, array: Array) -> Array:
        share = self._dims.share(part, self._degree, rank)
        return merged(adapter, self._dims, (layer, part), share, array)

    def _part(self, rank: int, layer: int | None, part: str) -> Array:
        """Return a part [out, in], or the vector of a bias or norm."""
        if self._degree == self._source_degree:
            return self._read(rank, layer, part)
        axis = SPLIT_AXIS[part] or 0
        source = self._source_degree if self._dims.splits(part, self._source_degree) else 1
        target = self._degree if self._dims.splits(part, self._degree) else 1
        # counted in units, of which a source rank holds and the target rank wants a whole number
        units = math.lcm(source, target)
        held, wanted = units // source, units // target
        start = rank % target * wanted
        found = []
        for tp in range(start // held, -(-(start + wanted) // held)):
            share = np.split(self._read(tp, layer, part), held, axis)
            found += share[max(start - tp * held, 0) : start + wanted - tp * held]
        return found[0] if len(found) == 1 else np.concatenate(found, axis)

    def _read(self, tp: int, layer: int | None, part: str) -> Array:
        ref, slot = self._pieces[tp][layer, part]
        if (layer, ref) not in self._kept:
            dims = self._dims
            self._kept[layer, ref] = layout.take_apart(slot, ref.read(), dims.queries, dims.head_dim)
        return self._kept[layer, ref][part]
