"""Move the optimizer's state, Adam's moments and the master weights, as the weights they belong to.

Muon's momentum of a matrix has the name of Adam's first moment. Such a matrix has no second moment and no powers.

PaddleNLP has two forms, and both are read. optimizer.pdopt, or a file of each rank such as
optimizer.tp00_pp01_shard02.pdopt, names a parameter as the program did. A unified checkpoint
(optimizer.safetensors.index.json) names it as the model does. The converter writes a unified checkpoint of whole
tensors. The Trainer resumes from it in any degrees with --unified_checkpoint 1
(paddlenlp/trainer/unified_checkpoint/load_save_single_card.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

from paddle_te.configs.families import is_tied
from paddle_te.weights import pdparams, safetensors
from paddle_te.weights.blocks import BlocksRef, moment_shape
from paddle_te.weights.folder import Checkpoint, Rank, read_index
from paddle_te.weights.frozen import frozen_in
from paddle_te.weights.layout import Layout
from paddle_te.weights.output_files import Entry, OutputFile, Plan, Target, plan_new_ranks, shards, weight_map
from paddle_te.weights.tensors import CheckpointError, Shape, SlicedRef, StackedRef, StoredTensor, same_bytes

State: TypeAlias = dict[str, dict[str, StoredTensor]]  # {kind: {weight's name: its state of that kind}}

MOMENTS = ("moment1_0", "moment2_0")
POWERS = ("beta1_pow_acc_0", "beta2_pow_acc_0")  # one number a parameter
ADAMS = (MOMENTS[1], *POWERS)  # what a matrix that Muon updates does not have
MASTER = "master_weights"
_KEY = re.compile(rf"(?P<name>.+?)(_fp32_master_0)?_(?P<kind>{'|'.join(MOMENTS + POWERS)})")

# In sharding stage 3 a rank keeps a slice of each large flat parameter (group_sharded_stage3.py). In stage 1 with
# split_param it keeps the part that lies in its share of a bucket, which may be empty (ShardingGradView in
# tensor_fusion_helper.py). The slices follow one another in the order of the ranks, with zeros behind the last.
_SLICE = "slice@"
_PADDING = 512  # at most so many elements a rank: Paddle aligns to 256 bytes
# Files of the state itself, in both forms, and of signals that it has been saved
STATE_FILES = re.compile(r"optimizer\b.*|master_weights\b.*|saved_signal_\d+")
# Further files that a Trainer needs to resume. training_args.bin is left out: it is a pickle that nobody reads.
_TRAINER_FILES = re.compile(r"trainer_state\.json|scheduler\.pdparams|scaler\.pdparams|rng_state.*\.pth")
# Only te's layers have it: PaddleNLP's have no fp8. Its names are the whole model's, whatever the degrees.
_FP8_STATE = re.compile(r"fp8_state\.pp\d+\.pdparams")


def kept_how(folder: Path) -> dict[str, str]:
    """Return the flags optim, optim_moments and master_weights with which a checkpoint's optimizer state was saved.

    A flag is left out where the folder has no such state. The dtypes come from one file, because all ranks have the
    same. The optimizer's name needs all files, because a sharding rank may have no matrix. Raises CheckpointError.
    """
    if is_unified(folder):
        state = _unified_state(folder)
        moments, masters = (list(state.get(kind, {}).values()) for kind in (MOMENTS[0], MASTER))
        momentum_only = len(moments) > len(state.get(MOMENTS[1], {}))
    else:
        files = sorted(folder.glob("optimizer*.pdopt"))
        named, master = pdparams.read_optimizer(files[0]) if files else ({}, {})
        moments = [ref for key, ref in named.items() if key.endswith(MOMENTS[0])]
        masters = list(master.values())
        momentum_only = any(_has_momentum_only(pdparams.read_optimizer(file)[0]) for file in files)
    found = {}
    if moments:
        found["optim"] = "muon" if momentum_only else "adamw"
        found["optim_moments"] = moments[0].dtype
    if masters:
        remainder = any(ref.dtype == "int16" for ref in masters)  # a float32 weight is its own master weight
        found["master_weights"] = "bf16_remainder" if remainder else "float32"
    return found


def trainer_files(names: Iterable[str], source: Layout, target: Layout) -> list[str]:
    """Return a folder's files that are carried over with the optimizer from one Layout to another."""
    fp8 = source.kind == target.kind == "te"
    return [name for name in names if _TRAINER_FILES.fullmatch(name) or fp8 and _FP8_STATE.fullmatch(name)]


def open_optimizer(checkpoint: Checkpoint) -> dict[str, Checkpoint]:
    """Return {kind: Checkpoint whose tensors are the weights' state of that kind}; kinds as MOMENTS and so on.

    Frozen weights have no state. Raises CheckpointError where something is missing or does not fit together.
    """
    if is_unified(checkpoint.folder):
        found = {key: _unified(checkpoint) for key in checkpoint.ranks}
    else:
        found = {key: _pdopt(checkpoint, rank) for key, rank in checkpoint.ranks.items()}
    has_masters, is_frozen = any(MASTER in state for state in found.values()), frozen_in(checkpoint.folder)
    momentum_only = _with_momentum_only(checkpoint, found)
    opened = {}
    for kind in (*MOMENTS, *POWERS, *[MASTER] * has_masters):
        lacking = momentum_only if kind in ADAMS else set[str]()
        has_none = partial(_is_one_of, is_frozen, lacking)
        ranks = {key: _fill(checkpoint, rank, found[key], kind, has_none) for key, rank in checkpoint.ranks.items()}
        opened[kind] = replace(checkpoint, ranks=ranks)
    return opened


