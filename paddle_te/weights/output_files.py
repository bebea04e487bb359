"""Plan which tensors a converted checkpoint has, each in which file; nothing is read or written here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from paddle_te.configs.families import is_tied
from paddle_te.weights.folder import Checkpoint, file_name, index_name, variant
from paddle_te.weights.layout import Layout, Part, Place
from paddle_te.weights.tensors import CheckpointError, StoredTensor, TensorSpec


@dataclass(frozen=True)
class Entry:
    """One tensor to write: what it is called, and the Place that says how it is made.

    kind: "" for a weight, else the kind of optimizer state.
    """

    spec: TensorSpec
    place: Place
    kind: str = ""


@dataclass(frozen=True)
class OutputFile:
    """One file to write: the tensor parallel rank it belongs to (0 if there is one), and its entries."""

    name: str
    tp: int
    entries: list[Entry]

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data."""
        return sum(entry.spec.nbytes for entry in self.entries)


class Plan(NamedTuple):
    """The files of a checkpoint, and {index file: content}.

    Files of a group hold shares of the same tensors, so that each of these is read once for all of them.
    """

    groups: list[list[OutputFile]]
    indexes: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Target:
    """What to convert to: the layout, ".pdparams" or ".safetensors", and the degrees of parallelism.

    dtype: of the tensors; None: as they are. max_shard_size: bytes above which a rank's file is written in shards.
    """

    layout: Layout
    suffix: str
    tp: int
    pp: int
    vp: int = 1
    dtype: str | None = None
    max_shard_size: float = math.inf


def plan_same_ranks(checkpoint: Checkpoint, target: Target) -> Plan:
    """Plan files with the input's ranks and shards, each in a group by itself.

    A tensor goes to the file in which its first part was, and what is too large there to further shards; shards that
    are left empty are dropped.
    """
    files: list[list[OutputFile]] = []
    indexes: dict[str, dict[str, Any]] = {}
    for rank in checkpoint.ranks.values():
        source = pieces(checkpoint, rank.tensors, rank.tp or 0)
        by_file: dict[Path, list[Entry]] = {path: [] for path in rank.files}
        for place in target.layout.tensors(checkpoint.dims.spec):
            parts = checkpoint.dims.parts(place, checkpoint.tp, rank.tp or 0)
            found = [source[part][0] for part in parts if part in source]
            if not found:
                continue  # another pipeline stage's
            if len(found) < len(parts):
                name = target.layout.full_name(place)
                raise CheckpointError(f"{found[0].path}: not all parts of {name!r} are on this pipeline stage")
            by_file[found[0].path].append(_entry(checkpoint, target, place, found[0].dtype))
        groups = [shard for entries in by_file.values() if entries for shard in shards(entries, target.max_shard_size)]
        old_index = {} if rank.index is None and len(groups) > 1 else rank.index
        made, index = _rank_files(target.suffix, rank.tp or 0, rank.variant, groups, old_index)
        files += [[file] for file in made]
        indexes |= index
    return Plan(files, indexes)


def plan_new_ranks(checkpoint: Checkpoint, target: Target, always_index: bool = False) -> Plan:
    """Plan files for other degrees.

    always_index: a rank's single file gets an index, too.
    """
    files: list[list[OutputFile]] = []
    indexes: dict[str, dict[str, Any]] = {}
    dims = checkpoint.dims
    dtypes = {
        key: ref.dtype
        for rank in checkpoint.ranks.values()
        for key, (ref, _) in pieces(checkpoint, rank.tensors, rank.tp or 0).items()
    }
    stage_of = pipeline_stages(dims.num_hidden_layers, target.pp, target.vp)
    if target.pp > 1 and is_tied(checkpoint.config):
        raise CheckpointError(
            f"{checkpoint.folder}: tied embeddings are not divided into pipeline stages; give "
            "--pipeline_parallel_degree 1: a run with pipeline stages splits a whole checkpoint itself"
        )
    places = [(place, dims.parts(place)[0]) for place in target.layout.tensors(dims.spec)]
    for pp in range(target.pp):
        entries = [
            _entry(checkpoint, target, place, dtypes[part])
            for place, part in places
            if part in dtypes and stage_of(part) == pp
        ]
        groups, ranks = shards(entries, target.max_shard_size), []
        for tp in range(target.tp):
            rank_variant = variant(tp if target.tp > 1 else None, pp if target.pp > 1 else None)
            old_index: dict[str, Any] | None = {} if always_index or len(groups) > 1 else None
            made, index = _rank_files(target.suffix, tp, rank_variant, groups, old_index)
            ranks.append(made)
            indexes |= index
        files += [list(shares) for shares in zip(*ranks, strict=True)]
    return Plan(files, indexes)


