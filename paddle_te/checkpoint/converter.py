"""Converts a checkpoint folder to another layout, tensor by tensor."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from paddle_te.checkpoint import layout as layouts
from paddle_te.checkpoint import pdparams, safetensors
from paddle_te.checkpoint.folder import (
    check_new,
    copy_file,
    file_name,
    index_name,
    new_folder,
    open_checkpoint,
    write_json,
)
from paddle_te.checkpoint.layout import Slot
from paddle_te.checkpoint.tensors import CheckpointError, TensorSpec

MODES = {"pd2te": ("pd", "te"), "te2pd": ("te", "pd")}

# In a te checkpoint's config.json: how the native checkpoint it was made from was fused, so that te2pd gives it back
RECORD = "paddle_te_native_layout"
_FUSE_FLAGS = ("fuse_attention_qkv", "fuse_attention_ffn")


@dataclass(frozen=True)
class Entry:
    """One tensor to write: what it is called, and the layer and slot that say how it is made."""

    spec: TensorSpec
    layer: int | None
    slot: Slot


@dataclass
class OutputFile:
    """One file to write and its entries."""

    name: str
    rank: object
    entries: list

    @property
    def nbytes(self):
        """Bytes of tensor data."""
        return sum(entry.spec.nbytes for entry in self.entries)


class _Reader:
    """Reads parts of the model from one rank's tensors; keeps the last stored tensor for its other parts."""

    def __init__(self, checkpoint, rank):
        self._dims = checkpoint.dims
        self._pieces = pieces(checkpoint, rank)
        self._last = None, None

    def part(self, layer, part):
        ref, slot = self._pieces[layer, part]
        if self._last[0] != ref:
            self._last = None, None  # free it before the next one is read
            self._last = ref, self._take_apart(ref, slot)
        return self._last[1][part]

    def _take_apart(self, ref, slot):
        return layouts.take_apart(slot, ref.read(), self._dims.num_attention_heads, self._dims.num_key_value_heads)


def pieces(checkpoint, rank):
    """{(layer or None, part): (TensorRef, Slot)} of what a rank's files hold."""
    found = {}
    for name, ref in rank.tensors.items():
        layer, slot = checkpoint.layout.find(name)
        found |= {(layer, part): (ref, slot) for part in slot.parts}
    return found


def convert(
    input_path,
    output_path,
    mode,
    num_attention_heads=None,
    num_key_value_heads=None,
    fuse_attention_qkv=None,
    fuse_attention_ffn=None,
    progress=True,
):
    """Converts a checkpoint folder into a new one; the input is only read.

    Args:
        input_path, output_path: folders; the output must be new or empty. It appears only when it is complete.
        mode: "pd2te" (PaddleNLP's native layout to Transformer Engine's) or "te2pd".
        num_attention_heads, num_key_value_heads: needed only when the folder has no config.json.
        fuse_attention_qkv, fuse_attention_ffn: te2pd: fuse the native weights so; None: as they were before pd2te
            (noted in config.json), else not fused.
        progress: show a progress bar.

    Returns: the names of files in the input folder that were not carried over (a Trainer's own state).
    Raises CheckpointError, before anything is written, for an input or arguments that do not fit, and OSError.
    """
    if mode not in MODES:
        raise CheckpointError(f"mode {mode!r}: it may be one of {', '.join(MODES)}")
    input_path, output_path = Path(input_path), Path(output_path)
    _check_apart(input_path, output_path)
    check_new(output_path)
    checkpoint = open_checkpoint(input_path, num_attention_heads, num_key_value_heads)
    _check_mode(checkpoint, mode)
    target = _target_layout(checkpoint, mode, fuse_attention_qkv, fuse_attention_ffn)
    files = [file for rank in checkpoint.ranks.values() for file in _plan(checkpoint, rank, target)]
    total = sum(file.nbytes for file in files)
    _check_space(output_path, total)
    bar = tqdm(total=total, unit="B", unit_scale=True, desc=f"writing {output_path}", disable=not progress)
    with bar, new_folder(output_path) as folder:
        for file in files:
            _write_file(checkpoint, folder, file, bar)
        for name in checkpoint.companions:
            copy_file(checkpoint.folder / name, folder / name)
        if checkpoint.config is not None:
            write_json(folder / "config.json", _config(checkpoint, target))
        for rank in checkpoint.ranks.values():
            if rank.index is not None:
                _write_index(checkpoint, folder, rank, [file for file in files if file.rank is rank])
    return checkpoint.left_out