def _is_one_of(is_frozen: Callable[[str], object], lacking: Collection[str], name: str) -> bool:
    return bool(is_frozen(name)) or name in lacking


def _has_momentum_only(named: Iterable[str]) -> bool:
    """Return whether a weight has a first moment but no second one, by the keys of a file's states."""
    first, second = ({key.removesuffix(kind) for key in named if key.endswith(kind)} for kind in MOMENTS)
    return bool(first - second)


def _with_momentum_only(checkpoint: Checkpoint, found: Mapping[Any, State]) -> set[str]:
    """Return the names of the weights that Muon has trained: if any, all matrices of decoder layers but routers.

    found: each rank's state. A state that lacks only some of these weights' second moments is not Muon's.
    """
    first, second = ({name for state in found.values() for name in state.get(kind, {})} for kind in MOMENTS)
    alone = first - second
    return alone if alone == {name for name in first if checkpoint.layout.is_matrix(name)} else set()


def plan_optimizer(state: Mapping[str, Checkpoint], target: Target) -> Plan:
    """Plan the files of an opened optimizer as a unified checkpoint."""
    groups: list[list[OutputFile]] = []
    indexes: dict[str, dict[str, Any]] = {}
    stems = {"optimizer": MOMENTS + POWERS, MASTER: (MASTER,)}
    for stem, kinds in stems.items():
        entries = [
            _of_kind(entry, kind)
            for kind in kinds
            if kind in state
            for (file,) in plan_new_ranks(state[kind], target)[0]
            for entry in file.entries
        ]
        if entries:
            parts = shards(entries, target.max_shard_size)
            names = [f"{stem}-{n:05d}-of-{len(parts):05d}{safetensors.SUFFIX}" for n in range(1, len(parts) + 1)]
            files = [OutputFile(name, 0, part) for name, part in zip(names, parts, strict=True)]
            groups += [[file] for file in files]
            index: dict[str, Any] = {
                "metadata": {"total_size": sum(file.nbytes for file in files)},
                "weight_map": weight_map(files),
            }
            if stem == "optimizer":
                index["master_weights"] = MASTER in state
            indexes[safetensors_index(stem)] = index
    return Plan(groups, indexes)


def _of_kind(entry: Entry, kind: str) -> Entry:
    spec = entry.spec
    if kind != MASTER:
        spec = replace(spec, name=f"{spec.name}/{kind}", shape=(1,) if kind in POWERS else spec.shape)
    return replace(entry, spec=spec, kind=kind)


def is_unified(folder: Path) -> bool:
    """Return whether a training checkpoint's optimizer is a unified one, of whole tensors."""
    return (folder / safetensors_index("optimizer")).exists()


def safetensors_index(stem: str) -> str:
    """Return the name of a unified checkpoint's index."""
    return f"{stem}.safetensors.index.json"


def _fill(checkpoint: Checkpoint, rank: Rank, found: State, kind: str, has_none: Callable[[str], object]) -> Rank:
    """Return the rank with each weight replaced by its state of one kind, without the weights that `has_none` names."""
    tied = is_tied(checkpoint.config)
    embedding, head = (checkpoint.layout.model_name(part) for part in ("embed", "lm_head"))
    other_name = {embedding: head, head: embedding} if tied else {}
    tensors = {}
    for name, weight in rank.tensors.items():
        if checkpoint.layout.place(name).slot.parts == ("expert_bias",):
            continue  # no optimizer moves it
        ref = found.get(kind, {}).get(name)
        if ref is None and kind == MASTER and weight.dtype == "float32":
            ref = weight  # a float32 weight needs no master; PaddleNLP writes it as its own
        if ref is None:  # tied: one parameter with one state, under one of its two names; readers want either
            ref = found.get(kind, {}).get(other_name.get(name, name))
        if ref is None and (has_none(name) or has_none(other_name.get(name, name))):
            continue
        if ref is None:
            raise CheckpointError(f"{checkpoint.folder}: the optimizer's state has no {kind} of {name!r}")
        if kind in MOMENTS and ref.dtype == "int8" and ref.shape == moment_shape(weight.shape):
            ref = BlocksRef(ref, weight.shape)
        if ref.shape != ((1,) if kind in POWERS else weight.shape):
            raise CheckpointError(
                f"{ref.path}: {kind} of {name!r} has shape {list(ref.shape)}, the weight {list(weight.shape)}"
            )
        tensors[name] = ref
    return Rank(rank.tp, rank.pp, rank.files, tensors, rank.index)