def pieces(
    checkpoint: Checkpoint, tensors: Mapping[str, StoredTensor], rank: int
) -> dict[Part, tuple[StoredTensor, Place]]:
    """Return {Part: (tensor, its Place)} of a tensor parallel rank's stored tensors by name."""
    found: dict[Part, tuple[StoredTensor, Place]] = {}
    for name, ref in tensors.items():
        place = checkpoint.layout.place(name)
        found |= dict.fromkeys(checkpoint.dims.parts(place, checkpoint.tp, rank), (ref, place))
    return found


def _entry(checkpoint: Checkpoint, target: Target, place: Place, dtype: str) -> Entry:
    shape = checkpoint.dims.slot_shape(place, target.tp)
    return Entry(TensorSpec(target.layout.full_name(place), target.dtype or dtype, shape), place)


def shards(entries: Iterable[Entry], max_shard_size: float) -> list[list[Entry]]:
    """Divide entries, in order, into groups of at most max_shard_size bytes, as PaddleNLP's shard_checkpoint does."""
    groups: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if groups[-1] and size + entry.spec.nbytes > max_shard_size:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += entry.spec.nbytes
    return groups


def _rank_files(
    suffix: str, tp: int, rank_variant: str, groups: Sequence[list[Entry]], index: dict[str, Any] | None
) -> tuple[list[OutputFile], dict[str, dict[str, Any]]]:
    """Return one rank's files and {index file: content}; `index`: the old index, whose other keys stay, or None."""
    count = len(groups) if index is not None else None
    files = [
        OutputFile(file_name(suffix, rank_variant, count and number, count), tp, entries)
        for number, entries in enumerate(groups, 1)
    ]
    if index is None:
        return files, {}
    metadata = (index.get("metadata") or {}) | {"total_size": sum(file.nbytes for file in files)}
    return files, {index_name(suffix, rank_variant): index | {"metadata": metadata, "weight_map": weight_map(files)}}


def weight_map(files: Iterable[OutputFile]) -> dict[str, str]:
    """Return {tensor's name: its file's} of OutputFiles, as an index has it."""
    return {entry.spec.name: file.name for file in files for entry in file.entries}


def check_degrees(
    checkpoint: Checkpoint, layout: Layout, tp: int | None = None, pp: int | None = None, vp: int | None = None
) -> None:
    """Raise CheckpointError for degrees (None: 1) that a Checkpoint's model, in a Layout, cannot be split into."""
    for place in layout.tensors(checkpoint.dims.spec):
        if not place.expert:  # all experts are divided alike
            checkpoint.dims.slot_shape(place, tp or 1)
    pipeline_stages(checkpoint.dims.num_hidden_layers, pp or 1, vp or 1)


def pipeline_stages(num_layers: int, degree: int, virtual_degree: int = 1) -> Callable[[Part], int]:
    """Return a function Part -> pipeline stage, as Paddle's SegmentLayers divides PaddleNLP's models.

    The items are embeddings, layers, norm and lm_head. Layers that `degree` divides are dealt evenly, chunk by chunk
    with virtual stages; otherwise the items are (paddle/distributed/fleet/meta_parallel/parallel_layers/pp_layers.py).
    Raises CheckpointError for degrees that PaddleNLP cannot run.
    """
    items, chunks = num_layers + 3, degree * virtual_degree
    if degree > items:
        raise CheckpointError(f"pipeline_parallel_degree={degree}: the model has only {items} parts to spread")
    if virtual_degree > 1 and num_layers % chunks:
        raise CheckpointError(
            f"virtual_pp_degree={virtual_degree} with pipeline_parallel_degree={degree}: {num_layers} layers cannot be "
            f"divided into {chunks} equal chunks"
        )
    if num_layers % degree == 0:
        size = num_layers // chunks
        starts = [0, *(1 + size * chunk for chunk in range(1, chunks))]
    else:
        size, longer = divmod(items, degree)
        starts = [stage * size + max(0, stage - (degree - longer)) for stage in range(degree)]

    def stage_of(part: Part) -> int:
        outside = {"embed": 0, "positions": 0, "norm": num_layers + 1, "norm_bias": num_layers + 1}
        item = outside.get(part.name, num_layers + 2) if part.layer is None else part.layer + 1
        return max(chunk for chunk, start in enumerate(starts) if start <= item) % degree

    return stage_of