def _check_apart(input_path, output_path):
    source, target = input_path.resolve(), output_path.resolve()
    if source == target or source in target.parents:
        raise CheckpointError(f"{output_path}: the output lies inside the input {input_path}; choose another place")
    if target in source.parents:
        raise CheckpointError(f"{output_path}: the input {input_path} lies inside the output; choose another place")


def _check_mode(checkpoint, mode):
    family = MODES[mode][0]
    if checkpoint.layout.family != family:
        fitting = [m for m, (source, _) in MODES.items() if source == checkpoint.layout.family]
        hint = f"; --mode may be {' or '.join(fitting)}" if fitting else ""
        raise CheckpointError(f"{checkpoint.folder}: is in {checkpoint.layout.title} layout, not one for {mode}{hint}")


def _target_layout(checkpoint, mode, fuse_attention_qkv, fuse_attention_ffn):
    given = dict(zip(_FUSE_FLAGS, (fuse_attention_qkv, fuse_attention_ffn), strict=True))
    config = checkpoint.config or {}
    tied = bool(config.get("tie_word_embeddings"))
    if MODES[mode][1] == "pd":
        recorded = config.get(RECORD, {})
        flags = {k: bool(recorded.get(k)) if value is None else value for k, value in given.items()}
        return layouts.native_layout(**flags, tied=tied)
    for flag, value in given.items():
        if value is not None:
            raise CheckpointError(f"--{flag}: only for a conversion to PaddleNLP's native layout, not for {mode}")
    return layouts.te_layout(tied)


def _plan(checkpoint, rank, target):
    """The OutputFiles of one rank: a tensor goes where its first part was; shards left empty are dropped."""
    dims, source = checkpoint.dims, pieces(checkpoint, rank)
    entries = {path: [] for path in rank.files}
    for layer, slot in target.tensors(dims.num_hidden_layers):
        found = [source[layer, part][0] for part in slot.parts if (layer, part) in source]
        if not found:
            continue  # another pipeline stage's
        name = target.full_name(layer, slot)
        if len(found) < len(slot.parts):
            raise CheckpointError(f"{found[0].path}: the parts of {name!r} are in files of different pipeline stages")
        spec = TensorSpec(name, found[0].dtype, dims.slot_shape(slot, checkpoint.tp))
        entries[found[0].path].append(Entry(spec, layer, slot))
    filled = [found for found in entries.values() if found]
    shards = len(filled) if rank.index is not None else None
    return [
        OutputFile(file_name(checkpoint.suffix, rank.variant, shards and number, shards), rank, found)
        for number, found in enumerate(filled, 1)
    ]


def _check_space(output_path, total):
    parent = Path(os.path.abspath(output_path)).parent
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if total > free:
        raise CheckpointError(
            f"{output_path}: needs {total / 1e9:.1f} GB, but {parent} has only {free / 1e9:.1f} GB free"
        )


def _write_file(checkpoint, folder, file, bar):
    reader, dims = _Reader(checkpoint, file.rank), checkpoint.dims

    def arrays():
        for entry in file.entries:
            parts = {part: reader.part(entry.layer, part) for part in entry.slot.parts}
            yield layouts.put_together(entry.slot, parts, dims.num_attention_heads, dims.num_key_value_heads)
            bar.update(entry.spec.nbytes)

    formats = {".pdparams": pdparams, ".safetensors": safetensors}
    formats[checkpoint.suffix].write(folder / file.name, [entry.spec for entry in file.entries], arrays())


def _write_index(checkpoint, folder, rank, files):
    weight_map = {entry.spec.name: file.name for file in files for entry in file.entries}
    metadata = (rank.index.get("metadata") or {}) | {"total_size": sum(file.nbytes for file in files)}
    index = rank.index | {"metadata": metadata, "weight_map": weight_map}
    write_json(folder / index_name(checkpoint.suffix, rank.variant), index)


def _config(checkpoint, target):
    """config.json of the output. A te checkpoint notes how its native one was fused.

    PaddleNLP takes its own fuse flags from arguments, not from config.json, so they would say nothing there.
    """
    config = {key: value for key, value in checkpoint.config.items() if key != RECORD}
    fused = {flag: getattr(checkpoint.layout, flag) for flag in _FUSE_FLAGS}
    return config | {RECORD: fused} if target.family == "te" and any(fused.values()) else config