def _unified(checkpoint: Checkpoint) -> State:
    """Return the state in a unified checkpoint."""
    if (checkpoint.tp, checkpoint.pp) != (1, 1):
        raise CheckpointError(f"{checkpoint.folder}: a unified optimizer beside weights of single ranks")
    return _unified_state(checkpoint.folder)


def _unified_state(folder: Path) -> State:
    found: State = {}
    for stem in ("optimizer", MASTER):
        index = folder / safetensors_index(stem)
        if not index.exists():
            continue
        for key, ref in read_index(index, safetensors)[0].items():
            name, _, kind = key.partition("/")
            found.setdefault(kind or stem, {})[name] = ref
    return found


def _pdopt(checkpoint: Checkpoint, rank: Rank) -> State:
    """Return the state in one rank's .pdopt files: one, or one for each sharding rank."""
    pattern = ".".join(["optimizer", *([rank.variant] if rank.variant else [])])
    exact = checkpoint.folder / f"{pattern}.pdopt"
    files = [exact] if exact.exists() else shard_files(checkpoint.folder, rank.variant)
    if not files:
        raise CheckpointError(f"{exact}: missing; --with_optimizer, and resuming in other degrees, need it")
    if checkpoint.suffix != pdparams.SUFFIX:
        raise CheckpointError(f"{exact}: goes by names that only .pdparams weights tell; these are safetensors")
    names: dict[str, str] = {}
    for file in rank.files:
        names |= {parameter: name for name, parameter in pdparams.read_name_table(file).items()}
    parts: dict[tuple[str, str], dict[int, StoredTensor]] = {}
    found: State = {}
    for number, file in enumerate(files):
        state, master = pdparams.read_optimizer(file)
        matches = {key: match for key in state if (match := _KEY.fullmatch(key))}
        entries = [(match["kind"], match["name"], state[key]) for key, match in matches.items()]
        entries += [(MASTER, parameter, ref) for parameter, ref in master.items()]
        for kind, parameter, ref in entries:
            name = names.get(parameter.removeprefix(_SLICE))
            if name is None:
                raise CheckpointError(f"{file}: has state of {parameter!r}, which no weight is called")
            parts.setdefault((kind, name), {})[number] = ref
    for (kind, name), refs in parts.items():
        weight = rank.tensors[name]
        if isinstance(weight, StackedRef) and kind not in POWERS:
            found.setdefault(kind, {})[name] = _of_experts(refs, kind, name, weight, len(files))
            continue
        shape = (1,) if kind in POWERS else weight.shape
        found.setdefault(kind, {})[name] = _one_tensor([*refs.values()], kind, name, shape, len(files))
    return found


def _of_experts(refs: Mapping[int, StoredTensor], kind: str, name: str, weight: StackedRef, ranks: int) -> StoredTensor:
    """Return the state of experts that sharding ranks have divided, stacked as the weight is.

    refs: the states by sharding rank, of `ranks` in all. Rank r has a slice of part r modulo the number of parts.
    """
    count, whole = len(weight.parts), []
    for expert_rank, part in enumerate(weight.parts):
        mine = [ref for number, ref in sorted(refs.items()) if number % count == expert_rank]
        if not mine:
            raise CheckpointError(f"{weight.path}: the optimizer's state has no {kind} of {name!r} in {part.path.name}")
        whole.append(_one_tensor(mine, kind, name, part.shape, ranks // count))
    return StackedRef(tuple(whole))


def shard_files(folder: Path, rank_variant: str = "") -> list[Path]:
    """Return the .pdopt files of the sharding ranks that share the weights of one rank, in order; [] without sharding.

    Raises CheckpointError where a file before the last is missing.
    """
    stem = f"optimizer.{rank_variant}_shard" if rank_variant else "optimizer.shard"
    matches = {file: re.fullmatch(rf"{re.escape(stem)}(\d+)\.pdopt", file.name) for file in folder.iterdir()}
    files = {int(match[1]): file for file, match in matches.items() if match}
    for number in range(len(files)):
        if number not in files:
            raise CheckpointError(f"{folder}/{stem}{number:02d}.pdopt: missing, though other ranks' files are there")
    return [files[number] for number in range(len(files))]


def _one_tensor(refs: Sequence[StoredTensor], kind: str, name: str, shape: Shape, ranks: int) -> StoredTensor:
    """Return the tensor that the sharding ranks' files hold, in their order: each file has the whole, or a slice."""
    first, *others = refs
    in_blocks = kind in MOMENTS and first.dtype == "int8"
    whole = moment_shape(shape) if in_blocks else shape
    if first.shape == whole and all(same_bytes(first, other) for other in others):
        return first
    if in_blocks:
        refs = [BlocksRef.of_slice(ref) for ref in refs]
    sizes = [prod(ref.shape) for ref in refs]
    if kind in POWERS or not prod(shape) <= sum(sizes) <= prod(shape) + ranks * _PADDING:
        raise CheckpointError(
            f"{first.path}: {kind} of {name!r}, {sizes} elements in {ranks} sharding ranks' files, does not make a "
            f"tensor of shape {list(shape)}"
        )
    return SlicedRef(tuple(refs), shape)
