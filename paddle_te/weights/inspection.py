"""What a checkpoint folder holds, as text: layout, dtypes, degrees, step and every tensor's name and shape.

Reads names, shapes and places, no tensor.
"""

from __future__ import annotations

from math import prod
from pathlib import Path

from paddle_te.manifest import MANIFEST
from paddle_te.table import in_columns
from paddle_te.weights.contents import TRAINER_STATE, read_state
from paddle_te.weights.folder import Checkpoint, open_checkpoint
from paddle_te.weights.optimizer import STATE_FILES, is_unified
from paddle_te.weights.resharding import saved_degrees


def inspect(folder: str | Path, num_attention_heads: int | None = None, num_key_value_heads: int | None = None) -> str:
    """The description of a checkpoint, lines of text: facts first, then a table of the tensors.

    The ranks of tensor parallelism have tensors of the same names and shapes, so the table lists those of the first.
    Arguments and errors as `open_checkpoint`'s, and CheckpointError for a damaged trainer_state.json.
    """
    checkpoint = open_checkpoint(folder, num_attention_heads, num_key_value_heads)
    facts = _facts(checkpoint)
    width = max(map(len, facts))
    return "\n".join(
        [*(f"{name:<{width}}  {fact}" for name, fact in facts.items()), "", *in_columns(_rows(checkpoint))]
    )


def _facts(checkpoint: Checkpoint) -> dict[str, str]:
    tensors = [ref for rank in checkpoint.ranks.values() for ref in rank.tensors.values()]
    files = checkpoint.files
    size = sum(ref.nbytes for ref in tensors)
    return {
        "folder": str(checkpoint.folder),
        "model": f"{checkpoint.layout.family.title}, {checkpoint.dims.num_hidden_layers} layers",
        "layout": f"{checkpoint.layout.title}",
        "parameters": f"{_parameters(checkpoint):,}",
        "dtypes": ", ".join(sorted({ref.dtype for ref in tensors})),
        "weights": f"{len(files)} {checkpoint.suffix} file{'s' * (len(files) > 1)}, {size / 1e9:,.3f} GB",
        "degrees": str(saved_degrees(checkpoint) or "whole tensors (unified checkpoint)"),
        "optimizer": _optimizer(checkpoint),
        "step": _step(checkpoint.folder),
        "manifest": _manifest(checkpoint.folder),
    }


def _parameters(checkpoint):
    """How many numbers the whole model has; a tied lm_head that is stored too counts again."""
    slots = {
        (layer, slot) for rank in checkpoint.ranks.values() for layer, slot in map(checkpoint.layout.find, rank.tensors)
    }
    return sum(prod(checkpoint.dims.slot_shape(slot)) for _, slot in slots)


def _optimizer(checkpoint):
    if is_unified(checkpoint.folder):
        return "whole tensors (unified checkpoint)"
    files = [name for name in checkpoint.left_out if STATE_FILES.fullmatch(name) and name.endswith(".pdopt")]
    return f"{len(files)} .pdopt file{'s' * (len(files) > 1)}" if files else "none"


def _manifest(folder):
    there = (folder / MANIFEST).is_file()
    return f"not compared; paddle-te verify {folder} compares it" if there else "none"


def _step(folder):
    return str(read_state(folder).global_step) if (folder / TRAINER_STATE).is_file() else f"no {TRAINER_STATE}"


def _rows(checkpoint):
    rows = [("tensor", "shape", "whole shape", "dtype", "file")]
    for rank in checkpoint.ranks.values():
        if rank.tp in (None, 0):
            for name, ref in rank.tensors.items():
                whole = checkpoint.dims.slot_shape(checkpoint.layout.find(name)[1])
                rows.append((name, str(list(ref.shape)), str(list(whole)), ref.dtype, ref.path.name))
    return rows
